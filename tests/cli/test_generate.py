"""`vargen generate` with good input: files, seeds, metadata, JSON, images to start from."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import text_pipeline

from vargen import __version__, open_pipeline


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB")).astype(int)


def test_one_prompt_makes_one_named_file(run: Any, text_model: Path) -> None:
    result = run("generate", "A red apple!", "--model", text_model, "--seed", 7)
    assert result.exit_code == 0, result.output
    assert result.stdout == "a-red-apple-7.png\n"
    assert "1 image in" in result.stderr and "tokens per second" in result.stderr and "seed 7" in result.stderr
    assert pixels(Path("a-red-apple-7.png")).shape == (8, 8, 3)
    assert len(list(Path().iterdir())) == 1


def test_an_image_of_a_run_can_be_generated_again_alone(run: Any, text_model: Path) -> None:
    words = ("--model", text_model, "--quiet")
    together = run("generate", "a cat", "a dog", "-n", 2, "--seed", 10, "--batch-size", 3, "-o", "all.png", *words)
    assert together.stdout.split() == ["all-1.png", "all-2.png", "all-3.png", "all-4.png"]
    assert run("generate", "a dog", "--seed", 13, "-o", "alone.png", *words).exit_code == 0
    assert np.abs(pixels(Path("all-4.png")) - pixels(Path("alone.png"))).max() <= 1  # one step of rounding
    assert (pixels(Path("all-4.png")) != pixels(Path("all-3.png"))).any()


def test_json_is_one_document_and_png_says_how_it_was_made(run: Any, text_model: Path) -> None:
    result = run(
        "generate", "a cat", "-n", 2, "--model", text_model, "--seed", 5, "--json", "-o", "new/folder/",
        "--accelerator", "gumbel:window=3",
        "--guidance-scale", 3, "--temperature", 0.9, "--top-k", 20, "--top-p", 0.95, "--negative-prompt", "a dog",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [image["file"] for image in document["images"]] == ["new/folder/a-cat-5.png", "new/folder/a-cat-6.png"]
    assert [image["seed"] for image in document["images"]] == document["stats"]["seeds"] == [5, 6]
    assert {image["prompt"] for image in document["images"]} == {"a cat"}
    assert document["seconds_load"] > 0 and document["seconds_generate"] > 0 and document["tokens_per_second"] > 0
    assert document["stats"]["tokens"] == 32
    assert sum(k * passes for k, passes in enumerate(document["stats"]["committed_histogram"])) == 32
    with Image.open("new/folder/a-cat-6.png") as opened:
        said = json.loads(opened.info["vargen"])
    assert said["versions"].pop("torch") and said["versions"]["vargen"] == __version__
    digests = {name: said.pop(name) for name in ("model_digest", "tokens_digest")}
    assert all(len(digest) == 16 for digest in digests.values()) and said.pop("processor")
    assert said == {
        "prompt": "a cat", "seed": 6, "model": "tiny-text", "accelerator": "gumbel:window=3", "negative_prompt": "a dog",
        "guidance_scale": 3.0, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "dtype": said["dtype"],
        "versions": said["versions"],
    }  # fmt: skip


def test_an_image_to_start_from_and_its_mask_reach_the_model(run: Any, scale_model: Path) -> None:
    source = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (0, 0, 8, 4))
    source.save("cat.png")
    mask.save("mask.png")
    pipe, words = open_pipeline(scale_model), ("a dog", "--image", "cat.png", "--model", scale_model, "--seed", 5)
    for options, given in ((("--strength", 0.5), {"strength": 0.5}), (("--mask-image", "mask.png"), {"mask_image": mask})):
        assert run("generate", *words, *options, "-o", "out.png").exit_code == 0
        expected = pipe("a dog", image=source, generator=torch.Generator().manual_seed(5), **given).images[0]
        assert (pixels(Path("out.png")) == np.asarray(expected)).all()
        with Image.open("out.png") as opened:
            said = json.loads(opened.info["vargen"])
        assert (said["image"], said["strength"]) == ("cat.png", given.get("strength", 1.0))
        assert said.get("mask") == (options[1] if "mask_image" in given else None)


def test_prompt_file(run: Any, text_model: Path) -> None:
    Path("prompts.txt").write_bytes("\ufeff# fruit\r\na red apple\r\n\r\n  crème brûlée  \n   # more\nx # y".encode())
    words = ("--prompt-file", "prompts.txt", "--model", text_model, "--seed", 1, "--json", "-o", "out/")
    document = json.loads(run("generate", "first", *words).stdout)
    assert [image["prompt"] for image in document["images"]] == ["first", "a red apple", "crème brûlée", "x # y"]


@pytest.mark.parametrize("words", [("-",), ("--prompt-file", "-"), ("a bird", "-"), ("-", "--prompt-file", "more.txt")])
def test_prompts_come_from_standard_input(
    words: tuple[str, ...], run: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner of commands has a standard input of its own, so the reader's name for it is replaced."""
    stdin = io.TextIOWrapper(io.BytesIO(b"a cat\n\n# no prompt\na dog\n"))
    monkeypatch.setattr("vargen.reading.sys", type("sys", (), {"stdin": stdin}))
    Path("more.txt").write_text("a bird\n")
    result = run("generate", *words, "--model", text_model, "--seed", 1, "--threads", 1)
    assert result.exit_code == 0, result.stderr
    kinds = {line.split(".")[0].rsplit("-", 1)[0] for line in result.stdout.split()}
    assert kinds == {"a-cat", "a-dog"} | ({"a-bird"} if len(words) == 3 or "a bird" in words else set())


def test_classes_by_number_and_by_name(run: Any, class_model: Path) -> None:
    words = ("--class-label", "3", "--class-label", "Goldfish", "--model", class_model, "--seed", 1, "--json")
    document = json.loads(run("generate", *words).stdout)
    assert [image["class_label"] for image in document["images"]] == [3, 1]
    assert [image["file"] for image in document["images"]] == ["class-3-1.png", "class-goldfish-2.png"]


def test_a_long_prompt_is_cut_and_the_user_is_warned_once(run: Any, text_model: Path) -> None:
    prompt = ("a red apple on a table " * 500)[:10_000]
    result = run("generate", prompt, "-n", 3, "--batch-size", 2, "--model", text_model, "--seed", 1)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("warning: the prompt has") == 1
    assert "the model reads 16" in result.stderr and "is ignored" in result.stderr
    assert result.stdout.split()[0] == "a-red-apple-on-a-table-a-red-apple-on-a-1.png"


def test_quiet_and_library_noise(run: Any, text_model: Path) -> None:
    result = run("generate", "a cat", "--model", text_model, "--quiet", "-o", "a.jpg")
    assert result.exit_code == 0
    assert (result.stdout, result.stderr) == ("a.jpg\n", "")


@pytest.mark.parametrize(("raised", "code", "whole"), [(OSError("disk full"), 1, [1, 3]), (KeyboardInterrupt(), 130, [1])])
def test_an_interrupted_write_leaves_no_half_file(
    run: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, whole: list[int]
) -> None:
    """Nor does it take the other pictures of the batch with it."""
    save_whole, calls = Image.Image.save, []

    def save(self: Image.Image, path: Path, *args: Any, **kwargs: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"\x89PNG half")
            raise raised
        save_whole(self, path, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "save", save)
    Path("a-2.png").write_text("old")
    result = run("generate", "a cat", "-n", 3, "--model", text_model, "-o", "a.png")
    assert result.exit_code == code
    assert f"{len(whole)} of 3 images were written" in result.stderr and "Traceback" not in result.stderr
    assert sorted(p.name for p in Path().iterdir()) == sorted({"a-2.png", *(f"a-{number}.png" for number in whole)})
    assert Path("a-2.png").read_text() == "old"


def test_a_sheet_shows_all_images(run: Any, text_model: Path) -> None:
    result = run("generate", "a cat", "a dog", "--model", text_model, "--seed", 1, "-o", "out/", "--contact-sheet", "sheet.png")
    assert result.exit_code == 0, result.output
    assert pixels(Path("sheet.png")).shape[1] > 2 * 128
    assert len(list(Path("out").iterdir())) == 2


# -- videos -----------------------------------------------------------------------------------------------------------


def test_a_prompt_becomes_a_looping_file(run: Any, video_model: Path, tmp_path: Path) -> None:
    found = run(
        "generate", "a cat", "--model", video_model, "-o", tmp_path / "cat.webp", "--seed", "5", "--num-blocks", "2", "--json"
    )
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    (video,) = said["videos"]
    assert said["fps"] == 12 and video["seed"] == 5 and len(video["stats"]["blocks"]) == 2
    with Image.open(tmp_path / "cat.webp") as image:
        assert image.n_frames == 4


def test_an_image_model_generates_what_it_starts_from(run: Any, video_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    text_pipeline().save_pretrained(folder)
    words = ("a cat", "--model", video_model, "--seed", "5", "--num-blocks", "1", "--accelerator", "target", "-q")
    alone, started = tmp_path / "alone.webp", tmp_path / "started.webp"
    assert run("generate", *words, "-o", str(alone)).exit_code == 0
    found = run("generate", *words, "-o", str(started), "--image-model", str(folder))
    assert found.exit_code == 0, found.output
    with Image.open(alone) as one, Image.open(started) as other:
        assert other.n_frames == one.n_frames + 1, "the image is the first frame"
    settings = json.loads((video_model / "model_index.json").read_text())
    folder = Path(shutil.copytree(video_model, tmp_path / "video"))
    settings["defaults"]["image_model"] = "emoji"
    (folder / "model_index.json").write_text(json.dumps(settings))
    words = ("a cat", "--model", str(folder), *words[3:])
    for name, frames in (("default", 3), ("none", 2)):
        file = tmp_path / f"{name}.webp"
        found = run("generate", *words, "-o", str(file), *(() if name == "default" else ("--image-model", name)))
        assert found.exit_code == 0, found.output
        with Image.open(file) as image:
            assert image.n_frames == frames, name


def test_a_size_is_that_of_the_image_and_of_its_regeneration(run: Any, bits_model: Path, scale_model: Path) -> None:
    words = ("generate", "a dog", "--model", bits_model, "--device", "cpu", "-o", "dog.png")
    done = run(*words, "--height", 22, "--width", 44, "--seed", 5)
    assert done.exit_code == 0, done.output
    with Image.open("dog.png") as image:
        assert image.size == (44, 22)
    assert run("regenerate", "dog.png", "--model", bits_model, "--device", "cpu").exit_code == 0
    for given, said in (
        ((*words, "--height", 22), "height must come with width"),
        ((*words[:3], scale_model, *words[4:], "--width", 8), "width must be left out"),
    ):
        failed = run(*given)
        assert failed.exit_code == 2 and said in failed.stderr, failed.output
