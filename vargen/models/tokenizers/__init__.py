"""Image and video tokenizers: pixels to tokens or latents, and back."""
