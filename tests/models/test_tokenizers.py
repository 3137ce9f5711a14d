"""The image tokenizers, VQ and multi-scale, against the official ones, and their laws."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_var import official_networks
from rejects import rejects
from safetensors.torch import load_file
from tiny_models import teacher_inputs
from torch import Tensor

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel, assign_phi
from vargen.models.tokenizers.vq import VQModel

_GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "llamagen_vq"


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def official_vq() -> tuple[VQModel, dict[str, Tensor]]:
    """The tiny model that the official code ran, and what it gave."""
    config = json.loads((_GOLDEN / "config.json").read_text())
    config.pop("kind")
    model = VQModel(**config).eval()
    model.load_state_dict({k: v.float() for k, v in load_file(_GOLDEN / "model.safetensors").items()})
    return model, load_file(_GOLDEN / "io.safetensors")


def _tiny(mult: tuple[int, ...] = (1, 1), **overrides: Any) -> VQModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"codebook_size": 50, "ch": 32, "num_res_blocks": 1, "z_channels": 32, **overrides}
    return VQModel(encoder_ch_mult=mult, decoder_ch_mult=mult, **shape).eval()


# -- parity with the official code -------------------------------------------------------------------------------


def test_pixels_become_the_official_tokens(official_vq: tuple[VQModel, dict[str, Tensor]]) -> None:
    model, io = official_vq
    indices = model.encode(io["pixels"])
    assert indices.dtype == torch.int64 and torch.equal(indices, io["encoded_indices"])
    assert len(indices.unique()) > 4, "a picture of one token would prove nothing"


def test_tokens_become_the_official_pixels(official_vq: tuple[VQModel, dict[str, Tensor]]) -> None:
    model, io = official_vq
    torch.testing.assert_close(model.decode(io["codes"]), io["decoded"], atol=1e-4, rtol=0)
    square = io["codes"].view(2, 4, 4)
    torch.testing.assert_close(model.decode(square), io["decoded"], atol=1e-4, rtol=0)
    torch.testing.assert_close(model.quantize.lookup(square), io["codebook_entries"], atol=1e-6, rtol=0)


# -- the quantiser -------------------------------------------------------------------------------------------------


def test_the_token_is_the_nearest_code_on_the_sphere() -> None:
    model = _tiny()
    z = model.encode_latents(torch.rand(2, 3, 16, 16) * 2 - 1)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(2, 8, 8))
    codes = F.normalize(model.quantize.embedding.weight, dim=-1)
    distance = (z.movedim(1, -1)[..., None, :] - codes).square().sum(-1)
    assert torch.equal(model.quantize.find_nearest(z), distance.argmin(-1))
    assert torch.equal(model.quantize.find_nearest(z * 7), distance.argmin(-1)), "length is of no matter"


def test_a_code_is_found_again_and_its_stored_length_is_of_no_matter() -> None:
    model = _tiny()
    every = torch.arange(50).view(1, 5, 10)
    assert torch.equal(model.quantize.find_nearest(model.quantize.lookup(every)), every)
    pixels, tokens = torch.rand(1, 3, 8, 8), torch.randint(50, (1, 4, 4))
    before = model.encode(pixels), model.decode(tokens)
    model.quantize.embedding.weight.mul_(torch.rand(50, 1) * 3 + 0.1)
    assert torch.equal(model.encode(pixels), before[0])
    torch.testing.assert_close(model.decode(tokens), before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_compared_in_float32_whatever_the_weights_are(dtype: torch.dtype) -> None:
    quantize = _tiny().quantize
    weight = quantize.embedding.weight.to(dtype)
    quantize.to(dtype)
    assert quantize.codebook().dtype == quantize.lookup(torch.zeros(1, 2, 2, dtype=torch.int64)).dtype == torch.float32
    assert torch.equal(quantize.codebook(), F.normalize(weight.float(), dim=-1))
    every = torch.arange(50).view(1, 5, 10)
    assert torch.equal(quantize.find_nearest(quantize.lookup(every)), every)


# -- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mult", "factor"), [((1,), 1), ((1, 2), 2), ((1, 1, 1, 1), 8), ((1, 1, 1, 1, 1), 16)])
def test_each_level_after_the_first_halves_the_sides(mult: tuple[int, ...], factor: int) -> None:
    model = _tiny(mult)
    assert model.downsampling == factor
    indices = model.encode(torch.rand(2, 3, 2 * factor, 3 * factor))
    assert indices.shape == (2, 2, 3)
    pixels = model.decode(indices)
    assert pixels.shape == (2, 3, 2 * factor, 3 * factor) and pixels.dtype == torch.float32
    image = torch.rand(1, 3, 2 * factor, factor)
    assert torch.equal(model(image), model.decode(model.encode(image)))


def test_flat_tokens_fill_a_square_in_raster_order() -> None:
    model = _tiny()
    tokens = torch.randint(50, (2, 9))
    assert torch.equal(model.decode(tokens), model.decode(tokens.view(2, 3, 3)))
    assert not torch.equal(model.decode(tokens), model.decode(tokens.view(2, 3, 3).mT))
    for wrong in (2, 8, 10, 15):
        with pytest.raises(ValueError, match=rf"square grid, got {wrong} per row; pass \[B, R, G\]"):
            model.decode(torch.zeros(1, wrong, dtype=torch.int64))
    assert model.decode(torch.zeros(1, 2, 5, dtype=torch.int64)).shape == (1, 3, 4, 10)


def test_sides_that_the_grid_does_not_divide_are_refused() -> None:
    model = _tiny((1, 1, 1))
    for sides in ((16, 18), (15, 16), (1, 4)):
        with pytest.raises(ValueError, match=rf"divisible by 4, got {sides[0]}x{sides[1]}"):
            model.encode(torch.zeros(1, 3, *sides))


# -- multi-scale --------------------------------------------------------------------------------------------------------


Golden = tuple[MultiScaleVQModel, dict[str, Tensor]]


@pytest.fixture(scope="module")
def official() -> Golden:
    _, model, io = official_networks()
    return model, io


def _hybrid(**overrides: Any) -> MultiScaleVQModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "codebook_size": 50, "codebook_embed_dim": 8, "ch": 16, "ch_mult": (1, 2), "num_res_blocks": 1, "scales": (1, 2, 3, 5),
        "patch_size": 2, "transformer_blocks": 1, **overrides,
    }  # fmt: skip
    model = MultiScaleVQModel("hybrid", **shape).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and not parameter.any():  # as built, residual branches add nothing
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_pixels_become_the_official_tokens_of_every_scale(official: Golden) -> None:
    model, io = official
    tokens = model.encode(io["pixels"])
    assert [t.shape[1:] for t in tokens] == [(s, s) for s in model.scales]
    for k, of_scale in enumerate(tokens):
        assert of_scale.dtype == torch.int64 and torch.equal(of_scale.flatten(1), io[f"encoded_scale{k}"])
    assert len(tokens[-1].unique()) > 4, "a picture of one token would prove nothing"


def test_tokens_of_scales_become_the_official_pixels(official: Golden) -> None:
    model, io = official
    torch.testing.assert_close(model(io["pixels"]), io["reconstruction"], atol=1e-4, rtol=0)
    sampled = [io[f"greedy_tokens_cfg1.5_scale{k}"] for k in range(4)]
    torch.testing.assert_close(model.decode(sampled) / 2 + 0.5, io["greedy_image_cfg1.5"], atol=1e-4, rtol=0)


def test_teacher_forcing_feeds_the_official_input(official: Golden) -> None:
    model, io = official
    inputs = teacher_inputs(model, model.encode(io["pixels"]))
    torch.testing.assert_close(inputs, io["var_input"], atol=1e-4, rtol=0)
    assert inputs.std() > 0.01


def test_the_official_phi_of_each_scale() -> None:
    """Ten scales have two exact ties, which a float decides wrongly in some precision; the others have none."""
    tables = {10: "0011122333", 12: "000111222333", 13: "0001112222333", 14: "00011112222333", 6: "001233", 4: "0123"}
    assert {S: "".join(map(str, assign_phi(S, 4))) for S in tables} == tables
    assert assign_phi(3, 1) == (0, 0, 0) and assign_phi(1, 4) == (0,) and assign_phi(4, 2) == (0, 0, 1, 1)


# -- the sum over scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gains", [False, True])
def test_steps_add_up_to_the_whole(gains: bool) -> None:
    """Step by step is decoding's sum."""
    model = _hybrid(scale_gains=gains, scale_codes=(8, 20, 50, 50))
    if gains:
        model.quantize.gains.copy_(torch.tensor([3.0, 1.5, 0.7, 0.2]))
    tokens = model.encode(torch.rand(3, 3, 20, 20) * 2 - 1)
    f_hat = torch.zeros(3, 8, 5, 5)
    for k, of_scale in enumerate(tokens):
        f_hat = f_hat + model.quantize.lookup(of_scale, k)
        given = model.quantize.transformer_input(f_hat, k + 1)
        assert given is None if k == 3 else given.shape == (3, model.scales[k + 1] ** 2, 8)
    assert torch.equal(f_hat, model.accumulate_latents([each.flatten(1) for each in tokens]))
    assert torch.equal(model.decode_latent(f_hat), model.decode(tokens))


def test_each_scale_takes_the_nearest_of_its_codes_for_what_is_left() -> None:
    model = _hybrid(scale_gains=True, scale_codes=(8, 20, 50, 50))
    model.quantize.gains.copy_(torch.tensor([2.0, 1.0, 0.5, 0.3]))
    rest = model.encode_latent(torch.rand(2, 3, 20, 20) * 2 - 1)
    for k, tokens in enumerate(model.quantize.quantize(rest)):
        cells = torch.nn.functional.adaptive_avg_pool2d(rest, model.scales[k]).movedim(1, -1)
        codes = model.codebook[: model.scale_codes[k]] * model.quantize.gains[k]
        assert torch.equal(tokens, (cells[..., None, :] - codes).square().sum(-1).argmin(-1))
        rest = rest - model.quantize.lookup(tokens, k)
    assert tokens.max() >= 20 > 8, "the last scale uses codes that the first may not"


def test_first_scales_alone_give_an_image_and_the_rest_changes_it() -> None:
    model = _hybrid()
    tokens = model.encode(torch.rand(2, 3, 20, 20) * 2 - 1)
    previews = [model.decode(tokens[:count]) for count in range(1, 5)]
    assert all(p.shape == (2, 3, 20, 20) and p.abs().max() <= 1 for p in previews)
    assert len({p.sum().item() for p in previews}) == 4
    for wrong in ([], [*tokens, tokens[-1]]):
        with pytest.raises(ValueError, match=f"tokens must be of 1 to 4 scales, got {len(wrong)}"):
            model.decode(wrong)
    rejects(lambda: model.decode([tokens[0], tokens[2]]), "tokens")


# -- shapes, dtypes, files -----------------------------------------------------------------------------------------


def test_images_of_another_size_are_refused() -> None:
    model = _hybrid()
    assert (model.image_size, model.downsampling, model.tokens) == (20, 4, 39)
    for sides in ((20, 16), (40, 40)):
        with pytest.raises(ValueError, match=rf"pixels must be 20x20 for scales \(1, 2, 3, 5\), got {sides[0]}x{sides[1]}"):
            model.encode(torch.zeros(1, 3, *sides))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_compared_and_summed_in_float32(dtype: torch.dtype) -> None:
    model = _hybrid()
    rounded = _hybrid().to(dtype)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    tokens = model.encode(torch.rand(2, 3, 20, 20) * 2 - 1)
    assert rounded.codebook.dtype == rounded.accumulate_latents(tokens).dtype == torch.float32
    assert torch.equal(rounded.accumulate_latents(tokens), model.accumulate_latents(tokens))
    latents = model.accumulate_latents(tokens)
    assert torch.equal(rounded.quantize.quantize(latents)[0], model.quantize.quantize(latents)[0])
    assert rounded.decode(tokens).dtype == dtype
