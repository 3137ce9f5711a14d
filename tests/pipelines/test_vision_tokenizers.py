"""Images of Chameleon and Liquid by Chameleon's image tokenizer, from its official file or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from official_vqgan import official_pixels
from safetensors.torch import save_file
from tiny_language_models import make_causal, make_chameleon, make_vqgan, needs_janus

import vargen

pytestmark = needs_janus
PROMPTS = ["a red apple", "a blue car on the moon"]
GREEDY = {"temperature": 0, "accelerator": "gumbel"}
OPTIONS: dict[str, dict[str, Any]] = {"chameleon": {}, "liquid": {"size": (4, 4)}}


def make(name: str) -> tuple[Any, Any]:
    return make_chameleon() if name == "chameleon" else make_causal(name)


def write_official(file: Path, **changed: Any) -> Any:
    """Write a file as its authors save it, with encoder and loss; returns its decoder, with attention in the middle only."""
    decoder = make_vqgan(attention=())
    other = {"encoder.conv_in.weight": torch.ones(2, 3, 3, 3), "quant_conv.weight": torch.ones(8, 16, 1, 1),
             "loss.discriminator.main.0.weight": torch.ones(2)}  # fmt: skip
    state = {**other, **decoder.state_dict(), **changed}
    torch.save({"state_dict": {name: value for name, value in state.items() if value is not None}}, file)
    return decoder


@pytest.mark.parametrize("name", OPTIONS)
def test_images_are_those_of_the_official_decoder(name: str, tmp_path: Path) -> None:
    """From the official file; a saved folder holds the image tokenizer, and opens with it."""
    model, processor = make(name)
    tokens_only = vargen.accelerate(model, processor, **OPTIONS[name])
    tokens_only.save_pretrained(tmp_path / "model")
    decoder = write_official(tmp_path / "vqgan.ckpt")
    pipe = vargen.open_pipeline(
        tmp_path / "model", vision_tokenizer=tmp_path / "vqgan.ckpt", torch_dtype=torch.float32, **OPTIONS[name]
    )
    result = pipe(PROMPTS, output_type="pt", **GREEDY)
    assert torch.equal(result.tokens, tokens_only(PROMPTS, output_type="latent", **GREEDY).tokens)
    with torch.no_grad():
        expected = official_pixels(decoder, result.tokens.view(2, 4, 4))
    assert result.images.shape == (2, 3, 8, 8) and expected.std() > 0.01
    torch.testing.assert_close(result.images, (expected / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=0)
    pipe.save_pretrained(tmp_path / "saved")
    again = vargen.open_pipeline(tmp_path / "saved", torch_dtype=torch.float32, **OPTIONS[name])
    assert torch.equal(again(PROMPTS, output_type="pt", **GREEDY).images, result.images)
    with pytest.raises(ValueError, match="output_type must be 'latent'"):
        tokens_only("dog")


def test_its_codes_say_which_tokens_are_similar() -> None:
    """So that LANTERN's rule runs on Liquid."""
    pipe = vargen.accelerate(*make("liquid"), size=(4, 4), vision_tokenizer=make_vqgan())
    assert torch.equal(pipe.codebook, pipe.vision_tokenizer.codebook)
    assert next(each for each in pipe.list_methods() if each.name == "lantern-jacobi").unsupported_reason is None
    assert pipe("dog", accelerator="lantern-jacobi").images[0].size == (8, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantize.embedding.weight": torch.ones(25, 8)}, "must have the 24 codes of the model's image tokens, got 25"),
        ({"quantize.embedding.weight": None}, "does not hold a VQGAN image tokenizer: .*quantize.embedding.weight"),
        ({"decoder.conv_out.bias": None}, r"missing: 1 \(decoder.conv_out.bias"),
        ({"decoder.conv_out.bias": torch.ones(3, dtype=torch.int64)}, "is torch.int64"),
        ({"decoder.conv_out.bias": torch.full((3,), torch.nan)}, "NaN or infinite"),
    ],
)
def test_files_that_do_not_fit_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    vargen.accelerate(*make("liquid"), size=(4, 4)).save_pretrained(tmp_path / "model")
    write_official(tmp_path / "vqgan.ckpt", **changed)
    with pytest.raises(ValueError, match=message):
        vargen.open_pipeline(tmp_path / "model", size=(4, 4), vision_tokenizer=tmp_path / "vqgan.ckpt")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    vargen.accelerate(*make("liquid"), size=(4, 4)).save_pretrained(tmp_path / "model")
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    for name, message in (("other.safetensors", "does not hold a VQGAN"), ("config.json", "is not a checkpoint file")):
        place = tmp_path / ("model" if name == "config.json" else ".") / name
        with pytest.raises(ValueError, match=message):
            vargen.open_pipeline(tmp_path / "model", size=(4, 4), vision_tokenizer=place)
