"""Comparing methods for video: what is measured of frames, and the command's table and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_families import brightness
from typer.testing import CliRunner

from vargen.cli.main import app
from vargen.decoding import PRESETS
from vargen.eval.video import DRAFTS, block_discontinuity, compare_video_methods, flicker
from vargen.pipelines.loading import open_pipeline
from vargen.scoring.protocol import to_scorer


def ramp(frames: int, step: float = 0.05) -> torch.Tensor:
    return (step * torch.arange(frames))[:, None, None, None].expand(-1, 3, 2, 2)


def test_steady_motion_does_not_flicker_and_has_no_jumps() -> None:
    assert flicker(ramp(6)) == pytest.approx(0, abs=1e-6) and block_discontinuity(ramp(6), [3, 3]) == pytest.approx(0, abs=1e-6)
    back_and_forth = ramp(6, 0.1) * (torch.arange(6) % 2)[:, None, None, None]
    assert flicker(back_and_forth) > 0.3
    torn = torch.cat([ramp(3), 0.5 + ramp(3)])
    assert block_discontinuity(torn, [3, 3]) == pytest.approx(0.4 - 0.05, abs=1e-5) and block_discontinuity(torn, [2, 4]) == 0
    assert flicker(ramp(2)) == 0


def test_methods_are_compared_on_equal_prompts_and_seeds(video_model: Path) -> None:
    pipe = open_pipeline(video_model)
    methods = {"target": PRESETS["target"], "draft": DRAFTS, "stride": PRESETS["stride"]}
    methods["sdvg"] = PRESETS["sdvg"].with_tau(99.0)
    scorer = to_scorer(brightness, "brightness")
    found = compare_video_methods(
        pipe, ["a cat", "a dog"], methods, num_blocks=3, num_saved=1, scorer=scorer, options={"scorer": scorer}
    )
    rows = {row.name: row for row in found.methods}
    assert next(iter(rows)) == "target" and rows["target"].speedup == 1 and rows["target"].quality_retained == 1
    assert rows["draft"].quality_retained == 0 and rows["draft"].target_fraction == 0
    assert rows["stride"].target_fraction == pytest.approx(1 / 3)
    assert rows["sdvg"].acceptance == 0 and rows["sdvg"].score == rows["target"].score, "all refused: the target's videos"
    assert len(found.frames["draft"]) == 1 and found.frames["draft"][0].shape == (6, 16, 16, 3)
    json.dumps(found.to_dict())
    rejects(lambda: compare_video_methods(pipe, ["a"], {"draft": DRAFTS}), "baseline")


def test_the_commands_write_tables_strips_and_reports(video_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    shared = ["--model", str(video_model), "--methods", "draft,stride", "--threads", "1"]
    made = CliRunner().invoke(
        app, ["compare", "--prompt-file", str(prompts), "-o", str(tmp_path / "a.png"), "--num-blocks", "2", *shared]
    )
    assert made.exit_code == 0, made.output
    assert "retained" in made.stdout and "stride" in made.stdout and (tmp_path / "a.png").is_file()
    scored = ["--scorers", "tiny_families:brightness"]
    made = CliRunner().invoke(app, ["eval", "-o", str(tmp_path / "run"), "--prompt-file", str(prompts), *scored, *shared])
    assert made.exit_code == 0, made.output
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["metrics.json", "report.md", "strips.png"]
    said = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [row["name"] for row in said["methods"]] == ["target", "draft", "stride"]
