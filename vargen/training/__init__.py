"""Data sets, losses and loops that train the small models vargen ships."""
