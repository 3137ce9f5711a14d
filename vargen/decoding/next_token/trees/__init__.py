"""Draft trees: their shapes, their construction by drafters, and the search for the tree that maximizes tokens per second."""
