"""Draft trees: their shapes, how drafters grow them, and the search for the tree that commits most tokens a second."""
