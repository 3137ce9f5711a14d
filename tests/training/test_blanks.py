"""One code for whatever is blank: nothing else changes, and it decodes to white."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_vq

from vargen.assets import packaged_model_path
from vargen.models.tokenizers.vq import VQModel
from vargen.training.token_cache import BackgroundTokenizer, hash_tokens


def image() -> torch.Tensor:
    """8 x 8 pixels; the left half is white, the right one is not."""
    pixels = torch.ones(2, 3, 8, 8)
    pixels[:, :, :, 4:] = torch.rand(2, 3, 8, 4) - 1
    return pixels


def test_blank_patches_have_one_code_and_the_others_their_own():
    vqvae, pixels = tiny_vq(), image()
    tokens_of = BackgroundTokenizer(vqvae)
    found = tokens_of(pixels).view(2, 4, 4)
    assert (found[:, :, :2] == tokens_of.code).all()
    assert torch.equal(found[:, :, 2:], vqvae.encode(pixels)[:, :, 2:])


def test_a_single_dark_pixel_makes_a_patch_no_blank():
    vqvae, pixels = tiny_vq(), image()
    pixels[0, 1, 0, 0] = 0.9
    tokens_of = BackgroundTokenizer(vqvae)
    found, own = tokens_of(pixels).view(2, 4, 4), vqvae.encode(pixels)
    assert found[0, 0, 0] == own[0, 0, 0]
    assert (found[:, :, :2].flatten(1)[:, 1:] == tokens_of.code).all()


def test_the_code_is_that_of_an_empty_image_whatever_the_size_and_the_decoder():
    vqvae = tiny_vq()
    tokens_of, digest = BackgroundTokenizer(vqvae), hash_tokens(vqvae)
    found = vqvae.encode(torch.ones(1, 3, 32, 32)).flatten().bincount()
    assert found[tokens_of.code] == found.max()
    for side in (4, 64):
        assert (tokens_of(torch.ones(1, 3, side, side)) == tokens_of.code).all()
    with torch.no_grad():
        next(vqvae.decoder.parameters()).add_(1)
    assert hash_tokens(vqvae) == digest
    with torch.no_grad():
        vqvae.quantize.embedding.weight.neg_()
    assert hash_tokens(vqvae) != digest


def test_rounded_weights_keep_the_blank_code_that_a_generator_was_trained_on():
    """Rounded to int6 after training, the packaged tokenizer encodes a blank image mostly as another code."""
    vqvae = VQModel.from_pretrained(packaged_model_path("emoji") / "vqvae").float().eval()
    examples = load_file(packaged_model_path("emoji") / "examples.safetensors")["tokens"]
    assert BackgroundTokenizer(vqvae).code == int(examples.flatten().long().mode().values)
    digest = hash_tokens(vqvae)
    vqvae.register_to_config(blank_code=None)
    assert hash_tokens(vqvae) != digest
    with pytest.raises(ValueError, match="blank_code must be None or from 0 to 15, got 16"):
        VQModel(codebook_size=16, blank_code=16)


def test_packaged_blanks_are_white():
    vqvae = VQModel.from_pretrained(packaged_model_path("emoji") / "vqvae").float().eval()
    with torch.no_grad():
        pixels = vqvae.decode(torch.full((1, 16, 16), BackgroundTokenizer(vqvae).code))
    assert (pixels - 1).abs().mean() < 0.02
