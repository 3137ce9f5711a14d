"""Add trained components to packaged models.

Heads, small transformers with their upsamplers, and routers and LoRAs of video models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from recipes.model_cards import head_card, lora_card, low_res_card, router_card
from recipes.package import MAX_BYTES, read_sampling
from recipes.packaging import (
    add_component,
    final_metrics,
    read_metrics,
    read_settings,
    store_as,
    validate_finished,
    validate_size,
)
from vargen.adapters.block_router import drafter_digest
from vargen.adapters.video_settings import resolve_levels
from vargen.files import atomic_file
from vargen.models.block_router import BlockRouter
from vargen.models.component_files import validate_network_files
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.lora import CausalVideoLoRA
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.causal_video import CAUSAL_VIDEO
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import resolve_drafter, validate_model_folder
from vargen.pipelines.registry import open_pipeline
from vargen.training.router import METRICS_FILE
from vargen.training.token_cache import hash_tokens
from vargen.weight_files import weights_digest

_LORA_RANKS = {"transformer": 20, "draft_transformer": 16}  # nearly all of the updates, at less than a MiB


def package_head(run: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write a finished head into the folder of its model, as a component; returns its metrics.

    Args:
        run: contains `drafter/`. model: a packaged model, or a model's folder.

    Raises:
        FileNotFoundError: if the run is not finished.
        ValueError: for a run for another model, or a head that is too large for a package.
    """
    validate_finished({"head": run}, head="drafter")
    folder = validate_model_folder(model, LLAMAGEN).path
    target = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32, use_safetensors=True)
    kind, trained, config = resolve_drafter(run / "drafter", LLAMAGEN)
    LLAMAGEN.check({"transformer": target.config, kind: config})
    if read_settings(run).get("target") != weights_digest(target):
        raise ValueError(
            f"the run in {run} was trained for another transformer than that of {folder}: train one for this model"
        )
    head = LLAMAGEN.components[kind].network_class.from_pretrained(trained, use_safetensors=True)
    store_as("int6", head)
    size = sum(value.numel() for value in head.state_dict().values())  # a byte each
    validate_size("head", size, MAX_BYTES["head"])
    metrics = read_metrics(run)
    add_component(folder, kind, head, head_card(kind, size, metrics, note))
    return {"drafter": str(folder / kind), "bytes": size, **final_metrics(metrics)}


def package_low_res(low_res: Path, upsampler: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write both networks into the folder of their model, as components; returns their metrics.

    Raises:
        FileNotFoundError: if a run is not finished.
        ValueError: for runs with another tokenizer, vocabulary, condition or grid than the model's, or networks that are too
            large for a package.
    """
    runs = validate_finished({"low_res": low_res, "upsampler": upsampler}, upsampler="upsampler")
    folder = validate_model_folder(model, LLAMAGEN).path
    codes = hash_tokens(VQModel.from_pretrained(folder / "vqvae").float())
    for run in runs.values():
        if read_settings(run).get("tokenizer") != codes:
            raise ValueError(f"the run in {run} was trained on the tokens of another tokenizer than that of {folder}")
    kinds: dict[str, Any] = {"low_res": LlamaGenTransformer, "upsampler": TokenUpsampler}
    places = {"low_res": low_res / "transformer", "upsampler": upsampler / "upsampler"}
    configs = {"transformer": validate_network_files(folder / "transformer", LlamaGenTransformer)}
    configs |= {name: validate_network_files(place, kinds[name]) for name, place in places.items()}
    LLAMAGEN.check(configs)
    networks = {name: kinds[name].from_pretrained(place) for name, place in places.items()}
    store_as("int6", *networks.values())
    size = sum(p.numel() for network in networks.values() for p in network.parameters())  # a byte each
    validate_size("low_res and upsampler", size, MAX_BYTES["emoji-low-res"])
    report: dict[str, Any] = {"folder": str(folder), "bytes": {}}
    for name, network in networks.items():
        metrics = read_metrics(runs[name])
        add_component(folder, name, network, low_res_card(name, metrics, final_metrics(metrics), note))
        report["bytes"][name] = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
        report[name] = final_metrics(metrics)
    return report


def package_router(run: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write a router of video drafts into the folder of its model, as a component; returns its metrics.

    Args:
        run: of `vargen train router`, without `--exit-step`. model: a packaged model, or a model's folder.

    Raises:
        FileNotFoundError: if the run is not finished. ValueError: for a run for the drafts of another network.
    """
    validate_finished({"router": run}, router="router")
    folder = validate_model_folder(model, CAUSAL_VIDEO).path
    router = BlockRouter.from_pretrained(run / "router")
    router.validate_drafter(drafter_digest(open_pipeline(str(folder)), 0), 0)
    metrics = json.loads((run / METRICS_FILE).read_text("utf-8"))
    add_component(folder, "router", router, router_card(metrics, note))
    return {"router": str(folder / "router"), **metrics}


def package_video_loras(target_run: Path, model: Any, drafter_run: Path | None = None, note: str = "") -> dict[str, Any]:
    """Write LoRAs for start images into the folder of their video model, with the settings that they were trained with.

    Args:
        target_run, drafter_run: contain `lora/` and `sampling.json`. model: a packaged model, or a model's folder.

    Returns:
        The target's metrics.

    Raises:
        FileNotFoundError: if a run is not finished.
        ValueError: for a run for another network or with other noise levels than the model's, or LoRAs too large for a package.
    """
    runs = validate_finished({"target": target_run, "drafter": drafter_run}, target="lora", drafter="lora")
    settings = read_sampling(runs)
    folder = validate_model_folder(model, CAUSAL_VIDEO).path
    pipe = open_pipeline(str(folder), dtype=torch.float32)
    if settings["levels"] != (levels := list(resolve_levels(pipe.config.defaults))):
        raise ValueError(f"levels must be those of the model, {levels}, got {settings['levels']}")
    loras = {}
    for run, part in zip(runs.values(), ("transformer", "draft_transformer"), strict=False):
        network = getattr(pipe, part)
        if network is None or read_settings(run).get("network") != weights_digest(network):
            raise ValueError(f"{run} must be a run for the {part} of {folder}, and is for another network")
        loras[part] = CausalVideoLoRA.from_pretrained(run / "lora").truncate(_LORA_RANKS[part])
    store_as("int6", *loras.values())
    size = sum(value.numel() for lora in loras.values() for value in lora.parameters())  # a byte each
    validate_size("LoRAs", size, MAX_BYTES["video-loras"])
    for (part, lora), run in zip(loras.items(), runs.values(), strict=True):
        name = "image_lora" if part == "transformer" else "draft_image_lora"
        add_component(folder, name, lora, lora_card(part, lora, read_metrics(run), note))
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index["defaults"] |= settings
    with atomic_file(folder / "model_index.json") as temporary:
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    return {"loras": str(folder), "bytes": size, **final_metrics(read_metrics(target_run))}
