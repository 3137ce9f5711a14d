"""Pictures of every method in large batches, kept on disk, and two-sample tests against sequential ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.decoding import Accelerator, Sampling, decode
from vargen.evaluation.two_sample import compare_laws
from vargen.files import whole_file
from vargen.pipelines.llamagen import LlamaGenPipeline


def draw_many(
    pipe: LlamaGenPipeline,
    prompts: Sequence[str],
    accelerator: Accelerator,
    pictures: int,
    batch: int,
    seed: int,
    folder: Path,
    settings: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Tokens int64 `[pictures, N]` of the prompts in turn, seeds from `seed`, sampled by `settings`, and mean statistics.

    Every batch is kept in `folder`, so a run that was stopped goes on where it was.
    """
    sampling = Sampling(**{key: value for key, value in settings.items() if key != "guidance_scale"})
    model = pipe.token_model(settings["guidance_scale"])
    folder.mkdir(parents=True, exist_ok=True)
    parts, passes, spent = [], [], []
    for start in range(0, pictures, batch):
        file = folder / f"{seed}-{start}-{min(batch, pictures - start)}.npz"
        if file.is_file():
            with np.load(file) as saved:
                parts.append(torch.from_numpy(saved["tokens"].astype(np.int64)))
                passes.append(float(saved["tokens_per_pass"]))
                spent.append(float(saved["relaxation"]))
        else:
            numbers = range(start, min(start + batch, pictures))
            condition, count = pipe.condition([prompts[i % len(prompts)] for i in numbers])
            result = decode(model, condition, torch.arange(seed + start, seed + start + count), accelerator, sampling)
            parts.append(result.tokens.cpu())
            passes.append(result.stats.tokens_per_pass)
            spent.append(float(np.mean(result.stats.relaxation_spent)))
            with whole_file(file) as temporary, temporary.open("wb") as stream:
                tokens = parts[-1].numpy().astype(np.int32)
                np.savez(stream, tokens=tokens, tokens_per_pass=passes[-1], relaxation=spent[-1])
        if progress:
            progress(len(parts[-1]))
    return torch.cat(parts), {"tokens_per_pass": float(np.mean(passes)), "relaxation_per_image": float(np.mean(spent))}


def laws_report(
    pipe: LlamaGenPipeline,
    prompts: Sequence[str],
    methods: dict[str, Accelerator],
    pictures: int,
    batch: int,
    folder: Path,
    permutations: int = 200,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Each method against `ar` with other seeds; `ar` itself, with a third set of seeds, shows how no difference looks."""
    ar = Accelerator(name="ar")
    used = {**pipe.default_sampling, **(settings or {})}
    baseline, _ = draw_many(pipe, prompts, ar, pictures, batch, 10**6, folder / "ar", used, progress)
    codes = pipe.vqvae.quantize.codes().detach().float().cpu()
    columns = pipe.transformer.config.grid_size
    results = {}
    for number, (name, accelerator) in enumerate(methods.items(), 2):
        seed = number * 10**6
        tokens, statistics = draw_many(pipe, prompts, accelerator, pictures, batch, seed, folder / name, used, progress)
        tests = compare_laws(baseline, tokens, codes, columns, permutations)
        results[name] = {
            "kind": accelerator.kind,
            **statistics,
            "tests": {test: asdict(result) for test, result in tests.items()},
        }
    return {"pictures": pictures, "permutations": permutations, "sampling": used, "methods": results}
