"""Finished runs of a low-resolution generator and of an up-sampler as parts of the model that they draft for, in int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.package import add_part, check_finished, figures_of
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.upsampler import TokenUpsampler
from vargen.models.vq import VQModel
from vargen.models.weights import unpickle
from vargen.pipelines.component_files import check_component
from vargen.pipelines.families import FAMILIES
from vargen.pipelines.loading import checked_folder
from vargen.pipelines.parts import check_parts
from vargen.training.blanks import tokens_digest

_LARGEST = 12 * 2**20  # bytes of both


def package_low_res(low_res: Path, upsampler: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write both into the folder of their model, which opens with them from then on.

    Args:
        low_res: a finished run of `vargen train low-res`. upsampler: one of `vargen train upsampler`.
        model: a packaged model, or a model's folder. note: how they were trained, for the cards.

    Returns:
        Where they lie, their bytes, and their held-out figures.

    Raises:
        FileNotFoundError: if a run is not finished.
        ValueError: for runs of another tokenizer, vocabulary, condition or grid than the model's, or files that would be larger
            than packaged ones may be.
    """
    check_finished({"low_res": low_res, "upsampler": upsampler})
    folder = checked_folder(model, "LlamaGenPipeline", {})
    codes = tokens_digest(VQModel.from_pretrained(folder / "vqvae").float())
    for run in (low_res, upsampler):
        state = unpickle(run / "state.pt", if_damaged="repeat the command that trained it, which resumes the run")
        if state["fingerprint"].get("tokenizer") != codes:
            raise ValueError(f"the run in {run} was trained on the tokens of another tokenizer than that of {folder}")
    places = {"low_res": low_res / "transformer", "upsampler": upsampler / "upsampler"}
    configs: dict[str, Any] = {
        "transformer": check_component(folder / "transformer", LlamaGenTransformer),
        "low_res": check_component(places["low_res"], LlamaGenTransformer),
        "upsampler": check_component(places["upsampler"], TokenUpsampler),
    }
    check_parts(FAMILIES["LlamaGenPipeline"], configs)
    networks = {
        "low_res": LlamaGenTransformer.from_pretrained(places["low_res"]),
        "upsampler": TokenUpsampler.from_pretrained(places["upsampler"]),
    }
    for network in networks.values():
        network.register_to_config(weight_format="int8")
    size = sum(parameter.numel() for network in networks.values() for parameter in network.parameters())
    if size > _LARGEST:
        raise ValueError(f"low_res and upsampler must be of at most {_LARGEST} bytes together, and these take about {size}")
    figures = {name: figures_of(run) for name, run in (("low_res", low_res), ("upsampler", upsampler))}
    for name, network in networks.items():
        add_part(folder, name, network, card(name, figures[name], note))
    bytes_of = {name: sum(file.stat().st_size for file in (folder / name).glob("*.safetensors")) for name in networks}
    return {"folder": str(folder), "bytes": bytes_of, **{name: _final(each) for name, each in figures.items()}}


def _final(figures: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("final_"): value for name, value in figures.items() if name.startswith("final_")}


def card(name: str, figures: dict[str, float], note: str) -> str:
    """What the network is, and its held-out figures."""
    what = {
        "low_res": "a transformer for small pictures, by the image tokenizer beside it",
        "upsampler": "what small pictures make likely at the full size",
    }[name]
    rows = "\n".join(f"| {figure.replace('_', ' ')} | {value:.3f} |" for figure, value in sorted(_final(figures).items()))
    trained = f"{figures['step']:.0f} steps, {figures['seconds'] / 3600:.2f} hours"
    return f"""# {name}: {what}

Drafts for `accelerator="mulo"` and `"mulo-exact"`. Trained in {trained}. {note}

| held out, nats a token or shares | |
|---|---|
{rows}
"""
