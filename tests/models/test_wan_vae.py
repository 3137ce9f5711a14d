"""Wan's autoencoder as a stream: the video decoded at once by diffusers, and a block can be taken back. And previews."""

import pytest
import torch
from rejects import rejects

from vargen.models.tokenizers.video_vae import PreviewDecoder, StreamingDecoder, WanStreamingDecoder

from diffusers import AutoencoderKLWan  # isort: skip  (after the torchvision guard)


@pytest.fixture(scope="module")
def decoder() -> WanStreamingDecoder:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, latents_mean=[0.3, -0.2, 0.1, 0.5],
        latents_std=[1.5, 0.7, 2.0, 1.0],
    ).eval().requires_grad_(False)  # fmt: skip
    return WanStreamingDecoder(vae)


def latents(frames: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, frames, 4, 3, 2, generator=torch.Generator().manual_seed(seed))


def statistics(decoder: WanStreamingDecoder) -> list[torch.Tensor]:
    """Mean and standard deviation `[C, 1, 1]`."""
    return [torch.tensor(getattr(decoder.vae.config, name))[:, None, None] for name in ("latents_mean", "latents_std")]


def at_once(decoder: WanStreamingDecoder, z: torch.Tensor) -> torch.Tensor:
    """As diffusers' pipelines do it."""
    mean, std = (each[..., None] for each in statistics(decoder))
    return decoder.vae.decode(z.transpose(1, 2) * std + mean).sample.transpose(1, 2)


def streamed(decoder, z, cuts, state=None):
    parts = []
    for part in z.split(list(cuts), 1):
        pixels, state = decoder.decode_block(part, state)
        parts.append(pixels)
    return torch.cat(parts, 1), state


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to rounding, which on some processors follows the number of frames that go through a convolution at once."""
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cuts", [(1,) * 5, (3, 2), (5,), (1, 4)])
def test_a_stream_is_the_video_decoded_at_once(decoder, cuts):
    z = latents()
    pixels, state = streamed(decoder, z, cuts)
    assert_same(pixels.clamp(-1, 1), at_once(decoder, z))
    assert pixels.shape == (2, 17, 3, 24, 16) and state.frames == 5 and isinstance(decoder, StreamingDecoder)


@pytest.mark.parametrize("taken_back_at", [0, 1, 3])
def test_a_block_that_is_taken_back_leaves_no_trace(decoder, taken_back_at):
    z, draft = latents(), latents(2, seed=1)
    before = streamed(decoder, z[:, :taken_back_at], (taken_back_at,))[1] if taken_back_at else None
    start = 0 if before is None else streamed(decoder, z[:, :taken_back_at], (taken_back_at,))[0].shape[1]
    refused, _ = decoder.decode_block(draft, before)
    instead, _ = streamed(decoder, z[:, taken_back_at:], (5 - taken_back_at,), before)
    assert_same(instead.clamp(-1, 1), at_once(decoder, z)[:, start:])
    assert (refused - instead[:, : refused.shape[1]]).abs().max() > 0.01


@pytest.fixture
def tiled(decoder) -> WanStreamingDecoder:
    """Frames of 24 x 16 pixels in six tiles of 16 x 8, or one row of them."""
    vae = AutoencoderKLWan.from_config(decoder.vae.config).eval().requires_grad_(False)
    vae.load_state_dict(decoder.vae.state_dict())
    vae.enable_tiling(16, 8, 8, 8)
    return WanStreamingDecoder(vae)


def test_tiles_keep_features_of_their_own(decoder, tiled):
    z = latents()
    whole, state = streamed(tiled, z, (5,))
    assert whole.shape == (2, 17, 3, 24, 16) and len(state.parts) == 4 * len(streamed(decoder, z, (5,))[1].parts)
    assert_same(streamed(tiled, z, (1, 4))[0], whole)
    assert_same(whole[..., :8, :8], streamed(decoder, z[..., :2, :1], (5,))[0][..., :8, :8])
    refused = tiled.decode_block(latents(2, seed=1), streamed(tiled, z[:, :3], (3,))[1])
    assert refused[1].frames == 5 and torch.equal(streamed(tiled, z, (3, 2))[0], streamed(tiled, z, (3, 2))[0])
    with pytest.raises(ValueError, match="tiling must not change"):
        decoder.decode_block(z, state)


def test_tiles_blend_and_large_ones_are_the_whole(decoder, tiled):
    z = latents()
    tiled.vae.enable_tiling(64, 64, 48, 48)
    assert torch.equal(streamed(tiled, z, (3, 2))[0], streamed(decoder, z, (3, 2))[0])
    tiled.vae.enable_tiling(16, 16, 8, 16)
    blended = streamed(tiled, z, (5,))[0]
    upper, lower = (streamed(decoder, z[..., rows, :], (5,))[0] for rows in (slice(0, 2), slice(1, 3)))
    weight = torch.arange(1, 9)[:, None] / 9  # of the lower tile, in the eight rows of both
    assert_same(blended[..., 8:16, :], upper[..., 8:, :] * (1 - weight) + lower[..., :8, :] * weight)
    assert_same(blended[..., 16:, :], lower[..., 8:, :])


def test_latents_of_pixels_are_standardised(decoder):
    pixels = torch.rand(1, 5, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    raw = decoder.vae.encode(pixels.transpose(1, 2)).latent_dist.mode().transpose(1, 2)
    mean, std = statistics(decoder)
    assert torch.allclose(decoder.encode(pixels) * std + mean, raw, atol=1e-5)
    assert decoder.encode(pixels).shape == (1, 2, 4, 2, 3)
    with pytest.raises(ValueError, match="1 \\+ a multiple of 4"):
        decoder.encode(pixels[:, :4])


def test_a_preview_keeps_nothing_of_earlier_frames():
    torch.manual_seed(0)
    preview, z = PreviewDecoder(4, (8, 8), stride=8).eval().requires_grad_(False), latents()
    whole, state = streamed(preview, z, (2, 3))
    assert torch.allclose(whole, preview(z), atol=1e-6) and whole.shape == (2, 5, 3, 24, 16)
    assert state.frames == 5 and state.parts == () and isinstance(preview, StreamingDecoder)
    rejects(lambda: preview.decode_block(torch.zeros(1, 1, 3, 2, 2)), "latents")
