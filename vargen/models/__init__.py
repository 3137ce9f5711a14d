"""Networks, and descriptions of image language models: weights in, tensors out. No sampling, no loops, no files."""

from vargen.compat import drop_empty_notices

drop_empty_notices()  # before anything of diffusers or transformers is imported
