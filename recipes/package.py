"""From finished runs to a packaged model: a folder of compact weights, with a model card that reports how far training got."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.emoji.captions import STYLES
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.evaluation import DEFAULTS
from recipes.emoji.scorer_evaluation import fixed_captions, measure_packaged
from recipes.emoji_var.data import check_latents
from recipes.emoji_video.batches import check_latents as check_video_latents
from recipes.emoji_video.transformer import SAMPLING
from recipes.model_cards import emoji_card, head_card, low_res_card, scorer_card, var_card, video_card
from recipes.packaging import (
    add_component,
    check_size,
    final_metrics,
    fingerprint,
    finished,
    folder_bytes,
    read_metrics,
    read_recall,
    store_as,
    strip_local_paths,
    text_parts,
    write_model,
)
from vargen.files import atomic_merge
from vargen.model_files import write_model_index
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.component_files import check_network_files
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
from vargen.pipelines.loading import check_model_folder, resolve_drafter
from vargen.pipelines.prompts import PromptNames
from vargen.pipelines.var import VARPipeline
from vargen.scoring.packaged import FILE as CAPTIONS
from vargen.training.blanks import tokens_digest
from vargen.training.token_cache import check_tokens
from vargen.weight_files import weights_digest

MiB = 2**20
MAX_BYTES = {"head": 4 * MiB, "emoji-scorer": 8 * MiB, "emoji-low-res": 12 * MiB, "emoji-video": 32 * MiB}
VAR_DEFAULTS = {"guidance_scale": 3.0, "temperature": 0.8, "top_p": 1.0}
_EMOJI_STYLES = ("3d", "flat")  # those that the recipes see most: the others come out worse, and are not offered


def package_emoji(
    tokenizer_run: Path,
    generator_run: Path,
    lender: Path,
    output: Path,
    defaults: Mapping[str, Any] | None = None,
    note: str = "",
    drafter_run: Path | None = None,
    recall: Path | None = None,
) -> Path:
    """Write the pipeline folder `output` from finished runs; of one that is there, the model is replaced and other files stay.

    Args:
        tokenizer_run: holds `vqvae/` and `log.jsonl`; or a packaged model, whose tokenizer it is.
        generator_run: holds `transformer/` and `log.jsonl`. drafter_run: likewise, of a smaller model on the same tokens.
        lender: holds `text_encoder/` and `tokenizer/`, which are copied, and maybe `prompt_names.json`; may be `output` itself.
        defaults: sampling defaults of the model. note: how it was trained, for the card.
        recall: what `python -m recipes recall` printed of the generator, in place of what its run logged.

    Raises:
        ValueError: if a generator's run was trained on the tokens of another tokenizer, or `recall` holds no such metrics.
        FileNotFoundError: if a run is not finished. FileExistsError: if `output` is there and no model folder.
    """
    runs = finished({"tokenizer": tokenizer_run, "generator": generator_run, "drafter": drafter_run}, tokenizer="vqvae")
    measured = {} if recall is None else read_recall(recall)
    vqvae = VQModel.from_pretrained(tokenizer_run / "vqvae")
    for part in runs.keys() - {"tokenizer"}:
        check_tokens(runs[part], vqvae, tokenizer_run)
    transformer = LlamaGenTransformer.from_pretrained(generator_run / "transformer")
    drafter = LlamaGenTransformer.from_pretrained(drafter_run / "transformer") if drafter_run else None
    sampling = {key: value for key, value in DEFAULTS.items() if key != "top_k" or value <= transformer.config.vocab_size}
    pipeline = LlamaGenPipeline(
        vqvae=vqvae,
        transformer=transformer,
        **text_parts(lender),
        draft_transformer=drafter,
        defaults={**sampling, **(defaults or {})},
        prompt_styles=list(_EMOJI_STYLES),
        prompt_names=PromptNames.load(lender),
    )
    vqvae.half()  # every parameter, the codebook too: decoding normalises its rows in float32
    store_as("int8", transformer, drafter)
    metrics = {part: read_metrics(run, part) for part, run in runs.items()}
    metrics["generator"] |= measured

    def save(staged: Path) -> None:
        pipeline.save_pretrained(staged)
        for name in ("text_encoder", "tokenizer"):  # as they were: saving writes the tokenizer again, a little larger
            shutil.rmtree(staged / name)
            shutil.copytree(lender / name, staged / name)

    return write_model(output, save, metrics, lambda size: emoji_card(pipeline, metrics, note))


def package_var(
    tokenizer_run: Path,
    model_run: Path,
    output: Path,
    lender: Path,
    small_run: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    note: str = "",
) -> Path:
    """Write the pipeline folder `output`; see `package_emoji`.

    Args:
        model_run, small_run: hold `transformer/` and `log.jsonl`; the small one becomes `draft_transformer`.
        lender: folder of the packaged model whose text encoder it was trained with; it is shared, not copied.
    """
    runs = finished({"tokenizer": tokenizer_run, "model": model_run, "small": small_run}, tokenizer="vqvae")
    vqvae = MultiScaleVQModel.from_pretrained(tokenizer_run / "vqvae")
    for part in runs.keys() - {"tokenizer"}:
        check_latents(runs[part], vqvae, tokenizer_run)
    transformer = VARTransformer.from_pretrained(model_run / "transformer")
    small = VARTransformer.from_pretrained(small_run / "transformer") if small_run else None
    store_as("int8", vqvae, transformer, small)
    pipeline = VARPipeline(
        vqvae=vqvae,
        transformer=transformer,
        **text_parts(lender),
        draft_transformer=small,
        defaults={**VAR_DEFAULTS, **(defaults or {})},
        prompt_styles=list(STYLES),
    )
    metrics = {part: read_metrics(run) for part, run in runs.items()}
    return write_model(output, pipeline.save_pretrained, metrics, lambda size: var_card(pipeline, metrics, note), lender)


def package_video(
    vae_run: Path,
    target_run: Path,
    output: Path,
    lender: Path,
    drafter_run: Path | None = None,
    preview_run: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    weight_format: str = "int8",
    note: str = "",
) -> Path:
    """Write the pipeline folder `output`; see `package_var`.

    Args:
        vae_run: holds `vae/`. target_run, drafter_run: hold `transformer/` and `sampling.json`; the second becomes
            `draft_transformer`. preview_run: holds `preview/`, which becomes `preview_decoder`.
        weight_format: "int8" or "float16".

    Raises:
        ValueError: for runs of different autoencoders, geometries or noise levels, or a whole that is too large.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format must be one of {', '.join(WEIGHT_FORMATS)}, got {weight_format!r}")
    named = {"vae": vae_run, "target": target_run, "drafter": drafter_run, "preview": preview_run}
    runs = finished(named, vae="vae", preview="preview")
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
        write_model_index(staged, "CausalVideoPipeline", {**networks, **missing, **text_parts(lender)}, **settings)

    def card(size: int) -> str:
        return video_card(networks, sampling, weight_format, size, metrics, note)

    return write_model(output, save, metrics, card, lender, MAX_BYTES["emoji-video"])


def _video_networks(runs: Mapping[str, Path]) -> dict[str, QuantizedStorageMixin]:
    """The networks by their component's name, which fit each other."""
    vae = CausalVideoVAE.from_pretrained(runs["vae"] / "vae")
    for part in runs.keys() - {"vae"}:
        check_video_latents(runs[part], vae, runs["vae"])
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
    """How target and drafter generate."""
    found = {part: json.loads((runs[part] / SAMPLING).read_text("utf-8")) for part in ("target", "drafter") if part in runs}
    if "drafter" in found and found["drafter"] != found["target"]:
        raise ValueError(f"target and drafter must be drawn with alike, got {found['target']} and {found['drafter']}")
    return dict(found["target"])


def package_scorer(run: Path, model: Path, data: EmojiDataset, output: Path, note: str = "") -> dict[str, Any]:
    """Write a finished scorer in float16 to `output`, which it replaces; returns the metrics of the weights as packaged.

    Args:
        run: holds `scorer/`. model: a packaged model that holds `text_encoder/`, `tokenizer/` and `vqvae/`.
    """
    finished({"scorer": run}, scorer="scorer")
    scorer = ImageTextModel.from_pretrained(run / "scorer", use_safetensors=True).half()
    with atomic_merge(output) as staged:
        scorer.save_pretrained(staged)
        strip_local_paths(staged)
        captions = {"text_encoder": model.name, "captions": fixed_captions(data)}
        (staged / CAPTIONS).write_text(json.dumps(captions, indent=0) + "\n", "utf-8")
        metrics = measure_packaged(staged, run, model, data)
        last = json.loads((run / "log.jsonl").read_text("utf-8").splitlines()[-1])
        (staged / "README.md").write_text(scorer_card(scorer, metrics, last, note), "utf-8")
        (staged / "figures.json").write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
        check_size("emoji-scorer", folder_bytes(staged), MAX_BYTES["emoji-scorer"])
    return metrics


def package_head(run: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write a finished head in float16 into the folder of its model, which opens with it from then on; returns its metrics.

    Args:
        run: holds `drafter/`. model: a packaged model, or a model's folder.

    Raises:
        FileNotFoundError: if the run is not finished.
        ValueError: for a run for another model than this one, or a head that is larger than a packaged one may be.
    """
    finished({"head": run}, head="drafter")
    folder = check_model_folder(model, LLAMAGEN).path
    target = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32, use_safetensors=True)
    kind, trained, config = resolve_drafter(run / "drafter", LLAMAGEN)
    LLAMAGEN.check({"transformer": target.config, kind: config})
    if fingerprint(run).get("target") != weights_digest(target):
        raise ValueError(f"the run in {run} was trained for another transformer than that of {folder}: train one for it")
    head = LLAMAGEN.components[kind].network_class.from_pretrained(trained, use_safetensors=True).half()
    size = sum(value.nbytes for value in head.state_dict().values())
    check_size("head", size, MAX_BYTES["head"])
    metrics = read_metrics(run)
    add_component(folder, kind, head, head_card(kind, size, metrics, note))
    return {"drafter": str(folder / kind), "bytes": size, **final_metrics(metrics)}


def package_low_res(low_res: Path, upsampler: Path, model: Any, note: str = "") -> dict[str, Any]:
    """Write both in int8 into the folder of their model, which opens with them from then on; returns their metrics.

    Raises:
        FileNotFoundError: if a run is not finished.
        ValueError: for runs of another tokenizer, vocabulary, condition or grid than the model's, or networks that are larger
            than packaged ones may be.
    """
    runs = finished({"low_res": low_res, "upsampler": upsampler}, upsampler="upsampler")
    folder = check_model_folder(model, LLAMAGEN).path
    codes = tokens_digest(VQModel.from_pretrained(folder / "vqvae").float())
    for run in runs.values():
        if fingerprint(run).get("tokenizer") != codes:
            raise ValueError(f"the run in {run} was trained on the tokens of another tokenizer than that of {folder}")
    kinds: dict[str, Any] = {"low_res": LlamaGenTransformer, "upsampler": TokenUpsampler}
    places = {"low_res": low_res / "transformer", "upsampler": upsampler / "upsampler"}
    configs = {"transformer": check_network_files(folder / "transformer", LlamaGenTransformer)}
    configs |= {name: check_network_files(place, kinds[name]) for name, place in places.items()}
    LLAMAGEN.check(configs)
    networks = {name: kinds[name].from_pretrained(place) for name, place in places.items()}
    store_as("int8", *networks.values())
    size = sum(p.numel() for network in networks.values() for p in network.parameters())  # a byte each
    check_size("low_res and upsampler", size, MAX_BYTES["emoji-low-res"])
    report: dict[str, Any] = {"folder": str(folder), "bytes": {}}
    for name, network in networks.items():
        metrics = read_metrics(runs[name])
        add_component(folder, name, network, low_res_card(name, metrics, final_metrics(metrics), note))
        report["bytes"][name] = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
        report[name] = final_metrics(metrics)
    return report
