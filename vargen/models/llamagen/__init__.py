"""LlamaGen: a Llama of image tokens, in raster order (Sun et al. 2024, arXiv:2406.06525)."""
