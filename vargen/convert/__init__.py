"""Conversion of official checkpoints to diffusers-style folders."""
