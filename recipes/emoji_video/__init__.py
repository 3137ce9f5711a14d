"""The block-wise video model of emoji."""
