"""A finished drafter run as a part of the model that it drafts for: float16 weights, a card that says how often it is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from recipes.package import add_part, figures_of
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.weights import unpickle, weights_digest
from vargen.pipelines.drafter_files import checked_drafter
from vargen.pipelines.families import FAMILIES
from vargen.pipelines.loading import checked_folder

_LARGEST = 4 * 2**20  # bytes of a packaged drafter


def package_drafter(run: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write the drafter of a finished run into the folder of its model, which opens with it from then on.

    Args:
        run: its folder, with `drafter/`. model: a packaged model, or a model's folder. note: how it was trained, for the card.

    Returns:
        Where it lies, and its held-out figures.

    Raises:
        FileNotFoundError: if the run is not finished.
        ValueError: for a run of another model than this one, or files that would be larger than a packaged drafter may be.
    """
    if not (run / "drafter" / "config.json").is_file():
        raise FileNotFoundError(f"run {str(run)!r} must hold drafter/, which `vargen train drafter` writes when it is finished")
    folder = checked_folder(model, None, {})
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    family = FAMILIES[index["_class_name"]]
    target = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32, use_safetensors=True)
    kind, trained = checked_drafter(run / "drafter", family, target.config)
    state = unpickle(run / "state.pt", if_damaged="repeat `vargen train drafter`, which resumes the run")
    if state["fingerprint"].get("target") != weights_digest(target):
        raise ValueError(f"the run in {run} was trained for another transformer than that of {folder}: train one for it")
    network: Any = family.networks[kind]
    drafter = network.from_pretrained(trained, use_safetensors=True).half()
    size = sum(value.nbytes for value in drafter.state_dict().values())
    if size > _LARGEST:
        raise ValueError(f"a packaged drafter must be of at most {_LARGEST} bytes, and this one takes {size}")
    figures = figures_of(run)
    add_part(folder, kind, drafter, card(kind, size, figures, note))
    final = {name.removeprefix("final_"): value for name, value in figures.items() if name.startswith("final_")}
    return {"drafter": str(folder / kind), "bytes": size, **final}


def card(kind: str, size: int, figures: dict[str, float], note: str) -> str:
    """What the drafter is, and its held-out figures."""
    depths = sorted(int(name.rsplit("_", 1)[1]) for name in figures if name.startswith("final_overlap_"))
    rows = "\n".join(
        f"| {depth} | {figures[f'final_overlap_{depth}']:.3f} | {figures[f'final_content_overlap_{depth}']:.3f} |"
        for depth in depths
    )
    return f"""# {kind}: drafts for the transformer beside it

Trained by `vargen train drafter --kind {kind}` on pictures that the transformer drew, {figures["step"]:.0f} steps in
{figures["seconds"] / 3600:.2f} hours; {size / 2**20:.1f} MiB. {note}

How often a draft of each depth is accepted where those before it are what the transformer drew, on held-out captions, over all
tokens and without the commonest one:

| draft | all tokens | content |
|---|---|---|
{rows}

A plain chain of these drafts commits {figures["final_tokens_per_pass"]:.2f} tokens a pass.
"""
