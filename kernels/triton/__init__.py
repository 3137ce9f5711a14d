"""Kernels in Triton for NVIDIA GPUs; `vargen.kernels.dispatch` chooses between them and torch."""
