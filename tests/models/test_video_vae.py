"""The causal video autoencoder: a stream is a video decoded at once, a block can be taken back, frames are encoded alone."""

import dataclasses

import pytest
import torch

from vargen.models.causal_video.cache import VideoGeometry
from vargen.models.tokenizers.video_vae import CausalVideoVAE, StreamingDecoder

SHAPE = {"size": 16, "widths": (8, 16, 32), "conv_blocks": 1, "transformer_blocks": 2}


@pytest.fixture(scope="module")
def model() -> CausalVideoVAE:
    """In double precision, with every weight drawn: blocks that start as the identity would hide mistakes."""
    torch.manual_seed(0)
    vae = CausalVideoVAE(**SHAPE).double().eval()
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
        vae.latent_mean.copy_(torch.randn(4))
        vae.latent_std.copy_(torch.rand(4) + 0.5)
    return vae.requires_grad_(False)


def latents(frames: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, frames, 4, 2, 2, generator=torch.Generator().manual_seed(seed)).double()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,) * 7, (3, 3, 1), (2, 5), (6, 1)])
def test_a_stream_is_the_video_decoded_at_once(model, cuts):
    z, state, parts = latents(), None, []
    for part in z.split(list(cuts), 1):
        pixels, state = model.decode_block(part, state)
        parts.append(pixels)
    assert close(torch.cat(parts, 1), model.decode(z)) and state.frames == 7
    assert isinstance(model, StreamingDecoder)


def test_a_block_that_is_taken_back_leaves_no_trace(model):
    z, draft = latents(), latents(seed=1)
    _, before = model.decode_block(z[:, :3])
    kept = [part.clone() for part in before.parts]
    refused, _ = model.decode_block(draft[:, 3:5], before)
    assert all(torch.equal(a, b) for a, b in zip(kept, before.parts, strict=True))
    instead, after = model.decode_block(z[:, 3:5], before)
    rest, _ = model.decode_block(z[:, 5:], after)
    assert close(torch.cat([instead, rest], 1), model.decode(z)[:, 3:])
    assert not close(refused, instead)


def test_a_still_video_stays_still_from_its_first_frame(model):
    pixels = model.decode(latents(1).expand(-1, 5, -1, -1, -1))
    assert close(pixels, pixels[:, :1].expand_as(pixels))


def test_a_frames_latent_does_not_depend_on_where_the_clip_begins(model):
    clip = torch.rand(1, 5, 3, 16, 16).double() * 2 - 1
    assert close(model.encode(clip.roll(2, 1)), model.encode(clip).roll(2, 1))
    assert model.encode(clip).shape == (1, 5, 4, 2, 2)


def test_users_see_standardised_latents(model):
    clip = torch.rand(1, 2, 3, 16, 16).double() * 2 - 1
    raw = model.encode_moments(clip)[0]
    seen = model.encode(clip)
    assert close(seen * model.latent_std[:, None, None] + model.latent_mean[:, None, None], raw)
    assert close(model.denormalize_latents(model.normalize_latents(raw)), raw)


def test_geometry_counts_tokens_and_frames():
    wan = VideoGeometry()
    assert (wan.frame_tokens, wan.pixel_size) == (1560, (480, 832))
    assert (wan.pixel_frames(0, 3), wan.pixel_frames(3, 3), wan.pixel_frames(0, 21)) == (9, 12, 81)
    small = VideoGeometry(channels=4, height=8, width=8, patch=2, block_frames=4, temporal_stride=1, fps=12)
    assert (small.frame_tokens, small.pixel_frames(0, 4), small.pixel_frames(4, 4)) == (16, 4, 4)
    assert small.same_latents(dataclasses.replace(small, patch=1)) and not small.same_latents(wan)
