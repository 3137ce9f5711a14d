"""`vargen export custom-generate`: its folder, in an interpreter without vargen, gives the tokens of an enabled model."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import custom_generate_calls
import pytest
import torch
from custom_generate_calls import RowsOfImage
from tiny_language_models import PAD, SPECIAL, has_release, make_emu3, make_glm, make_janus, needs_janus
from typer.testing import CliRunner

import vargen
from vargen.cli.main import app

pytestmark = needs_janus
Calls = list[tuple[int, dict[str, Any]]]
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.1}


def export(method: str, output: Path) -> Any:
    return CliRunner().invoke(app, ["export", "custom-generate", "-o", str(output), "--method", method])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("exported") / "fast"
    result = export("gumbel:window=5", output)
    assert result.exit_code == 0, result.output
    return output


@pytest.fixture
def run_without_vargen(folder: Path, tmp_path: Path) -> Callable[[Any, Calls], list[Any]]:
    def run(model: Any, calls: Calls) -> list[Any]:
        torch.save((model, calls), tmp_path / "calls.pt")
        words = [custom_generate_calls.__file__, folder, tmp_path / "calls.pt", tmp_path / "results.pt"]
        done = subprocess.run([sys.executable, "-I", *map(str, words)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return torch.load(tmp_path / "results.pt", weights_only=False)

    return run


def generate(model: Any, seed: int, method: str | None = None, **arguments: Any) -> Any:
    """Return the tokens of the model's own `generate`, or of a method that it is enabled by."""
    torch.manual_seed(seed)
    if method is None:
        return model.generate(**arguments)
    vargen.enable(model, method)
    try:
        found = model.generate(**arguments)
        assert vargen.summary(model).calls == 1
        return found
    finally:
        vargen.disable(model)


def compare(model: Any, own: dict[str, Any], exported: dict[str, Any], run: Any, sequences: int = 2) -> None:
    """Compare greedy tokens with the model's own, and sampled ones with those of an enabled model, in fewer passes."""
    seeds, sampled = [1, 2], {**SAMPLED, "num_return_sequences": sequences}
    calls = [(seed, {**exported, **sampled}) for seed in seeds]
    calls += [(seeds[0], {**exported, **sampled, "window": 1}), (0, {**exported, "do_sample": False})]
    *found, one_by_one, greedy = run(model, calls)
    assert torch.equal(greedy[0], generate(model, 0, **own, do_sample=False))
    for seed, (tokens, _) in zip(seeds, found, strict=True):
        assert torch.equal(tokens, generate(model, seed, "gumbel", **own, **sampled))
    assert torch.equal(one_by_one[0], found[0][0])
    assert found[0][1] < one_by_one[1]


def janus_call() -> tuple[Any, dict[str, Any]]:
    """A Janus, and two prompts of different lengths."""
    model, processor = make_janus(side=6)
    options = {"generation_mode": "image", "padding": True, "padding_side": "left", "return_tensors": "pt"}
    encoded = dict(processor(text=["a red apple on the moon", "a cat"], **options))
    assert not encoded["attention_mask"].all()
    return model, encoded


def test_janus_generates_the_tokens_of_an_enabled_model(run_without_vargen: Any) -> None:
    model, encoded = janus_call()
    own = {**encoded, "generation_mode": "image", "guidance_scale": 3.0}
    compare(model, own, {**encoded, "cfg_scale": 3.0}, run_without_vargen)


@pytest.mark.extended
@pytest.mark.parametrize("guided", [True, False])
def test_emu3_generates_the_tokens_of_an_enabled_model(guided: bool, run_without_vargen: Any) -> None:
    model, processor = make_emu3()
    padded = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    options = {"return_for_image_generation": True, "ratio": "1:1", "image_area": processor.downsample_ratio**2 * 16}
    encoded = processor(text=["a red apple on the moon", "a cat"], **padded, **options)
    negative = processor(text=["lowres , blurry", "blurry"], **padded)
    rows, columns = map(int, encoded.pop("image_sizes")[0])
    mapping = model.model.vocabulary_mapping
    image = [mapping.img2bpe[number] for number in sorted(mapping.img2bpe)]
    last = [SPECIAL.index("<eof>"), SPECIAL.index("</s>"), PAD]
    allowed = RowsOfImage(rows, columns, image, SPECIAL.index("<wrap>"), mapping.eol_token_id, last)
    call = {**encoded, "prefix_allowed_tokens_fn": allowed, "max_new_tokens": 60}
    if guided:
        names = {"negative_prompt_ids": negative.input_ids, "negative_prompt_attention_mask": negative.attention_mask}
        call |= {**names, "guidance_scale": 2.0}
    compare(model, call, call, run_without_vargen, sequences=1 if guided else 2)  # negative prompts are not expanded


@pytest.mark.skipif(not has_release("glm-image"), reason="needs transformers 5")
def test_glm_image_generates_the_tokens_of_an_enabled_model(run_without_vargen: Any) -> None:
    model, processor = make_glm()
    texts = "a red apple on the moon", "a cat"
    messages = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
    options = {"target_h": 64, "target_w": 96, "padding": True, "padding_side": "left"}
    encoded = dict(
        processor.apply_chat_template(messages, tokenize=True, processor_kwargs=options, return_dict=True, return_tensors="pt")
    )
    count = int(encoded["image_grid_thw"][:2].prod(1).sum())
    call = {**encoded, "max_new_tokens": count + 1}
    compare(model, call, call, run_without_vargen, sequences=1)  # grids are not expanded


@pytest.mark.extended
def test_what_is_not_supported_is_said_in_a_sentence(run_without_vargen: Any) -> None:
    model, encoded = janus_call()
    wrong = {
        "streamer": {"streamer": "none"},
        "beam_search": {"num_beams": 2},
        "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.5},
        "window": {"window": 0},
        "right": {"attention_mask": encoded["attention_mask"].flip(1)},
    }
    found = run_without_vargen(model, [(0, {**encoded, **each}) for each in wrong.values()])
    for name, (text, _) in zip(wrong, found, strict=True):
        assert isinstance(text, str) and text.startswith("ValueError: ") and name in text and "\n" not in text
    assert "training" in run_without_vargen(model.train(), [(0, encoded)])[0][0]


def test_the_folder_is_short_and_has_the_method_as_default(folder: Path, tmp_path: Path) -> None:
    code = (folder / "custom_generate/generate.py").read_text()
    assert len(code.splitlines()) <= 200 and "WINDOW = 5\n" in code
    assert "- custom_generate\n" in (folder / "README.md").read_text().split("---")[1]
    for file in folder.glob("custom_generate/*.py"):
        names = {
            line.split()[1].partition(".")[0] for line in file.read_text().splitlines() if line.startswith(("from ", "import "))
        }
        assert names - {""} <= {"__future__", "collections", "functools", "math", "typing", "torch", "transformers"}
    export("ar", tmp_path / "one")
    assert "WINDOW = 1\n" in (tmp_path / "one/custom_generate/generate.py").read_text()


@pytest.mark.parametrize("method", ["scd", "auto", "gumbel:window=auto", "gumbel:coupling=maximal", "gumbel:window=1"])
def test_other_methods_are_refused_before_anything_is_written(method: str, tmp_path: Path) -> None:
    result = export(method, tmp_path / "other")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_as_it_is(folder: Path) -> None:
    before = (folder / "README.md").stat().st_mtime_ns
    assert export("gumbel", folder).exit_code == 2
    assert (folder / "README.md").stat().st_mtime_ns == before
