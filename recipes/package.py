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
from recipes.model_cards import emoji_card, scorer_card, var_card, video_card
from recipes.packaging import (
    folder_bytes,
    read_metrics,
    read_recall,
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
from vargen.models.image_text import ImageTextModel
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var import VARTransformer
from vargen.models.weight_storage import WEIGHT_FORMATS, QuantizedStorageMixin
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.prompts import PromptNames
from vargen.pipelines.var import VARPipeline
from vargen.scoring.image_text import FILE as CAPTIONS
from vargen.training.token_cache import BackgroundTokenizer, validate_token_cache

MiB = 2**20
MAX_BYTES = {
    "head": 4 * MiB,
    "emoji-scorer": 8 * MiB,
    "emoji-low-res": 12 * MiB,
    "emoji-video": 32 * MiB,
    "video-loras": 3 * MiB,
}
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
    vqvae.register_to_config(blank_code=BackgroundTokenizer(vqvae.eval()).code)  # rounded weights may compute another one
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
        defaults: settings of the model, besides those in `sampling.json`.
        weight_format: one of `WEIGHT_FORMATS`.

    Raises:
        ValueError: for runs of different autoencoders, geometries or noise levels, or a model that is too large.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format must be one of {', '.join(WEIGHT_FORMATS)}, got {weight_format!r}")
    named = {"vae": vae_run, "target": target_run, "drafter": drafter_run, "preview": preview_run}
    runs = validate_finished(named, vae="vae", preview="preview")
    sampling, networks = read_sampling(runs), _video_networks(runs)
    store_as(weight_format, *networks.values())
    metrics = {part: read_metrics(run) for part, run in runs.items()}

    def save(staged: Path) -> None:
        for part, network in networks.items():
            network.save_pretrained(staged / part)
        missing = dict.fromkeys({"draft_transformer", "preview_decoder"} - networks.keys())
        settings = {"defaults": {"image": False, **sampling, **(defaults or {})}, "prompt_styles": ["3d"]}
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


def read_sampling(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the settings of the runs `target` and `drafter` of a video model.

    Raises:
        FileNotFoundError: if a run is not finished. ValueError: if the settings differ.
    """
    files = {part: runs[part] / SAMPLING for part in ("target", "drafter") if part in runs}
    for file in files.values():
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: finish the training run first")
    found = {part: json.loads(file.read_text("utf-8")) for part, file in files.items()}
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
