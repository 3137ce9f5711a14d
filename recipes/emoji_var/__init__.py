"""The next-scale model of emoji."""
