"""Networks, and descriptions of image language models: weights in, tensors out. No sampling, no loops, no files."""
