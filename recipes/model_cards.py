"""Model cards: the templates in `cards/`, filled with metrics of runs and sizes of networks."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from recipes.emoji.scorer_evaluation import NUM_REFERENCE_CAPTIONS
from vargen.models.causal_video import CausalVideoTransformer
from vargen.pipelines.loading import SHARED_FILE
from vargen.scoring.image_text import FILE as CAPTIONS

Metrics = dict[str, Any]
_CARDS = Path(__file__).parent / "cards"


def _fill(card: str, **values: Any) -> str:
    """Fill a template; KeyError if a name in it has no value."""
    return Template((_CARDS / f"{card}.md").read_text("utf-8")).substitute(values)


def _millions(network: Any, digits: int = 1) -> str:
    return f"{sum(p.numel() for p in network.parameters()) / 1e6:.{digits}f}"


def _hours(metrics: Metrics, digits: int = 2) -> str:
    return f"{metrics['seconds'] / 3600:.{digits}f}"


def emoji_card(pipeline: Any, metrics: dict[str, Metrics], note: str) -> str:
    """Write the card of a text-conditional LlamaGen."""
    vqvae, transformer, draft = pipeline.vqvae, pipeline.transformer, pipeline.draft_transformer
    tokenizer, generator, config = metrics["tokenizer"], metrics["generator"], transformer.config
    draft_part, draft_row = "", ""
    if draft is not None:
        logged = metrics["drafter"]
        draft_part = (
            f"| `draft_transformer` | `LlamaGenTransformer`, {draft.config.n_layer} layers of width {draft.config.dim}, "
            f"for speculative decoding | {_millions(draft)} M |\n"
        )
        draft_row = (
            f"| drafter | {logged['step']:.0f} | {_hours(logged)} | loss {logged['final_held_out_loss']:.3f}, "
            f"entropy {logged['final_entropy']:.3f} nats per token |\n"
        )
    plain = f", {tokenizer['plain_perplexity']:.1f} of them per flat color" if "plain_perplexity" in tokenizer else ""
    return _fill(
        "emoji",
        downsampling=vqvae.downsampling,
        codes=vqvae.config.codebook_size,
        code_width=vqvae.config.codebook_embed_dim,
        vqvae_millions=_millions(vqvae),
        layers=config.n_layer,
        width=config.dim,
        tokens=transformer.tokens,
        transformer_millions=_millions(transformer),
        caption_rows=config.cls_token_num,
        draft_part=draft_part,
        defaults=_defaults(pipeline),
        tokenizer_steps=f"{tokenizer['step']:.0f}",
        tokenizer_hours=_hours(tokenizer),
        psnr=f"{tokenizer['psnr']:.2f}",
        codebook_use=f"{tokenizer['codebook_use']:.1%}",
        plain_codes=plain,
        generator_steps=f"{generator['step']:.0f}",
        generator_hours=_hours(generator),
        loss=f"{generator['final_held_out_loss']:.3f}",
        entropy=f"{generator['final_entropy']:.3f}",
        draft_row=draft_row,
        recall=_recall(generator),
        verdict=_verdict(tokenizer["psnr"]),
        note=f" {note}" if note else "",
    )


def _defaults(pipeline: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in pipeline.default_sampling.items())


def _recall(generator: Metrics) -> str:
    """Return a sentence on caption recall, empty if training did not evaluate it."""
    names = {"seen": "training captions", "styles": "held-out styles of known concepts", "concepts": "held-out concepts"}
    shares = [
        f"{generator[f'top5_{group}']:.0%} ({generator[f'top1_{group}']:.0%} first) of {name}"
        for group, name in names.items()
        if f"top5_{group}" in generator
    ]
    return f"The packaged scorer ranks the caption among the first 5 of 1,000 for {', '.join(shares)}.\n" if shares else ""


def _verdict(psnr: float) -> str:
    if psnr >= 29:
        return "The tokenizer meets its goal of 29 dB."
    if psnr >= 26:
        return "The tokenizer meets its goal of 26 dB for a CPU; the goal for a GPU, 29 dB, has not been tried yet."
    return "The tokenizer is below its goal of 26 dB for a CPU: more training with the commands below should help."


def var_card(pipeline: Any, metrics: dict[str, Metrics], note: str) -> str:
    """Write the card of a text-conditional VAR."""
    vqvae, transformer, small, codes = pipeline.vqvae, pipeline.transformer, pipeline.draft_transformer, metrics["tokenizer"]
    small_part = ""
    if small is not None:
        small_part = f"| `draft_transformer` | {_blocks(small)}, for the late scales | {_millions(small)} M |\n"
    return _fill(
        "emoji-var",
        size=vqvae.image_size,
        passes=len(transformer.scales),
        borrowed=SHARED_FILE,
        scales=", ".join(map(str, transformer.scales)),
        tokens=transformer.tokens,
        codes=vqvae.config.codebook_size,
        code_width=vqvae.config.codebook_embed_dim,
        vqvae_millions=f"{_millions(vqvae)} M",
        transformer=_blocks(transformer),
        transformer_millions=f"{_millions(transformer)} M",
        small_part=small_part,
        defaults=_defaults(pipeline),
        rows="".join(_scales_row(name, metrics[name]) for name in ("model", "small") if name in metrics),
        tokenizer_steps=f"{codes['step']:.0f}",
        tokenizer_hours=_hours(codes),
        psnr=f"{codes['psnr']:.2f}",
        note=note,
    )


def _blocks(transformer: Any) -> str:
    return f"`VARTransformer`, {transformer.config.depth} blocks of width {transformer.config.dim}"


def _scales_row(name: str, metrics: Metrics) -> str:
    groups = ("seen", "styles", "concepts")
    losses = ", ".join(f"{metrics[f'loss_{group}']:.2f}" for group in groups)
    ranks = ", ".join(f"{metrics[f'rank_{group}']:.0%}" for group in groups)
    return f"| {name} | {metrics['step']:.0f} | {_hours(metrics)} | {losses} | {ranks} |\n"


def video_card(
    networks: dict[str, Any], sampling: dict[str, Any], weight_format: str, size: int, metrics: dict[str, Metrics], note: str
) -> str:
    """Write the card of a block-wise video model of `size` bytes."""
    vae, codes, geometry = networks["vae"], metrics["vae"], networks["transformer"].geometry
    lines = [f"| `{part}` | `{type(net).__name__}`{_shape(net)} | {_millions(net, 2)} M |" for part, net in networks.items()]
    return _fill(
        "emoji-video",
        size=vae.config.size,
        block_frames=geometry.block_frames,
        fps=geometry.fps,
        steps=f"{len(sampling['levels'])} steps"
        + (f" of a flow, guidance {sampling['guidance']:g}" if sampling["euler"] else ""),
        borrowed=SHARED_FILE,
        parts="\n".join(lines) + "\n",
        weight_format=weight_format,
        mebibytes=f"{size / 2**20:.1f}",
        rows="".join(_video_row(part, metrics[part]) for part in ("target", "drafter") if part in metrics),
        vae_steps=f"{codes['step']:.0f}",
        vae_hours=_hours(codes),
        psnr=f"{codes['psnr']:.2f}",
        seen_psnr=f"{codes['seen_psnr']:.2f}",
        motion=f"{codes['motion']:.0%}",
        flicker=f"{codes['flicker']:.1%}",
        note=note,
    )


def _shape(network: Any) -> str:
    if isinstance(network, CausalVideoTransformer):
        return f", {network.config.num_layers} blocks of width {network.config.dim}"
    return ""


def _video_row(part: str, metrics: Metrics) -> str:
    losses = f"{metrics['loss_seen']:.3f}, {metrics['loss_held_out']:.3f}"
    rest = f"{metrics['motion']:.2f} | {metrics['static_fraction']:.0%} | {metrics['recall']:.1f}"
    return f"| {part} | {metrics['step']:.0f} | {_hours(metrics)} | {losses} | {rest} |\n"


def scorer_card(model: Any, measured: Metrics, last: Metrics, note: str) -> str:
    """Write the card of a scorer, from the metrics of `measure_packaged` and the last line of the run's log."""
    top1 = measured["top_1_of_64"]
    names = {"held_out_concepts": "held-out concepts", "held_out_styles": "held-out styles of known concepts"}
    names["training"] = "training images"
    shares = [
        f"| {name} | {100 * top1[key]:.0f} % | {100 * top1[key + '_style']:.0f} % |"
        for key, name in names.items()
        if key in top1
    ]
    drops = [
        f"| {name} | {drop['mean']:+.1f} | {100 * drop['share']:.0f} % |" for name, drop in measured["score_drops"].items()
    ]
    return _fill(
        "emoji-scorer",
        millions=_millions(model),
        reference_captions=NUM_REFERENCE_CAPTIONS,
        file=CAPTIONS,
        shares="\n".join(shares),
        images=measured["images"],
        mean_score=f"{measured['mean_score']:.1f}",
        drops="\n".join(drops),
        steps=f"{last['step']:.0f}",
        hours=_hours(last, 1),
        note=note,
    )


def head_card(kind: str, size: int, metrics: Metrics, note: str) -> str:
    """Write the card of an EAGLE layer or Medusa heads of `size` bytes."""
    depths = sorted(int(name.rsplit("_", 1)[1]) for name in metrics if name.startswith("final_acceptance_"))
    rows = "\n".join(
        f"| {depth} | {metrics[f'final_acceptance_{depth}']:.3f} | {metrics[f'final_foreground_acceptance_{depth}']:.3f} |"
        for depth in depths
    )
    return _fill(
        "head",
        kind=kind,
        steps=f"{metrics['step']:.0f}",
        hours=_hours(metrics),
        mebibytes=f"{size / 2**20:.1f}",
        note=note,
        rows=rows,
        tokens_per_pass=f"{metrics['final_tokens_per_pass']:.2f}",
    )


def router_card(metrics: Metrics, note: str) -> str:
    """Write the card of a router of video drafts."""
    numbers = {name: f"{metrics[name]:.2f}" for name in ("correlation", "gain", "deviation")}
    return _fill("router", videos=f"{metrics['videos']:.0f}", pairs=f"{metrics['pairs']:.0f}", note=note, **numbers)


def lora_card(part: str, lora: Any, metrics: Metrics, note: str) -> str:
    """Write the card of a LoRA for start images, of the component `part` of a video model."""
    numbers = {name: f"{metrics[name]:.2f}" for name in ("motion", "psnr")} | {"static": f"{metrics['static_fraction']:.0%}"}
    trained = {"steps": f"{metrics['step']:.0f}", "hours": _hours(metrics)}
    return _fill("lora", part=part, rank=lora.config.rank, millions=_millions(lora), note=note, **trained, **numbers)


def low_res_card(name: str, metrics: Metrics, final: Metrics, note: str) -> str:
    """Write the card of a low-resolution transformer or its upsampler."""
    what = {
        "low_res": "a transformer for small images, with the model's image tokenizer",
        "upsampler": "predicts full-size tokens from a small image",
    }[name]
    rows = "\n".join(f"| {metric.replace('_', ' ')} | {value:.3f} |" for metric, value in sorted(final.items()))
    trained = f"{metrics['step']:.0f} steps, {_hours(metrics)} hours"
    return _fill("low-res", name=name, what=what, trained=trained, note=note, rows=rows)
