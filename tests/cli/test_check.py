"""`vargen check`: its findings, its page, and models that are broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_language_models import has_release, make_chameleon, make_emu3, make_glm, make_janus, needs_janus, randomize

import vargen
from vargen.cli.check import digest_weights, remove_folders
from vargen.models.causal_video.cache import VideoCache
from vargen.models.guidance import GuidedTokenModel
from vargen.models.kv_cache import KVCache
from vargen.models.var.decoding import VARScaleModel
from vargen.verify import model_check
from vargen.verify.model_check import ModelCheck

PROMPTS = ["a red apple", "a blue car on the moon"]


@pytest.fixture
def check(run: Any) -> Any:
    """`check(folder, *words)` returns the result of the command, the page and its figures by name."""
    Path("two.txt").write_text("a cat\na dog\n")

    def call(folder: Path, *words: str) -> Any:
        result = run("check", folder, "--threads", 1, "-o", "out", "--minutes", 2, *words)
        assert result.exit_code in (0, 1), result.output
        report = json.loads(Path("out/report.json").read_text())
        return result, Path("out/report.md").read_text(), {each["name"]: each for each in report["findings"]}

    return call


def save_janus(folder: Path) -> Path:
    vargen.accelerate(*make_janus(seed=3)).save_pretrained(folder)
    return folder


def halve_cache(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Halve all keys and values after each pass that keeps some."""
    if kind == "scale":
        forward = VARScaleModel.forward

        def forward_and_halve(self: Any, state: Any, *arguments: Any) -> Any:
            found = forward(self, state, *arguments)
            state.cache.v.mul_(0.5)
            return found

        monkeypatch.setattr(VARScaleModel, "forward", forward_and_halve)
        return
    owner, name, buffers = (VideoCache, "commit", ("keys", "values")) if kind == "video" else (KVCache, "commit_chain", ("kv",))
    commit = getattr(owner, name)

    def commit_and_halve(self: Any, *arguments: Any) -> None:
        commit(self, *arguments)
        for buffer in buffers:
            getattr(self, buffer).mul_(0.5)

    monkeypatch.setattr(owner, name, commit_and_halve)


# -- whole runs ----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_token_model(check: Any, text_model: Path, tmp_path: Path) -> None:
    result, page, found = check(text_model, "--prompt-file", "two.txt", "--seed", "5")
    assert result.exit_code == 0 and "check" in result.stdout and "report.md" in result.stdout, result.output
    whole, gumbel = found["greedy tokens and one pass without a cache"], found["gumbel and ar"]
    assert (whole["result"], whole["figures"]["images"], whole["figures"]["tokens"]) == ("equal", 2, 16) and whole["promised"]
    assert gumbel["result"] == "equal" and gumbel["figures"] == {"images": 2, "equal": 2, "tokens": 16}
    shapes = found["chains and trees"]
    assert shapes["result"] == "equal" and {each["of"] for each in shapes["figures"].values()} == {7, 8}
    assert 0.5 < found["int8"]["figures"]["same_argmax"] <= 1 and 0 <= found["int8"]["figures"]["mean_kl"] < 0.5
    for part in ("tiny-text", "float32", "| gumbel |", "torch ", "--seed 5", "--prompt-file two.txt", "![images"):
        assert part in page, part
    missing = page.split("## Not checked")[1]
    assert "speculative: " in missing and "eagle, lantern: " in missing
    digests = digest_weights(text_model, 60)
    assert "transformer/diffusion_pytorch_model.safetensors" in digests and all(each in page for each in digests.values())
    for place in (tmp_path, text_model.parent, Path.home()):
        assert str(place) not in page + Path("out/report.json").read_text()
    with Image.open("out/images.png") as image:
        assert image.width > 2 * 128 and image.height > 5 * 128
    document = json.loads(Path("out/report.json").read_text())
    assert document["seed"] == 5 and set(document["milliseconds"]) == {"1", "16"}
    assert [each["name"] for each in document["methods"]][:3] == ["ar", "sjd", "scd"]


def test_a_model_of_classes(check: Any, class_model: Path) -> None:
    _, page, found = check(class_model)
    assert found["gumbel and ar"]["figures"]["images"] == 8 and "ar | exact | 1.00" in page


@pytest.mark.extended
def test_a_next_scale_model(check: Any, scale_model: Path) -> None:
    result, page, found = check(scale_model, "--prompt-file", "two.txt")
    whole = found["greedy tokens and one pass without a cache"]
    assert result.exit_code == 0 and whole["result"] == "equal" and whole["figures"]["tokens"] == 30
    assert set(json.loads(Path("out/report.json").read_text())["milliseconds"]) == {"1", "4", "9", "16"}
    assert "| code | relaxed |" in page and "int8" in found


@pytest.mark.extended
def test_a_model_of_bits(check: Any, bits_model: Path) -> None:
    result, page, found = check(bits_model, "--prompt-file", "two.txt")
    whole = found["greedy tokens and one pass without a cache"]
    assert result.exit_code == 0 and whole["result"] == "equal" and whole["figures"]["tokens"] == 228
    assert found["int8"]["result"] == "not checked" and "| code | relaxed |" in page


@pytest.mark.extended
def test_a_video_model(check: Any, video_model: Path) -> None:
    result, page, found = check(video_model, "--prompt-file", "two.txt")
    plain = found["plain loop without a cache"]
    assert result.exit_code == 0 and plain["result"] == "equal" and plain["figures"]["blocks"] == 3
    assert "| stride |" in page and "sdvg-learned: " in page.split("## Not checked")[1]
    with Image.open("out/images.png") as image:
        assert image.width > 6 * 128


@needs_janus
def test_a_model_of_transformers(check: Any, tmp_path: Path) -> None:
    result, page, found = check(save_janus(tmp_path / "janus"), "--prompt-file", "two.txt")
    assert result.exit_code == 0 and found["greedy tokens and generate"]["result"] == "equal", result.output
    assert found["int8"]["result"] == "not checked" and "int8: " in page.split("## Not checked")[1]


@needs_janus
def test_a_model_whose_generate_masks_image_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = make_chameleon()
    found = ModelCheck(vargen.accelerate(randomize(model, 3, 0.8), processor), PROMPTS)
    found._encode()
    found._time_passes()
    check = found._list_parts()["greedy tokens and one pass without a cache"]
    assert check().result == "equal"
    halve_cache(monkeypatch, "text")
    assert check().result == "different"


@pytest.mark.parametrize("name", ["emu3", "glm-image"])
def test_calls_of_generate(name: str) -> None:
    if not has_release(name):
        pytest.skip(f"{name} came with a newer transformers")
    made = make_emu3(seed=2) if name == "emu3" else make_glm(seed=1)
    found = ModelCheck(vargen.accelerate(*made, size=(4, 5) if name == "emu3" else (2, 3)), PROMPTS[:1])
    found._encode()
    found._time_passes()
    assert found._check_generate().result == "equal"
    assert found._check_chain_and_tree().result == "equal"


# -- broken models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("text", "float32"),
        ("text", "bfloat16"),
        ("scale", "float32"),
        pytest.param("video", "float32", marks=pytest.mark.extended),
    ],
)
def test_a_broken_cache_is_reported(
    check: Any, text_model: Path, scale_model: Path, video_model: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    halve_cache(monkeypatch, kind)
    folder = {"text": text_model, "scale": scale_model, "video": video_model}[kind]
    result, page, found = check(folder, "--prompt-file", "two.txt", "--dtype", dtype)
    broken = found["plain loop without a cache" if kind == "video" else "greedy tokens and one pass without a cache"]
    assert broken["result"] == "different", broken
    assert result.exit_code == (1 if dtype == "float32" else 0) and ("**different**" in page) == (dtype == "float32")
    if kind != "video":
        assert kind == "scale" or found["int8"]["result"] == "measured", "bfloat16 is compared with int8, too"
        first = broken["figures"]["differences"][0]
        assert first["margin"] > 0 and f"position {first['position']}" in page


@pytest.mark.parametrize("name", ["janus", "emu3", "glm-image"])
def test_a_broken_cache_differs_from_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_release(name):
        pytest.skip(f"{name} came with a newer transformers")
    made, size = {"janus": (make_janus, None), "emu3": (make_emu3, (4, 5)), "glm-image": (make_glm, (2, 3))}[name]
    model, processor = made()
    found = ModelCheck(vargen.accelerate(randomize(model, 3, 0.8), processor, size=size), PROMPTS)
    found._encode()
    found._time_passes()
    halve_cache(monkeypatch, "text")
    finding = found._check_generate()
    assert finding.is_failure and finding.figures["differences"][0]["position"] > 0


def test_wrong_positions_of_trees_are_reported(text_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = GuidedTokenModel.repeat_rows
    monkeypatch.setattr(GuidedTokenModel, "repeat_rows", lambda self, part, dims: repeat(self, part, dims) + (dims == 1))
    found = ModelCheck(text_pipe, PROMPTS)
    found._encode()
    finding = found._check_chain_and_tree()
    assert finding.is_failure and finding.figures["tree of 7"]["difference"] > 0.01
    assert finding.figures["chain of 8"]["difference"] < 1e-4


def test_an_error_of_a_check_is_its_finding(check: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"no file {text_model}/x.json")

    wrong = {"difference": float("nan"), "largest": 1.0, "same": 0, "of": 7}
    monkeypatch.setattr(model_check, "_compare_logits", lambda *_: wrong)
    monkeypatch.setattr(model_check, "compare_methods", fail)
    result, page, found = check(text_model, "--prompt-file", "two.txt")
    assert result.exit_code == 1 and found["methods"]["result"] == "failed" and "RuntimeError: no file x.json" in page
    assert found["chains and trees"]["result"] == "different" and "largest difference nan" in page
    assert found["gumbel and ar"]["result"] == "not checked" and not Path("out/images.png").exists()


# -- limits --------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_time_is_reduced_or_left_out(text_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModelCheck(text_pipe, PROMPTS, minutes=1)
    found.unit_seconds, found.size = 0.1, 100
    assert found._plan("a", 0.5, 8) == (2, 100) and "a: 2 of 8 prompts" in found.notes[-1]
    images, size = found._plan("b", 0.1, 8)
    assert images == 1 and 50 <= size <= 60 and f"the first {size} of 100 tokens" in found.notes[-1]
    with pytest.raises(model_check.NotCheckedError, match="minutes"):
        found._plan("c", 0.01, 8)
    found = ModelCheck(text_pipe, PROMPTS, minutes=1e-6)
    found.run()
    assert {each.result for each in found.findings[1:]} <= {"not checked", "equal"}, found.findings


def test_images_that_are_cut_off_are_compared(text_pipe: Any) -> None:
    found = ModelCheck(text_pipe, PROMPTS)
    found._encode()
    compared = model_check.compare_methods(text_pipe, PROMPTS[:1], found._core_methods(), num_tokens=5)
    assert {tokens.shape for tokens in compared.tokens.values()} == {(1, 5)}
    whole = model_check.compare_methods(text_pipe, PROMPTS[:1], found._core_methods())
    assert (compared.tokens["scd"] == whole.tokens["scd"][:, :5]).all()


def test_an_interrupted_run_leaves_its_page(run: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_check, "compare_methods", interrupt)
    result = run("check", text_model, "--threads", 1)
    assert result.exit_code == 130 and result.stderr.endswith("interrupted\n")
    page = Path("check-tiny-text/report.md").read_text()
    assert "interrupted" in page and "chains and trees | equal" in page


def test_folders_are_removed_from_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane doe")
    text = "see /home/jane doe/models/a.json, '/data/x/b.json' and C:\\users\\jane\\c.json"
    assert remove_folders(text) == "see ~/models/a.json, 'b.json' and c.json"
    for kept in ("tokens/pass", "https://huggingface.co/a/b", "a / b", "images.png", "owner/name"):
        assert remove_folders(kept) == kept
