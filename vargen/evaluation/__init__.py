"""Measurements: what a pass costs, methods side by side, distributions of pictures, and the proof that a method is exact."""
