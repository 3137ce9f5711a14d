"""8-bit integer products: their arithmetic in torch, and passes compiled for a CPU by Numba."""
