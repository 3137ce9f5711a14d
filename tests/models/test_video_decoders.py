"""Decoders of videos, ours, Wan's and previews: a stream is the video decoded at once, and a block can be taken back."""

import dataclasses

import pytest
import torch
from rejects import rejects
from tiny_video import randomised

from vargen.models.causal_video.cache import VideoGeometry
from vargen.models.tokenizers.video_vae import CausalVideoVAE, PreviewDecoder, StreamingDecoder, WanStreamingDecoder

from diffusers import AutoencoderKLWan  # isort: skip  (after the torchvision guard)

WAN = {
    "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1, "latents_mean": [0.3, -0.2, 0.1, 0.5],
    "latents_std": [1.5, 0.7, 2.0, 1.0],
}  # fmt: skip
KINDS = ("ours", "wan", "wan in tiles", "preview")


def make(kind: str) -> StreamingDecoder:
    """A decoder of frames with 24 x 16 pixels, or 16 x 16, with every weight random."""
    torch.manual_seed(0)
    if kind == "ours":  # in double precision, as its latents are
        vae = randomised(CausalVideoVAE(size=16, widths=(8, 16, 32), conv_blocks=1, transformer_blocks=2).double(), 0)
        vae.latent_mean.copy_(torch.randn(4))
        vae.latent_std.copy_(torch.rand(4) + 0.5)
        return vae
    if kind == "preview":
        return PreviewDecoder(4, (8, 8), stride=8).eval().requires_grad_(False)
    vae = AutoencoderKLWan(**WAN).eval().requires_grad_(False)
    if kind == "wan in tiles":  # six tiles of 16 x 8 pixels
        vae.enable_tiling(16, 8, 8, 8)
    return WanStreamingDecoder(vae)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def latents(kind: str, frames: int = 5, seed: int = 0) -> torch.Tensor:
    z = torch.randn(2, frames, 4, 3, 2, generator=torch.Generator().manual_seed(seed))
    return z[..., :2, :].double() if kind == "ours" else z


def statistics() -> list[torch.Tensor]:
    """Mean and standard deviation `[C, 1, 1]`."""
    return [torch.tensor(WAN[name])[:, None, None] for name in ("latents_mean", "latents_std")]


def decode_at_once(decoder, z: torch.Tensor) -> torch.Tensor:
    """All frames in one pass, of Wan as diffusers' pipelines do it."""
    if isinstance(decoder, WanStreamingDecoder) and not decoder.vae.use_tiling:
        mean, std = (each[..., None] for each in statistics())
        return decoder.vae.decode(z.transpose(1, 2) * std + mean).sample.transpose(1, 2)
    return decoder.decode(z) if isinstance(decoder, CausalVideoVAE) else streamed(decoder, z, (z.shape[1],))[0].clamp(-1, 1)


def streamed(decoder, z, cuts, state=None):
    parts = []
    for part in z.split(list(cuts), 1):
        pixels, state = decoder.decode_block(part, state)
        parts.append(pixels)
    return torch.cat(parts, 1), state


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to rounding, which on some processors follows the number of frames that go through a convolution at once."""
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cuts", [(1,) * 5, (3, 2), (5,), (1, 4)])
def test_a_stream_is_the_video_decoded_at_once(kind, cuts):
    decoder, z = make(kind), latents(kind)
    pixels, state = streamed(decoder, z, cuts)
    assert isinstance(decoder, StreamingDecoder) and state.frames == 5
    assert_same(pixels.clamp(-1, 1), decode_at_once(decoder, z))
    assert pixels.shape[:2] == (2, 17 if "wan" in kind else 5)


@pytest.mark.parametrize("taken_back_at", [0, 1, 3])
def test_a_block_that_is_taken_back_leaves_no_trace(kind, taken_back_at):
    decoder, z, draft = make(kind), latents(kind), latents(kind, 2, seed=1)
    start, before = 0, None
    if taken_back_at:
        pixels, before = streamed(decoder, z[:, :taken_back_at], (taken_back_at,))
        start = pixels.shape[1]
    refused, _ = decoder.decode_block(draft, before)
    instead, _ = streamed(decoder, z[:, taken_back_at:], (5 - taken_back_at,), before)
    assert_same(instead.clamp(-1, 1), decode_at_once(decoder, z)[:, start:])
    assert (refused - instead[:, : refused.shape[1]]).abs().max() > 0.01


# -- ours ------------------------------------------------------------------------------------------------------------------


def test_still_videos_stay_still_and_latents_are_of_one_frame() -> None:
    model = make("ours")
    pixels = model.decode(latents("ours", 1).expand(-1, 5, -1, -1, -1))
    assert_same(pixels, pixels[:, :1].expand_as(pixels))
    clip = torch.rand(1, 5, 3, 16, 16).double() * 2 - 1
    assert_same(model.encode(clip.roll(2, 1)), model.encode(clip).roll(2, 1))
    assert model.encode(clip).shape == (1, 5, 4, 2, 2)


def test_users_see_standardised_latents() -> None:
    model, clip = make("ours"), torch.rand(1, 2, 3, 16, 16).double() * 2 - 1
    raw = model.encode_moments(clip)[0]
    assert_same(model.encode(clip) * model.latent_std[:, None, None] + model.latent_mean[:, None, None], raw)
    assert_same(model.denormalize_latents(model.normalize_latents(raw)), raw)


def test_geometry_counts_tokens_and_frames():
    wan = VideoGeometry()
    assert (wan.frame_tokens, wan.pixel_size) == (1560, (480, 832))
    assert (wan.pixel_frames(0, 3), wan.pixel_frames(3, 3), wan.pixel_frames(0, 21)) == (9, 12, 81)
    small = VideoGeometry(channels=4, height=8, width=8, patch=2, block_frames=4, temporal_stride=1, fps=12)
    assert (small.frame_tokens, small.pixel_frames(0, 4), small.pixel_frames(4, 4)) == (16, 4, 4)
    assert small.same_latents(dataclasses.replace(small, patch=1)) and not small.same_latents(wan)


# -- Wan's -----------------------------------------------------------------------------------------------------------------


def test_tiles_keep_features_of_their_own_and_may_not_change() -> None:
    decoder, tiled, z = make("wan"), make("wan in tiles"), latents("wan")
    whole, state = streamed(tiled, z, (5,))
    assert len(state.parts) == 4 * len(streamed(decoder, z, (5,))[1].parts)
    assert_same(whole[..., :8, :8], streamed(decoder, z[..., :2, :1], (5,))[0][..., :8, :8])
    with pytest.raises(ValueError, match="tiling must not change"):
        decoder.decode_block(z, state)


def test_tiles_blend_and_large_ones_are_the_whole() -> None:
    decoder, tiled, z = make("wan"), make("wan in tiles"), latents("wan")
    tiled.vae.enable_tiling(64, 64, 48, 48)
    assert torch.equal(streamed(tiled, z, (3, 2))[0], streamed(decoder, z, (3, 2))[0])
    tiled.vae.enable_tiling(16, 16, 8, 16)
    blended = streamed(tiled, z, (5,))[0]
    upper, lower = (streamed(decoder, z[..., rows, :], (5,))[0] for rows in (slice(0, 2), slice(1, 3)))
    weight = torch.arange(1, 9)[:, None] / 9  # of the lower tile, in the eight rows of both
    assert_same(blended[..., 8:16, :], upper[..., 8:, :] * (1 - weight) + lower[..., :8, :] * weight)
    assert_same(blended[..., 16:, :], lower[..., 8:, :])


def test_latents_of_pixels_are_standardised() -> None:
    decoder, (mean, std) = make("wan"), statistics()
    pixels = torch.rand(1, 5, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    raw = decoder.vae.encode(pixels.transpose(1, 2)).latent_dist.mode().transpose(1, 2)
    assert_same(decoder.encode(pixels) * std + mean, raw)
    assert decoder.encode(pixels).shape == (1, 2, 4, 2, 3)
    rejects(lambda: decoder.encode(pixels[:, :4]), "multiple of 4")
    rejects(lambda: make("preview").decode_block(torch.zeros(1, 1, 3, 2, 2)), "latents")
