"""Measurements: the cost of a pass, methods side by side, distributions of images, and whether a method is exact."""
