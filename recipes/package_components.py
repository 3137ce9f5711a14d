"""Add trained components to packaged models: heads, small transformers with their upsamplers, routers of video drafts.

Or replace some: the networks of a video model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from recipes.emoji_video.batches import validate_same_encoder as check_same_video_encoder
from recipes.model_cards import head_card, low_res_card, router_card, video_card
from recipes.package import MAX_BYTES, read_sampling
from recipes.packaging import (
    add_component,
    final_metrics,
    folder_bytes,
    read_metrics,
    read_settings,
    store_as,
    strip_local_paths,
    validate_finished,
    validate_size,
)
from vargen.adapters.block_router import drafter_digest
from vargen.files import atomic_merge
from vargen.models.block_router import BlockRouter
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.component_files import validate_network_files
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.causal_video import CAUSAL_VIDEO
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import resolve_drafter, validate_model_folder
from vargen.pipelines.registry import open_pipeline
from vargen.training.router import METRICS_FILE
from vargen.training.token_cache import hash_tokens
from vargen.weight_files import weights_digest


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


def package_video_networks(target_run: Path, model: Any, drafter_run: Path | None = None, note: str = "") -> dict[str, Any]:
    """Replace the networks of a video model, and the settings that they were trained with; returns the target's metrics.

    A router is kept, and refuses another drafter: train and package a new one.

    Args:
        target_run, drafter_run: contain `transformer/` and `sampling.json`. None keeps the drafter.
        model: a packaged model, or the folder of one, whose other components are kept.

    Raises:
        FileNotFoundError: if a run is not finished.
        ValueError: for runs with another autoencoder, geometry or settings than the model's or each other's.
    """
    runs = validate_finished({"target": target_run, "drafter": drafter_run})
    settings = read_sampling(runs)
    folder = validate_model_folder(model, CAUSAL_VIDEO).path
    pipe = open_pipeline(str(folder))
    networks = {part: getattr(pipe, part) for part in ("vae", "transformer", "draft_transformer", "preview_decoder")}
    trained = {}
    for part, run in zip(("transformer", "draft_transformer"), runs.values(), strict=False):
        check_same_video_encoder(run, pipe.vae, folder)
        trained[part] = CausalVideoTransformer.from_pretrained(run / "transformer")
    store_as("int6", *trained.values())
    networks = {part: network for part, network in (networks | trained).items() if network is not None}
    CAUSAL_VIDEO.check({part: network.config for part, network in networks.items()})
    index, metrics = (json.loads((folder / name).read_text("utf-8")) for name in ("model_index.json", "training.json"))
    if pipe.drafts and "drafter" not in runs and (levels := index["defaults"]["levels"]) != settings["levels"]:
        raise ValueError(f"levels must be those of the drafter, {levels}, got {settings['levels']}")
    index["defaults"] |= settings
    metrics |= {name: read_metrics(run) for name, run in runs.items()}
    with atomic_merge(folder) as staged:
        for part, network in trained.items():
            network.save_pretrained(staged / part)
        strip_local_paths(staged)
        (staged / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
        (staged / "training.json").write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
        card = video_card(networks, index["defaults"], "int6", folder_bytes(folder), metrics, note)
        (staged / "README.md").write_text(card, "utf-8")
    return {"model": str(folder), **final_metrics(metrics["target"])}
