"""Infinity (Han et al. 2024): text to image, next-scale, where a token is its bits."""
