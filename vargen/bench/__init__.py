"""Speed: methods side by side, and the cost of a pass."""
