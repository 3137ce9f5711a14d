"""The packaged model of images in bfloat16."""

from __future__ import annotations

import torch
from tiny_families import seeded

from vargen import LlamaGenPipeline


def test_bfloat16_keeps_its_seed_and_stays_near_float32():
    """Two runs in bfloat16 are one picture; against float32 the laws move by rounding: most of the first tokens agree."""
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.bfloat16)
    stop = {"callback_on_step_end": lambda *a: {"stop": a[1] == 10}, "output_type": "latent"}
    a, b = (pipe("grinning face", generator=seeded(5)[0], **stop).images for _ in range(2))
    assert torch.equal(a, b)
    pipe.transformer.float()
    exact = pipe("grinning face", generator=seeded(5)[0], **stop).images
    assert (a == exact).flatten()[:16].float().mean() > 0.5
