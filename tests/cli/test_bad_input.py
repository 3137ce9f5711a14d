"""Bad input to `vargen generate`: exit code 2, one clear line, no traceback, no file, no weight loaded."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from vargen.pipelines.llamagen import LlamaGenPipeline

    def fail(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were loaded before the input was checked")

    monkeypatch.setattr(LlamaGenPipeline, "from_pretrained", fail)


def refused(result: Any, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for part in said:
        assert part in result.stderr, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(("error: ", "Error: ")), result.stderr
    assert list(Path().rglob("*")) == []


TEXT = [
    ([""], ["prompt[0] is empty"]),
    (["a cat", " \n"], ["prompt[1] is empty"]),
    ([], ["give a prompt"]),
    (["a", "--guidance-scale", "-1"], ["guidance_scale", "at least 0", "-1"]),
    (["a", "--guidance-scale", "nan"], ["guidance_scale", "finite"]),
    (["a", "--guidance-scale", "inf"], ["guidance_scale", "finite"]),
    (["a", "--guidance-scale", "1e38"], ["guidance_scale must be at most 1000", "1e+38"]),
    (["\u200b"], ["prompt[0] is empty"]),
    (["a", "--temperature", "-0.1"], ["temperature", "at least 0", "-0.1"]),
    (["a", "--temperature", "nan"], ["temperature", "finite"]),
    (["a", "--top-k", "0"], ["top_k", "at least 1", "0"]),
    (["a", "--top-k", "-1"], ["top_k", "at least 1", "-1"]),
    (["a", "--top-k", "65"], ["top_k", "vocabulary of 64", "65"]),
    (["a", "--top-k", "ten"], ["--top-k"]),
    (["a", "--top-p", "0"], ["top_p", "(0, 1]"]),
    (["a", "--top-p", "1.5"], ["top_p", "(0, 1]", "1.5"]),
    (["a", "--top-p", "nan"], ["top_p", "(0, 1]"]),
    (["a", "--accelerator", "arr"], ["unknown accelerator 'arr'", "'ar'"]),
    (["a", "--accelerator", "gumbel:windw=8"], ["no setting 'windw'", "window"]),
    (["a", "--accelerator", "gumbel:window=x"], ["unknown window", "auto"]),
    (["a", "--accelerator", "gumbel:window"], ["key=value"]),
    (["a", "--seed", "-1"], ["seed must be", "0 to 9223372036854775807"]),
    (["a", "--seed", str(2**63)], ["seed must be", "0 to 9223372036854775807"]),
    (["a", "-n", "2", "--seed", str(2**63 - 1)], ["seed must be at most", "last of 2 images"]),
    (["a", "-n", "0"], ["num_images", "at least 1"]),
    (["a", "-n", "5000"], ["1024"]),
    (["a", "--batch-size", "0"], ["batch_size", "at least 1"]),
    (["a", "--threads", "0"], ["threads", "from 1 to"]),
    (["a", "--dtype", "int8"], ["--dtype", "bfloat16"]),
    (["a", "--device", "tpu"], ["--device", "cuda"]),
    (["a", "--compile", "--device", "cpu"], ["compile must be False on a CPU"]),
    (["a", "--negative-prompt", " "], ["negative_prompt"]),
    (["a", "--class-label", "1"], ["not both"]),
    (["--class-label", "1"], ["generates from text", "prompt"]),
    (["a", "--prompt-file", "nothing.txt"], ["prompt_file 'nothing.txt' does not exist"]),
    (["a", "-o", "a.gif"], ["output", "png, jpg, jpeg, webp", "'a.gif'"]),
    (["a", "-o", ""], ["output"]),
    (["a", "-o", "-"], ["output"]),
    (["a", "--contact-sheet", ""], ["contact_sheet must name a file or a folder, got ''"]),
    (["a", "--contact-sheet", "-"], ["contact_sheet must name a file or a folder, got '-'"]),
    (["a", "-o", "~nosuchuser/x.png"], ["output '~nosuchuser/x.png' begins with a home folder that is not known"]),
    (["a", "-o", "~nosuchuser/"], ["output '~nosuchuser/' begins with a home folder"]),
    (["a", "--contact-sheet", "~nosuchuser/x.png"], ["contact_sheet '~nosuchuser/x.png' begins with a home folder"]),
    (["a", "--prompt-file", "~nosuchuser/x"], ["prompt_file '~nosuchuser/x' begins with a home folder"]),
    (["a", "--model", "~nosuchuser/x"], ["model '~nosuchuser/x' begins with a home folder"]),
    (["a", "-o", "pic.png", "--contact-sheet", "pic.png"], ["contact_sheet 'pic.png' is also output 'pic.png'"]),
    (["a", "-o", "pic.png", "--contact-sheet", "./x/../pic.png"], ["is also output 'pic.png'"]),
    (
        ["a", "-n", "2", "-o", "pics.png", "--contact-sheet", "pics-1.png"],
        ["contact_sheet 'pics-1.png' is also output 'pics-1.png'"],
    ),
    (["a", "--seed", "1", "--contact-sheet", "a-1.png"], ["contact_sheet 'a-1.png' is also output 'a-1.png'"]),
    (["a", "--seed", "1", "--contact-sheet", "a-1-2.png"], ["contact_sheet 'a-1-2.png' may be used by output 'a-1.png'"]),
    (["a", "-o", "x" * 220 + ".png"], ["output", "at most 200 bytes"]),
    (["a", "-o", "x" * 300 + ".png"], ["output", "cannot be written", "too long"]),
    (["a", "-o", "x" * 300 + "/a.png"], ["output", "cannot be written", "too long"]),
    (["a", "--unknown-option"], ["--unknown-option"]),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("words", "said"), TEXT, ids=lambda value: " ".join(value)[:40])
def test_bad_input_of_a_text_model(run: Any, text_model: Path, words: list[str], said: list[str]) -> None:
    refused(run("generate", "--model", text_model, *words), *said)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--class-label", "10"], ["class label", "0 to 9", "10"]),
        (["--class-label", "-1"], ["class label", "0 to 9", "-1"]),
        (["--class-label", "9" * 5000], ["unknown class name '999"]),
        (["--class-label", "goldfisch"], ["goldfisch", "'goldfish'"]),
        (["a cat"], ["--class-label 0 to 9"]),
        (["--class-label", "1", "--negative-prompt", "x"], ["negative_prompt"]),
    ],
)
def test_bad_input_of_a_class_model(run: Any, class_model: Path, words: list[str], said: list[str]) -> None:
    refused(run("generate", "--model", class_model, *words), *said)


@pytest.mark.usefixtures("no_weights")
def test_unknown_models(run: Any, tmp_path: Path) -> None:
    refused(run("generate", "a", "--model", "/no/such/folder"), "unknown model '/no/such/folder'", "model_index.json")
    refused(run("generate", "a", "--model", tmp_path), "holds no model_index.json")


@pytest.mark.usefixtures("no_weights")
def test_a_place_that_cannot_be_written(run: Any, text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken-1.png").mkdir()
    for place in (tmp_path / "file" / "a.png", f"{tmp_path}/file/", tmp_path / "file" / "deep" / "a.png"):
        refused(run("generate", "a", "--model", text_model, "-o", place), "cannot be written", "is not a folder")
    refused(run("generate", "a", "-n", 2, "--model", text_model, "-o", tmp_path / "taken.png"), "taken-1.png", "is a folder")
    if Path("/proc").is_dir():
        refused(run("generate", "a", "--model", text_model, "-o", "/proc/a.png"), "output folder '/proc' cannot be written")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("content", "said"), [(b"# nothing\n\n", "contains no prompt"), (b"caf\xe9", "UTF-8"), (b"", "contains no prompt")]
)
def test_bad_prompt_files(run: Any, text_model: Path, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "p.txt").write_bytes(content)
    refused(run("generate", "--prompt-file", tmp_path / "p.txt", "--model", text_model), "prompt_file", said)


@pytest.mark.usefixtures("no_weights")
def test_an_output_that_is_the_prompt_file(run: Any, text_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.png"
    prompts.write_text("a cat\n")
    (tmp_path / "link.png").symlink_to(prompts)
    for option in ("-o", "--contact-sheet"):
        for name in ("prompts.png", "link.png"):
            words = ("--prompt-file", prompts, "--model", text_model, option, tmp_path / name)
            refused(run("generate", *words), f"{name}' would overwrite prompt_file")
    assert prompts.read_text() == "a cat\n"


@pytest.mark.usefixtures("no_weights")
def test_a_prompt_that_is_no_text(run: Any, text_model: Path) -> None:
    """What Python makes of argument bytes that are not UTF-8."""
    refused(run("generate", "caf\udce9", "--model", text_model), "prompt[0]", "UTF-8")


@pytest.mark.usefixtures("no_weights")
def test_damaged_weights_are_found_by_their_header(run: Any, text_model: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(text_model, copy)
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    refused(run("generate", "a", "--model", copy), "damaged")
