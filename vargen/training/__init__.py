"""Data sets, losses and training loops of the small packaged models and their drafters."""
