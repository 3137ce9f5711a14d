"""Infinity's image tokenizer against the official one: features, bits, sums, inputs and pixels; with and without patchify."""

from __future__ import annotations

import pytest
import torch
from golden_infinity import SETS, Official, official
from rejects import rejects

from vargen.models.tokenizers.bsq import BitQuantizer, BSQModel


@pytest.fixture(params=SETS)
def golden(request: pytest.FixtureRequest) -> Official:
    return official(request.param)


@torch.inference_mode()
def test_encoding_is_the_official_one(golden: Official) -> None:
    io, quantizer = golden.io, golden.quantizer
    latent = golden.vqvae.encode_latent(io["pixels"].float())
    torch.testing.assert_close(latent, io["encoder_features"], atol=1e-4, rtol=0)
    tokens, canvas = quantizer.quantize(latent), torch.zeros_like(latent)
    inputs = []
    for k, bits in enumerate(tokens):
        assert torch.equal(bits, io[f"encoded_token_bits_scale{k}"].flatten(1).long())
        grid = quantizer.to_positions(bits.unflatten(1, (-1, golden.vqvae.token_bits)), k)
        assert torch.equal(grid.movedim(1, -1), io[f"encoded_vae_bits_scale{k}"].long())
        canvas = canvas + quantizer.lookup(bits, k)
        inputs.append(quantizer.transformer_input(canvas, k + 1))
    assert inputs.pop() is None
    torch.testing.assert_close(torch.cat(inputs, dim=1), io["teacher_input"], atol=2e-6, rtol=0)
    torch.testing.assert_close(canvas, io["encoded_sum"], atol=2e-6, rtol=0)
    torch.testing.assert_close(golden.vqvae.decode_latent(canvas), io["reconstruction"], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_uint8_pixels_are_the_official_ones_but_for_rounding(golden: Official) -> None:
    """The official ones are cut, and of channels in the order blue, green, red."""
    if (expected := golden.io.get("image_uint8_bgr_cfg3")) is not None:
        found = ((golden.io["image_cfg3"] + 1) / 2 * 255).trunc().byte().movedim(1, -1).flip(-1)
        assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("patchify", [False, True])
def test_tokens_and_positions_of_any_shape_are_inverse(patchify: bool) -> None:
    """Also of grids that are not square, with what a mask says of positions."""
    quantizer = BitQuantizer(3, patchify, ((1, 1), (2, 3), (4, 6)))
    for k, (rows, columns) in enumerate(quantizer.scales):
        z = torch.randn(2, 3, rows, columns)
        tokens = quantizer.to_tokens(z)
        assert tokens.shape == (2, quantizer.scale_tokens[k] // tokens.shape[2], 12 if patchify else 3)
        assert torch.equal(quantizer.to_positions(tokens, k), z)
        cells = torch.rand(2, 1, rows, columns) > 0.5
        kept = quantizer.spread(cells, k).unflatten(1, tokens.shape[1:])
        assert torch.equal(quantizer.to_positions(kept.float(), k), cells.float().expand(-1, 3, -1, -1))
    torch.testing.assert_close(
        quantizer.lookup(torch.ones(1, quantizer.scale_tokens[0]).long(), 0).norm(dim=1).mean(), torch.ones([])
    )


def test_a_token_of_2_by_2_positions_has_their_bits_in_the_official_order() -> None:
    """Channel c of position (2 y + a, 2 x + b) is bit 4 c + 2 a + b of token (y, x); rows of tokens follow one another."""
    rows, columns = 3, 5
    tokens = torch.randn(1, rows * columns, 12)
    z = BitQuantizer(3, True, ((rows, columns),)).to_positions(tokens, 0)
    for y, x, c, a, b in torch.cartesian_prod(*map(torch.arange, (rows, columns, 3, 2, 2))).tolist():
        assert z[0, c, 2 * y + a, 2 * x + b] == tokens[0, y * columns + x, 4 * c + 2 * a + b]


def test_widths_that_32_does_not_divide_have_24_groups() -> None:
    model = BSQModel(bits=2, ch=48, encoder_ch_mult=(1, 2), decoder_ch_mult=(1, 2), num_res_blocks=1)
    assert model.encoder.norm_out.num_groups == 32 and model.decoder.norm_out.num_groups == 24
    assert model.decode_latent(model.encode_latent(torch.zeros(1, 3, 4, 6))).shape == (1, 3, 4, 6)


def test_bad_sizes_are_named() -> None:
    sizes = {"bits": 4, "ch": 32, "num_res_blocks": 1}
    rejects(lambda: BSQModel(**sizes, encoder_ch_mult=(1, 1), decoder_ch_mult=(1,)), "decoder_ch_mult")
    model = BSQModel(**sizes, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1))
    rejects(lambda: model.encode_latent(torch.zeros(1, 3, 9, 8)), "pixels")
