"""Image and video rewards behind one interface."""
