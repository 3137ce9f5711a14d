"""Networks only: weights in, tensors out. No sampling, no loops, no files."""
