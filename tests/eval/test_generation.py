"""Generation that is interrupted or divided in any way gives the same images, each once."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_runs import check_killed_command, images, lines
from rejects import rejects
from tiny_models import class_pipeline

from vargen.cli.console import import_libraries
from vargen.eval.run import GenerationPlan, generate_missing_images, run_locally, select_classes
from vargen.eval.run_directory import ManifestWriter, RunDirectory, read_manifest

METHODS = ("ar", "gsd:budget=3,window=4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-class"
    class_pipeline().save_pretrained(folder)
    return folder


def make_plan(model: Path, output: Path, **changes: Any) -> GenerationPlan:
    base = GenerationPlan(str(model), str(output), METHODS, tuple(range(10)), num=7, batch=3, threads=1)
    return replace(base, **changes)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Pictures of an undisturbed run, by name."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    assert generate_missing_images(make_plan(model, output)) == 14
    return images(output)


def stopping_after(units: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[..., Iterator[Any]]:
    def backend(worker: Any, argument: Any, work: list[Any]) -> Iterator[Any]:
        yield from run_locally(worker, argument, work[:units])
        if len(work) > units:
            raise error

    return backend


# -- same pictures, however divided -----------------------------------------------------------------------------------


def test_seeds_and_subjects_depend_on_the_item_alone() -> None:
    few, many = (GenerationPlan("m", "o", ("ar",), ("a", "b", "c"), num, 5) for num in (4, 400))
    assert [few.prompt_at(i) for i in range(4)] == [many.prompt_at(i) for i in range(4)] == ["a", "b", "c", "a"]
    assert select_classes("random", 10, {}, 3, 5) == select_classes("random", 10, {}, 3, 50)[:5]
    assert len(set(select_classes("random", 10, {}, 3, 200))) == 10
    assert select_classes("3, cat ,4", 10, {7: "cat, kitty"}) == [3, 7, 4]
    rejects(lambda: GenerationPlan("m", "o", ("ar",), ("a",), 2, 2**63 - 1), "seed")


def test_units_of_several_batches_give_the_same_images_and_resume(whole: dict[str, bytes], model: Path, tmp_path: Path) -> None:
    plan = make_plan(model, tmp_path / "run", unit=5)
    with pytest.raises(KeyboardInterrupt):
        generate_missing_images(plan, backend=stopping_after(1))
    some = images(tmp_path / "run")
    next(iter(sorted((tmp_path / "run").glob("images/**/*.png")))).unlink()
    assert generate_missing_images(plan) == 14 - len(some) + 1 and images(tmp_path / "run") == whole
    records = [record for file in (tmp_path / "run").glob("manifest/*.jsonl") for record in read_manifest(file)]
    assert {record["batch"] for record in records} == {2, 3} and all(record["passes"] > 0 for record in records)
    rejects(lambda: generate_missing_images(replace(plan, unit=None)), "unit", ValueError)
    for wrong in (2, 0, 10**6):
        rejects(lambda unit=wrong: make_plan(model, tmp_path / "bad", unit=unit).validate(), "unit", ValueError)


def test_an_image_is_what_the_pipeline_generates_of_its_seed(whole: dict[str, bytes], model: Path, tmp_path: Path) -> None:
    import io

    import numpy as np
    import torch
    from PIL import Image

    from vargen.pipelines.loading import open_pipeline

    alone = open_pipeline(str(model))(class_labels=4, generator=torch.Generator().manual_seed(4), accelerator="ar")
    stored = Image.open(io.BytesIO(whole["images/ar/000/00000004.png"]))
    assert np.array_equal(np.asarray(stored), np.asarray(alone.images[0]))
    about = json.loads(stored.info["vargen"])
    assert (about["class"], about["seed"], about["method"], about["text"]) == (4, 4, "ar", "dog")
    assert str(model) not in stored.info["vargen"]


def test_two_shards_generate_what_one_does(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    generated = [generate_missing_images(make_plan(model, tmp_path / "run"), shard, 2) for shard in (2, 1)]
    assert sum(generated) == 14 and 0 < generated[0] < 14
    assert images(tmp_path / "run") == whole
    assert len(lines(tmp_path / "run")) == len(set(lines(tmp_path / "run"))) == 14


def test_more_methods_and_more_images_are_generated_beside_the_old_ones(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    assert generate_missing_images(make_plan(model, tmp_path / "run", num=3, methods=METHODS[:1])) == 3
    assert generate_missing_images(make_plan(model, tmp_path / "run", num=3, methods=METHODS)) == 3
    assert generate_missing_images(make_plan(model, tmp_path / "run")) == 8
    assert images(tmp_path / "run") == whole and generate_missing_images(make_plan(model, tmp_path / "run")) == 0


# -- stopped and resumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, 1, 3])
def test_an_interrupted_run_goes_on(
    units: int, model: Path, whole: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        generate_missing_images(make_plan(model, tmp_path / "run"), backend=stopping_after(units))
    told: list[tuple[int, int]] = []
    rest = generate_missing_images(make_plan(model, tmp_path / "run"), progress=lambda done, total: told.append((done, total)))
    assert told[0] == (14 - rest, 14) and told[-1] == (14, 14)
    assert images(tmp_path / "run") == whole and len(lines(tmp_path / "run")) == 14
    log = (tmp_path / "run/log.txt").read_text().splitlines()
    assert f"{14 - rest} of 14 images; stopped by KeyboardInterrupt" in log[1] and "14 of 14 images; finished" in log[-1]
    assert f"{14 - rest} of 14 images are there; the same command resumes" in caplog.text


def test_a_truncated_line_is_cut_off_and_its_image_generated_again(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    generate_missing_images(make_plan(model, tmp_path / "run"))
    (manifest,) = (tmp_path / "run/manifest").glob("*.jsonl")
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert generate_missing_images(make_plan(model, tmp_path / "run")) == 1
    assert images(tmp_path / "run") == whole and len(lines(tmp_path / "run")) == len(set(lines(tmp_path / "run"))) == 14
    data = manifest.read_bytes().split(b"\n")
    data[2] = b'{"index": 1, "met\x00\x00'  # blocks that a crashed disk lost
    manifest.write_bytes(b"\n".join(data))
    assert generate_missing_images(make_plan(model, tmp_path / "run")) == 1 and images(tmp_path / "run") == whole


def test_a_batch_of_which_a_part_is_missing_is_generated_beside_the_same_others(model: Path, tmp_path: Path) -> None:
    """Rounding depends on what else is in a batch, on some machines: the batches of a resumed run are those of a whole one."""
    run = make_plan(model, tmp_path / "run", methods=("ar",))
    whole_units = [batch.indices for batch in run.pending_batches(())]
    assert whole_units == [(0, 1, 2), (3, 4, 5), (6,)]
    (partial,) = run.pending_batches([("ar", item) for item in (0, 1, 2, 3, 5, 6)])
    assert partial.indices == (3, 4, 5) and partial.missing == (4,)
    parts = [[batch.indices for batch in run.pending_batches((), shard, 2)] for shard in (1, 2)]
    assert sorted(parts[0] + parts[1]) == whole_units and not set(parts[0]) & set(parts[1])


def test_missing_and_changed_images_are_generated_again(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    generate_missing_images(make_plan(model, tmp_path / "run"))
    first, second, third = (tmp_path / "run" / name for name in list(whole)[:3])
    first.unlink()
    second.write_bytes(b"")
    third.write_bytes(whole[list(whole)[2]][:-9])
    assert generate_missing_images(make_plan(model, tmp_path / "run")) == 3
    assert images(tmp_path / "run") == whole
    assert len(RunDirectory(tmp_path / "run").complete_records()) == 14


@pytest.mark.slow
def test_kill_9_loses_nothing_and_generates_nothing_twice(model: Path, tmp_path: Path) -> None:
    """The command is killed while it works; the run is resumed here."""
    check_killed_command(make_plan(model, tmp_path / "killed", methods=("ar",), num=30, batch=2))


# -- a full disk -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_leaves_nothing_half_written_and_is_resumed(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses what is too large: first the manifest, then a picture."""
    resource = pytest.importorskip("resource")
    import_libraries()  # what they print would go into pytest's file, which may not grow either
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = make_plan(model, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        generate_missing_images(run, backend=stopping_after(1))
    try:
        (manifest,) = (tmp_path / "run/manifest").glob("*.jsonl")
        for size, what in (
            (manifest.stat().st_size + 100, r"manifest.shard-1-of-1.jsonl was not written"),
            (100, r"png was not"),
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            held = manifest.read_bytes()
            with pytest.raises(OSError, match=what + r".*make room"):
                generate_missing_images(run)
            assert manifest.read_bytes() == held
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert all(len(data) == len(whole[name]) for name, data in images(tmp_path / "run").items())
    assert generate_missing_images(run) == 11
    assert images(tmp_path / "run") == whole and len(lines(tmp_path / "run")) == 14


# -- other settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "named"), [
    ({"seed": 1}, "seed"), ({"batch": 2}, "batch"), ({"sampling": {"temperature": 0.5}}, "sampling"),
    ({"prompts": (1, 2)}, "subjects"), ({"dtype": "bfloat16"}, "dtype"),
])  # fmt: skip
def test_a_run_of_other_settings_is_refused_and_stays(change: dict[str, Any], named: str, model: Path, tmp_path: Path) -> None:
    generate_missing_images(make_plan(model, tmp_path / "run", num=3))
    held = (tmp_path / "run/run.json").read_bytes()
    rejects(lambda: generate_missing_images(make_plan(model, tmp_path / "run", **change)), named, ValueError)
    assert (tmp_path / "run/run.json").read_bytes() == held


def test_other_weights_of_the_same_name_are_other_settings(model: Path, tmp_path: Path) -> None:
    class_pipeline().save_pretrained(tmp_path / "model")
    generate_missing_images(make_plan(tmp_path / "model", tmp_path / "run", num=3))
    changed = class_pipeline()
    changed.transformer.output.weight.data.mul_(2)
    changed.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"weights was"):
        generate_missing_images(make_plan(tmp_path / "model", tmp_path / "run", num=3))


def test_a_folder_with_other_contents_and_a_damaged_run_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    with pytest.raises(ValueError, match="holds other files and no run"):
        generate_missing_images(make_plan(model, tmp_path / "mine"))
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "run").mkdir()
    for text in ("{", "[]", '{"methods": 3}'):
        (tmp_path / "run/run.json").write_text(text)
        rejects(lambda: generate_missing_images(make_plan(model, tmp_path / "run")), "run")


@pytest.mark.parametrize(("change", "named"), [
    ({"methods": ("ar", "ar")}, "methods"), ({"methods": ()}, "methods"), ({"methods": ("gsd:bugdet=3",)}, "bugdet"),
    ({"methods": ("speculative",)}, "draft_transformer"), ({"prompts": ("a red apple",)}, "prompts"),
    ({"sampling": {"top_k": 65}}, "top_k"), ({"batch": 0}, "batch"), ({"methods": ("gsd:budget=3", "gsd:budget=-3")}, "budget"),
])  # fmt: skip
def test_what_cannot_be_generated_is_reported_first(change: dict[str, Any], named: str, model: Path, tmp_path: Path) -> None:
    rejects(lambda: generate_missing_images(make_plan(model, tmp_path / "run", **change)), named, ValueError)
    assert not (tmp_path / "run").exists()


# -- the journal --------------------------------------------------------------------------------------------------------


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with ManifestWriter(tmp_path / "j.jsonl") as journal:
        journal.append({"a": 1}, {"b": [2.5, "ü"]})
        if sys.platform != "win32":
            with pytest.raises(ValueError, match="another process"):
                ManifestWriter(tmp_path / "j.jsonl")
    with ManifestWriter(tmp_path / "j.jsonl") as journal:
        journal.append({"c": 3})
    assert read_manifest(tmp_path / "j.jsonl") == [{"a": 1}, {"b": [2.5, "ü"]}, {"c": 3}]
