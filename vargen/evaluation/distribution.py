"""Pictures of every method in large batches, kept on disk, and two-sample tests against sequential ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.decoding import Method, resolve_method
from vargen.decoding.method import same_spec
from vargen.evaluation.two_sample import two_sample_tests
from vargen.files import atomic_file
from vargen.pipelines.base import VisualPipeline
from vargen.weight_files import load_npz, weights_digest


def claim(folder: Path, made_of: dict[str, Any]) -> None:
    """Mark `folder` as holding tokens made of `made_of`.

    Raises:
        ValueError: if it holds tokens made otherwise, naming what differs.
    """
    made_of = json.loads(json.dumps(made_of))
    folder.mkdir(parents=True, exist_ok=True)
    label = folder / "made_of.json"
    if not label.is_file():
        if any(folder.glob("*.npz")):
            raise ValueError(f"cache {str(folder)!r} holds tokens that do not say how they were made; give another one")
        with atomic_file(label) as temporary:
            temporary.write_text(json.dumps(made_of, indent=1))
        return
    held = json.loads(label.read_text())
    changed = [key for key in made_of if not same_spec(held.get(key), made_of[key])]
    differing = [f"{key} {held.get(key)!r} (now {made_of.get(key)!r})" for key in changed]
    if differing:
        raise ValueError(
            f"cache {str(folder)!r} holds tokens made otherwise: {'; '.join(differing)[:400]}. Give another cache, or remove it"
        )


def draw_many(
    pipe: VisualPipeline,
    prompts: Sequence[str],
    accelerator: Method,
    pictures: int,
    batch: int,
    seed: int,
    folder: Path,
    settings: dict[str, Any],
    weights: str,
    progress: Callable[[int], None] | None = None,
    not_kept: Callable[[Path, OSError], None] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Tokens int64 `[pictures, N]` of the prompts in turn, seeds from `seed`, sampled by `settings`, and mean statistics.

    Every batch is kept in `folder`, so a run that was stopped goes on where it was. `weights` names what drew it.

    Args:
        not_kept: called where a file cannot be written, on a full disk say, so that the run goes on without it.

    Raises:
        ValueError: if `folder` holds tokens of other weights, prompts, settings or another method, or damaged ones.
        OSError: if a file cannot be written and there is no `not_kept`.
    """
    decoder = pipe.decoder(settings)
    made_of = {
        "weights": weights,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "prompts": list(prompts),
        "sampling": settings,
        "method": accelerator.spec(),
    }
    keep = True
    try:
        claim(folder, made_of)
    except OSError as error:
        if not_kept is None:
            raise
        not_kept(folder, error)
        keep = False  # without the label nobody could tell how the tokens were made
    parts, passes, relaxation = [], [], []
    for start in range(0, pictures, batch):
        file = folder / f"{seed}-{start}-{min(batch, pictures - start)}.npz"
        if file.is_file():
            saved = load_npz(file, "tokens", "tokens_per_pass", "relaxation")
            parts.append(torch.from_numpy(saved["tokens"].astype(np.int64)))
            passes.append(float(saved["tokens_per_pass"]))
            relaxation.append(float(saved["relaxation"]))
        else:
            numbers = range(start, min(start + batch, pictures))
            condition, count = pipe.condition([prompts[i % len(prompts)] for i in numbers])
            result = decoder.decode(condition, torch.arange(seed + start, seed + start + count), accelerator)
            parts.append(result.tokens.cpu())
            passes.append(result.stats.tokens_per_pass)
            relaxation.append(float(np.mean(result.stats.relaxation)))
            tokens = parts[-1].numpy().astype(np.int32)
            try:
                if keep:
                    with atomic_file(file) as temporary, temporary.open("wb") as stream:
                        np.savez(stream, tokens=tokens, tokens_per_pass=passes[-1], relaxation=relaxation[-1])
            except OSError as error:
                if not_kept is None:
                    raise
                not_kept(file, error)
        if progress:
            progress(len(parts[-1]))
    return torch.cat(parts), {"tokens_per_pass": float(np.mean(passes)), "relaxation_per_image": float(np.mean(relaxation))}


def distribution_report(
    pipe: VisualPipeline,
    prompts: Sequence[str],
    methods: dict[str, Method],
    pictures: int,
    batch: int,
    folder: Path,
    permutations: int = 200,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    not_kept: Callable[[Path, OSError], None] | None = None,
) -> dict[str, Any]:
    """Test pictures of each method against pictures of the pipeline's baseline with other seeds; of scales, the finest one.

    The baseline itself, with a third set of seeds, shows what the tests say where there is no difference.
    """
    sequential = resolve_method(pipe.baseline, pipe.paradigm)
    used = {**pipe.default_sampling, **(settings or {})}
    weights = weights_digest(pipe.transformer, pipe.draft_transformer)
    shared: tuple[Any, ...] = (used, weights, progress, not_kept)
    baseline, _ = draw_many(pipe, prompts, sequential, pictures, batch, 10**6, folder / pipe.baseline, *shared)
    codes, (rows, columns) = pipe.codebook.detach().float().cpu(), pipe.grid
    finest = rows * columns
    results = {}
    for number, (name, accelerator) in enumerate(methods.items(), 2):
        seed = number * 10**6
        place = folder / name
        tokens, statistics = draw_many(pipe, prompts, accelerator, pictures, batch, seed, place, *shared)
        tests = two_sample_tests(baseline[:, -finest:], tokens[:, -finest:], codes, columns, permutations)
        results[name] = {
            "kind": accelerator.kind,
            **statistics,
            "tests": {test: asdict(result) for test, result in tests.items()},
        }
    head = {"baseline": pipe.baseline, "pictures": pictures}
    return {**head, "permutations": permutations, "sampling": used, "methods": results}
