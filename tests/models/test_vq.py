"""The VQ image tokenizer against the official one, and its laws."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vargen.models.tokenizers.vq import VQModel

_GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "llamagen_vq"


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def official() -> tuple[VQModel, dict[str, Tensor]]:
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


def test_pixels_become_the_official_tokens(official: tuple[VQModel, dict[str, Tensor]]) -> None:
    model, io = official
    indices = model.encode(io["pixels"])
    assert indices.dtype == torch.int64 and torch.equal(indices, io["encoded_indices"])
    assert len(indices.unique()) > 4, "a picture of one token would prove nothing"


def test_tokens_become_the_official_pixels(official: tuple[VQModel, dict[str, Tensor]]) -> None:
    model, io = official
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
