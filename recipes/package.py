"""Make packaged models from finished runs: folders of compact weights, with a model card that reports the metrics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.emoji.captions import STYLES, all_captions
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.evaluation import DEFAULTS
from recipes.emoji.scorer import CaptionTable
from recipes.emoji.scorer_evaluation import measure_packaged, select_reference_captions
from recipes.emoji_var.data import validate_same_encoder
from recipes.emoji_video.batches import validate_same_encoder as check_same_video_encoder
from recipes.emoji_video.transformer import SAMPLING
from recipes.model_cards import emoji_card, head_card, low_res_card, scorer_card, var_card, video_card
from recipes.packaging import (
    add_component,
    final_metrics,
    folder_bytes,
    read_metrics,
    read_recall,
    read_settings,
    store_as,
    strip_local_paths,
    text_parts,
    validate_finished,
    validate_size,
    write_model,
)
from vargen.files import atomic_merge
from vargen.model_files import write_model_index
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.component_files import validate_network_files
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.image_text import ImageTextModel
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var import VARTransformer
from vargen.models.weight_storage import WEIGHT_FORMATS, QuantizedStorageMixin
from vargen.pipelines.llamagen import LLAMAGEN, LlamaGenPipeline
from vargen.pipelines.loading import resolve_drafter, validate_model_folder
from vargen.pipelines.prompts import PromptNames
from vargen.pipelines.var import VARPipeline
from vargen.scoring.image_text import FILE as CAPTIONS
from vargen.training.token_cache import hash_tokens, validate_token_cache
from vargen.weight_files import weights_digest

MiB = 2**20
MAX_BYTES = {"head": 4 * MiB, "emoji-scorer": 8 * MiB, "emoji-low-res": 12 * MiB, "emoji-video": 32 * MiB}
VAR_DEFAULTS = {"guidance_scale": 3.0, "temperature": 0.8, "top_p": 1.0}
_EMOJI_STYLES = ("3d", "flat")  # sampled most in training; the others have lower quality and are not offered


def package_emoji(
    tokenizer_run: Path,
    generator_run: Path,
    shared_from: Path,
    output: Path,
    defaults: Mapping[str, Any] | None = None,
    note: str = "",
    drafter_run: Path | None = None,
    recall: Path | None = None,
) -> Path:
    """Write the pipeline folder `output` from finished runs; other files of an existing model folder are kept.

    Args:
        tokenizer_run: contains `vqvae/` and `log.jsonl`; or a packaged model, whose tokenizer is used.
        generator_run: contains `transformer/` and `log.jsonl`. drafter_run: likewise, of a smaller model on the same tokens.
        shared_from: contains `text_encoder/` and `tokenizer/`, which are copied, and optionally `prompt_names.json`; may be
            `output`.
        defaults: sampling defaults of the model. note: how it was trained, for the card.
        recall: output of `python -m recipes recall` for the generator, which replaces the values in its run's log.

    Raises:
        ValueError: if a generator's run was trained on the tokens of another tokenizer, or `recall` lacks the metrics.
        FileNotFoundError: if a run is not finished. FileExistsError: if `output` exists and is not a model folder.
    """
    runs = validate_finished(
        {"tokenizer": tokenizer_run, "generator": generator_run, "drafter": drafter_run}, tokenizer="vqvae"
    )
    measured = {} if recall is None else read_recall(recall)
    vqvae = VQModel.from_pretrained(tokenizer_run / "vqvae")
    for part in runs.keys() - {"tokenizer"}:
        validate_token_cache(runs[part], vqvae, tokenizer_run)
    transformer = LlamaGenTransformer.from_pretrained(generator_run / "transformer")
    drafter = LlamaGenTransformer.from_pretrained(drafter_run / "transformer") if drafter_run else None
    sampling = {key: value for key, value in DEFAULTS.items() if key != "top_k" or value <= transformer.config.vocab_size}
    pipeline = LlamaGenPipeline(
        vqvae=vqvae,
        transformer=transformer,
        **text_parts(shared_from),
        draft_transformer=drafter,
        defaults={**sampling, **(defaults or {})},
        prompt_styles=list(_EMOJI_STYLES),
        prompt_names=PromptNames.load(shared_from),
    )
    store_as("int8", transformer)
    store_as("int6", vqvae, drafter)
    metrics = {part: read_metrics(run, part) for part, run in runs.items()}
    metrics["generator"] |= measured

    def save(staged: Path) -> None:
        pipeline.save_pretrained(staged)
        for name in ("text_encoder", "tokenizer"):  # copied: saving would write the tokenizer in a larger form
            shutil.rmtree(staged / name)
            shutil.copytree(shared_from / name, staged / name)

    return write_model(output, save, metrics, lambda size: emoji_card(pipeline, metrics, note))


def package_var(
    tokenizer_run: Path,
    model_run: Path,
    output: Path,
    shared_from: Path,
    small_run: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    note: str = "",
) -> Path:
    """Write the pipeline folder `output`; see `package_emoji`.

    Args:
        model_run, small_run: contain `transformer/` and `log.jsonl`; the small one becomes `draft_transformer`.
        shared_from: folder of the packaged model whose text encoder the runs used; it is shared, not copied.
    """
    runs = validate_finished({"tokenizer": tokenizer_run, "model": model_run, "small": small_run}, tokenizer="vqvae")
    vqvae = MultiScaleVQModel.from_pretrained(tokenizer_run / "vqvae")
    for part in runs.keys() - {"tokenizer"}:
        validate_same_encoder(runs[part], vqvae, tokenizer_run)
    transformer = VARTransformer.from_pretrained(model_run / "transformer")
    small = VARTransformer.from_pretrained(small_run / "transformer") if small_run else None
    store_as("int6", vqvae, transformer, small)
    pipeline = VARPipeline(
        vqvae=vqvae,
        transformer=transformer,
        **text_parts(shared_from),
        draft_transformer=small,
        defaults={**VAR_DEFAULTS, **(defaults or {})},
        prompt_styles=list(STYLES),
    )
    metrics = {part: read_metrics(run) for part, run in runs.items()}
    return write_model(output, pipeline.save_pretrained, metrics, lambda size: var_card(pipeline, metrics, note), shared_from)


def package_video(
    vae_run: Path,
    target_run: Path,
    output: Path,
    shared_from: Path,
    drafter_run: Path | None = None,
    preview_run: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    weight_format: str = "int6",
    note: str = "",
) -> Path:
    """Write the pipeline folder `output`; see `package_var`.

    Args:
        vae_run: contains `vae/`. target_run, drafter_run: contain `transformer/` and `sampling.json`; the second becomes
            `draft_transformer`. preview_run: contains `preview/`, which becomes `preview_decoder`.
        weight_format: one of `WEIGHT_FORMATS`.

    Raises:
        ValueError: for runs of different autoencoders, geometries or noise levels, or a model that is too large.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format must be one of {', '.join(WEIGHT_FORMATS)}, got {weight_format!r}")
    named = {"vae": vae_run, "target": target_run, "drafter": drafter_run, "preview": preview_run}
    runs = validate_finished(named, vae="vae", preview="preview")
    for part in runs.keys() & {"target", "drafter"}:
        if not (runs[part] / SAMPLING).is_file():
            raise FileNotFoundError(f"{runs[part] / SAMPLING} is missing: finish the training run first")
    networks, sampling = _video_networks(runs), _video_sampling(runs)
    store_as(weight_format, *networks.values())
    metrics = {part: read_metrics(run) for part, run in runs.items()}

    def save(staged: Path) -> None:
        for part, network in networks.items():
            network.save_pretrained(staged / part)
        missing = dict.fromkeys({"draft_transformer", "preview_decoder"} - networks.keys())
        settings = {"defaults": {**sampling, **(defaults or {})}, "prompt_styles": ["3d"]}
        write_model_index(staged, "CausalVideoPipeline", {**networks, **missing, **text_parts(shared_from)}, **settings)

    def card(size: int) -> str:
        return video_card(networks, sampling, weight_format, size, metrics, note)

    return write_model(output, save, metrics, card, shared_from, MAX_BYTES["emoji-video"])


def _video_networks(runs: Mapping[str, Path]) -> dict[str, QuantizedStorageMixin]:
    """Load the networks by component name; ValueError if they are not compatible."""
    vae = CausalVideoVAE.from_pretrained(runs["vae"] / "vae")
    for part in runs.keys() - {"vae"}:
        check_same_video_encoder(runs[part], vae, runs["vae"])
    target = CausalVideoTransformer.from_pretrained(runs["target"] / "transformer")
    networks: dict[str, QuantizedStorageMixin] = {"vae": vae, "transformer": target}
    if "drafter" in runs:
        drafter = CausalVideoTransformer.from_pretrained(runs["drafter"] / "transformer")
        if not target.geometry.same_latents(drafter.geometry):
            raise ValueError(f"geometry of the drafter must be the target's, {target.geometry}, got {drafter.geometry}")
        for name in ("text_dim", "motion_levels"):
            if drafter.config[name] != target.config[name]:
                raise ValueError(
                    f"{name} of the drafter must be the target's, {target.config[name]}, got {drafter.config[name]}"
                )
        networks["draft_transformer"] = drafter
    if "preview" in runs:
        networks["preview_decoder"] = PreviewDecoder.from_pretrained(runs["preview"] / "preview")
    return networks


def _video_sampling(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the sampling settings of target and drafter; ValueError if they differ."""
    found = {part: json.loads((runs[part] / SAMPLING).read_text("utf-8")) for part in ("target", "drafter") if part in runs}
    if "drafter" in found and found["drafter"] != found["target"]:
        raise ValueError(
            f"target and drafter must have the same sampling settings, got {found['target']} and {found['drafter']}"
        )
    return dict(found["target"])


def package_scorer(run: Path, model: Path, data: EmojiDataset, output: Path, note: str = "") -> dict[str, Any]:
    """Write a finished scorer to `output`; returns the metrics of the packaged weights.

    Args:
        run: contains `scorer/`. model: a packaged model with `text_encoder/`, `tokenizer/` and `vqvae/`.
    """
    validate_finished({"scorer": run}, scorer="scorer")
    scorer = ImageTextModel.from_pretrained(run / "scorer", use_safetensors=True)
    store_as("int6", scorer)
    with atomic_merge(output) as staged:
        scorer.save_pretrained(staged)
        strip_local_paths(staged)
        captions = {"text_encoder": model.name, "captions": select_reference_captions(data)}
        (staged / CAPTIONS).write_text(json.dumps(captions, indent=0) + "\n", "utf-8")
        table = CaptionTable(run / "captions.npz", all_captions(data.records), model, torch.device("cpu"))
        metrics = measure_packaged(staged, table, model, data)
        last = json.loads((run / "log.jsonl").read_text("utf-8").splitlines()[-1])
        (staged / "README.md").write_text(scorer_card(scorer, metrics, last, note), "utf-8")
        (staged / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
        validate_size("emoji-scorer", folder_bytes(staged), MAX_BYTES["emoji-scorer"])
    return metrics


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
