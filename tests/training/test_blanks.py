"""One code for whatever is blank: nothing else changes, and it decodes to white."""

import torch
from tiny_models import tiny_vq

from vargen.training.blanks import BlankAware


def picture() -> torch.Tensor:
    """8 x 8 pixels; the left half is white, the right one is not."""
    pixels = torch.ones(2, 3, 8, 8)
    pixels[:, :, :, 4:] = torch.rand(2, 3, 8, 4) - 1
    return pixels


def test_blank_patches_have_one_code_and_the_others_their_own():
    vqvae, pixels = tiny_vq(), picture()
    tokens_of = BlankAware(vqvae, 8)
    found = tokens_of(pixels).view(2, 4, 4)
    assert (found[:, :, :2] == tokens_of.code).all()
    assert torch.equal(found[:, :, 2:], vqvae.encode(pixels)[:, :, 2:])


def test_a_single_dark_pixel_makes_a_patch_no_blank():
    vqvae, pixels = tiny_vq(), picture()
    pixels[0, 1, 0, 0] = 0.9
    tokens_of = BlankAware(vqvae, 8)
    found, own = tokens_of(pixels).view(2, 4, 4), vqvae.encode(pixels)
    assert found[0, 0, 0] == own[0, 0, 0]
    assert (found[:, :, :2].flatten(1)[:, 1:] == tokens_of.code).all()


@torch.no_grad()
def test_the_code_is_the_whitest_of_those_of_an_empty_picture():
    vqvae = tiny_vq()
    white = torch.ones(1, 3, 8, 8)
    errors = {
        code: float((vqvae.decode(torch.full((1, 4, 4), code)) - white).square().mean())
        for code in vqvae.encode(white).unique().tolist()
    }
    assert BlankAware(vqvae, 8).code == min(errors, key=errors.__getitem__)
