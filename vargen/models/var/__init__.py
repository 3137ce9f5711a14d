"""VAR: a transformer that predicts an image scale by scale (Tian et al. 2024, arXiv:2404.02905)."""
