"""Adapters that implement the protocols of `vargen.decoding` for the networks of each family."""
