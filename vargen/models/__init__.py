"""Networks, and descriptions of image language models: weights in, tensors out. No sampling, no loops, no files."""

from vargen.compat import drop_empty_notices, ensure_torchvision

ensure_torchvision()  # before anything of diffusers or transformers is imported
drop_empty_notices()
