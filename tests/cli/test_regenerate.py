"""`vargen regenerate`: a shared image is generated again from its own parameters, and what differs is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rejects import rejects

from vargen.image_metadata import describe_parameters, model_digest, png_chunks, read_parameters
from vargen.pipelines.regeneration import explain_difference, validate_regenerable


@pytest.mark.parametrize(
    ("method", "options"), [("gumbel", ("--top-k", "9", "--temperature", "0.7", "--min-p", "0.2")), ("ar", ())]
)
def test_the_same_image_comes_back(run: Any, text_model: Path, method: str, options: tuple[str, ...]) -> None:
    words = ("--model", text_model, "--seed", 7, "-n", 2, "--accelerator", method, "-o", "all.png", *options)
    assert run("generate", "a cat", *words).exit_code == 0
    result = run("regenerate", "all-2.png", "--model", text_model, "-o", "again.png")
    assert result.exit_code == 0, result.output
    assert result.stdout == "all-2.png: The same image: its tokens and pixels are identical.\n"
    with Image.open("all-2.png") as one, Image.open("again.png") as other:
        assert one.tobytes() == other.tobytes()


def test_a_class_and_its_label_come_back(run: Any, class_model: Path) -> None:
    assert run("generate", "--class-label", "goldfish", "--model", class_model, "--seed", 3, "-o", "a.png").exit_code == 0
    found = run("regenerate", "a.png", "--model", class_model, "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["images"][0]["same_pixels"] is True


def test_an_image_of_a_quantized_model_names_its_format(run: Any, text_model: Path) -> None:
    words = ("--model", text_model, "--seed", 7, "--quantization", "int8", "-o", "a.png")
    assert run("generate", "a cat", *words).exit_code == 0
    assert read_parameters("a.png")["quantization"] == "int8"
    again = run("regenerate", "a.png", "--model", text_model)
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(("levels", "cause"), [(2, "rounds differently"), (100, "was edited")])
def test_an_edited_file_is_told_from_rounding(levels: int, cause: str, run: Any, text_model: Path) -> None:
    assert run("generate", "a cat", "--model", text_model, "--seed", 7, "-o", "a.png").exit_code == 0
    with Image.open("a.png") as opened:
        image, parameters = opened.convert("RGB"), read_parameters("a.png")
    red, *others = image.getpixel((0, 0))
    image.putpixel((0, 0), (red + levels if red + levels < 256 else red - levels, *others))
    image.save("b.png", pnginfo=png_chunks(parameters))
    result = run("regenerate", "b.png", "--model", text_model)
    assert result.exit_code == 1 and f"up to {levels} of 255" in result.stdout and cause in result.stdout


def test_what_differs_is_named(run: Any, text_model: Path, scale_model: Path) -> None:
    assert run("generate", "a cat", "--model", text_model, "--seed", 7, "--accelerator", "ar", "-o", "a.png").exit_code == 0
    with Image.open("a.png") as opened:
        changed = {**read_parameters("a.png"), "seed": 8, "model_digest": "0" * 16, "processor": "cpu other"}
        opened.save("b.png", pnginfo=png_chunks(changed))
    result = run("regenerate", "b.png", "--model", text_model)
    assert result.exit_code == 1 and result.stdout.startswith("b.png: Another image.")
    assert "weights of the model" in result.stdout and "processor, whose float32 sums round differently" in result.stdout
    both = run("regenerate", "b.png", "a.png", "--model", text_model, "-o", "new/")
    assert both.exit_code == 1 and both.stdout.startswith(result.stdout + "a.png: The same image")
    assert sorted(path.name for path in Path("new").iterdir()) == ["a-regenerated.png", "b-regenerated.png"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (None, "carries no vargen parameters"),
        ({"prompt": "a", "seed": 1, "model": "mine"}, "give it with --model"),
        ({"prompt": "a", "seed": "x", "model": "emoji"}, "seed"),
        ({"prompt": "a", "seed": 1, "model": "emoji", "image": "i.png", "mask": True}, "'i.png' and a mask, which"),
    ],
)
def test_what_cannot_be_generated_again_is_reported(run: Any, parameters: Any, message: str) -> None:
    Image.new("RGB", (8, 8)).save("a.png", pnginfo=png_chunks(parameters) if parameters else None)
    result = run("regenerate", "a.png")
    assert result.exit_code != 0 and message in result.stderr + str(result.exception)


def test_the_digest_of_a_model_follows_its_weights(text_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(text_model, copy)
    before = model_digest(copy)
    assert before == model_digest(text_model)
    file = next(copy.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_digest(copy) != before


def test_equal_facts_explain_nothing() -> None:
    here = {"model": "emoji", "dtype": "float32", "processor": "cpu AVX2", "versions": {"torch": "2"}}
    assert explain_difference(here, here) == () and explain_difference({}, here) == ()
    for changed in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        (reason,) = explain_difference({**here, **changed}, here)
        assert all(name in reason and value in reason for name, value in changed.items())
    for seed in (-1, True, 2**63, None):
        rejects(lambda seed=seed: validate_regenerable({"seed": seed}), "seed")


def test_other_programs_read_the_parameters(tmp_path: Path) -> None:
    parameters = {"prompt": "a cat", "negative_prompt": "blur", "seed": 7, "accelerator": "ar", "guidance_scale": 4.0}
    Image.new("RGB", (8, 16)).save(tmp_path / "a.png", pnginfo=png_chunks(parameters, (8, 16)))
    with Image.open(tmp_path / "a.png") as opened:
        prompt, negative, values = opened.info["parameters"].split("\n")
    assert (prompt, negative) == ("a cat", "Negative prompt: blur")
    assert values == "Sampler: ar, CFG scale: 4.0, Seed: 7, Size: 8x16"
    assert describe_parameters({"class_label": 3}) == "3\n"
