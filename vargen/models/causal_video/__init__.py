"""Causal video diffusion: a Wan transformer that denoises a video block by block over a cache of earlier frames."""
