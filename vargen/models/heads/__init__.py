"""Trained drafters: heads that extend the features of a target model, and the up-sampler of low-resolution tokens."""
