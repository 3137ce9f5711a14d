"""A seed is one image, or one video, at every door: Python, commands, evaluation, page and service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vargen import open_pipeline
from vargen.bench.compare import compare_methods
from vargen.decoding import PRESETS, Sampling
from vargen.eval.run import GenerationPlan, generate_missing_images
from vargen.eval.video import compare_video_methods
from vargen.serving.engine import GenerationThread
from vargen.serving.tasks import ImageTask, VideoTask

PROMPTS, FIRST = ["a red apple", "a dog"], 7


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(FIRST + number)


def read(path: Any) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


def from_commands(run: Any, model: Path, folder: Path) -> dict[str, list[bytes]]:
    """Images by `vargen generate`, one by one and from a file of prompts, and by `vargen eval`."""
    (prompts := folder / "prompts.txt").write_text("\n".join(PROMPTS))
    one_by_one = [folder / "first.png", folder / "second.png"]
    for number, (prompt, file) in enumerate(zip(PROMPTS, one_by_one, strict=True)):
        result = run("generate", prompt, "--model", model, "--seed", FIRST + number, "-o", file)
        assert result.exit_code == 0, result.output
    result = run("generate", "--prompt-file", prompts, "--model", model, "--seed", FIRST, "-o", f"{folder}/listed/")
    assert result.exit_code == 0, result.output
    assert run("regenerate", one_by_one[1], "--model", model).exit_code == 0
    method = open_pipeline(model).baseline
    plan = GenerationPlan(str(model), str(folder / "run"), (method,), tuple(PROMPTS), num=2, seed=FIRST, batch=2)
    assert generate_missing_images(plan) == 2
    listed = sorted((folder / "listed").glob("*.png"), key=lambda file: int(file.stem.rsplit("-", 1)[1]))
    evaluated = sorted((folder / "run").glob("images/**/*.png"))
    files = {"generate": one_by_one, "generate --prompt-file": listed, "eval": evaluated}
    return {door: [read(file) for file in found] for door, found in files.items()}


def from_service(pipe: Any, sampling: Sampling, method: str) -> list[bytes]:
    with GenerationThread(pipe, method, slots=2) as generation:
        handles = generation.submit([ImageTask(prompt, FIRST + k, sampling) for k, prompt in enumerate(PROMPTS)])
        return [handle.result(60).image.tobytes() for handle in handles]


def from_page(pipe: Any, method: str) -> list[bytes]:
    pytest.importorskip("gradio", reason="the page needs gradio")
    from vargen.demo.calls import generate

    runs = [generate(pipe, prompt, [FIRST + k], accelerator=method) for k, prompt in enumerate(PROMPTS)]
    return [list(run)[-1].images[0].tobytes() for run in runs]


@pytest.mark.parametrize("kind", ["text_model", "scale_model"])
def test_a_seed_is_one_image_at_every_door(kind: str, run: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    pipe: Any = open_pipeline(model)
    method = pipe.baseline
    alone = [pipe(prompt, generator=generator(k), accelerator=method) for k, prompt in enumerate(PROMPTS)]
    expected = [each.images[0].tobytes() for each in alone]
    assert [each.stats.seeds for each in alone] == [[FIRST], [FIRST + 1]] and expected[0] != expected[1]
    compared = compare_methods(pipe, PROMPTS, {method: PRESETS[method]}, seed=FIRST)
    assert compared.seeds == [FIRST, FIRST + 1]
    doors = {
        "a list": pipe(PROMPTS, generator=[generator(0), generator(1)], accelerator=method).images,
        "compare": pipe.decode_tokens(compared.tokens[method]),
    }
    found = {door: [image.tobytes() for image in images] for door, images in doors.items()}
    found |= from_commands(run, model, tmp_path)
    stored = pipe.default_sampling
    sampling = Sampling(*(stored[name] for name in ("temperature", "top_k", "top_p")))
    found |= {"service": from_service(pipe, sampling, method), "page": from_page(pipe, method)}
    assert [door for door, images in found.items() if images != expected] == []


def test_a_seed_is_one_video_at_every_door(video_model: Path) -> None:
    pipe: Any = open_pipeline(video_model)
    options: dict[str, Any] = {"num_blocks": 2}
    frames = [
        pipe(PROMPTS[k], accelerator="target", generator=generator(k), output_type="pt", **options).frames for k in (0, 1)
    ]
    expected = [each[0].mul(255).round().byte().permute(0, 2, 3, 1).numpy() for each in frames]
    scorer = pipe.resolve_frame_scorer(None).scorer
    compared = compare_video_methods(pipe, PROMPTS, {"target": PRESETS["target"]}, seed=FIRST, scorer=scorer, **options)
    served: list[Any] = [[], []]
    with GenerationThread(pipe, "target", slots=2) as generation:

        def listen(handle: Any, event: Any) -> None:
            if isinstance(event, np.ndarray):
                served[handle.task.seed - FIRST].append(event)

        handles = generation.submit([VideoTask(PROMPTS[k], FIRST + k, 2) for k in (0, 1)], listen)
        assert all(handle.result(60).seed == FIRST + k for k, handle in enumerate(handles))
    found = {"compare": compared.frames["target"], "service": [np.concatenate(each) for each in served]}
    assert [door for door, videos in found.items() for k in (0, 1) if not np.array_equal(videos[k], expected[k])] == []
