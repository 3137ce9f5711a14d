"""The packaged model as users get it: its size, its seeds, its batches."""

import numpy as np
import pytest
import torch

from vargen import LlamaGenPipeline


@pytest.fixture(scope="module")
def emoji() -> LlamaGenPipeline:
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_images_follow_the_prompt_and_the_seed(emoji):
    faces = emoji(["grinning face"] * 2, generator=seeded(1, 2), output_type="np").images
    assert faces.shape == (2, 128, 128, 3) and not np.allclose(faces[0], faces[1])
    middle = faces[:, 32:96, 32:96].mean((0, 1, 2))
    assert middle[0] > middle[2] + 0.2, "faces are yellow"


def test_bfloat16_keeps_its_seed_and_stays_near_float32():
    """Two runs in bfloat16 are one picture; against float32 the laws move by rounding: most of the first tokens agree."""
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    stop = {"callback_on_step_end": lambda *a: {"stop": a[1] == 10}, "output_type": "latent"}
    a, b = (pipe("grinning face", generator=seeded(5)[0], **stop).images for _ in range(2))
    assert torch.equal(a, b)
    pipe.transformer.float()
    exact = pipe("grinning face", generator=seeded(5)[0], **stop).images
    assert (a == exact).flatten()[:16].float().mean() > 0.5
