"""Networks as decoding sees them: one adapter per family."""
