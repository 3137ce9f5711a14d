"""Scripts of dated measurements, run from the root of the repository. A package, because others install one of this name."""
