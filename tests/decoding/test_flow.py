"""Noise levels and the flow between noise and latents."""

import pytest
import torch

from vargen.decoding.video.denoising import add_noise, predict_clean, shift_level, shifted_levels


def test_the_warped_table_is_that_of_the_distilled_models():
    assert [1000 * level for level in shifted_levels()] == pytest.approx([1000, 937.5, 833.3333, 625])
    assert shifted_levels((1000, 757, 522), shift=8) == pytest.approx((1, 6.056 / 6.299, 4.176 / 4.654))
    assert shift_level(0) == 0 and shift_level(1) == 1 and shift_level(0.3, 1) == pytest.approx(0.3)


def test_the_velocity_leads_back_to_the_clean_latents_from_every_level():
    clean, noise = torch.randn(2, 1, 3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    for level in shifted_levels():
        assert torch.allclose(predict_clean(add_noise(clean, noise, level), noise - clean, level), clean, atol=1e-6)
    assert torch.equal(add_noise(clean, noise, 0.0), clean) and torch.equal(add_noise(clean, noise, 1.0), noise)
    half = clean.bfloat16()
    assert predict_clean(half, half, 0.5).dtype == torch.bfloat16
