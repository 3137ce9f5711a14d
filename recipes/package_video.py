"""From finished video runs to a packaged model: a pipeline folder in int8, with a card that says how far training got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.emoji_video.batches import check_latents
from recipes.emoji_video.transformer import SAMPLING
from recipes.package import figures_of, without_traces
from vargen.files import whole_folder
from vargen.model_files import write_index
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.compact import WEIGHT_FORMATS, CompactModel
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.video_preview import PreviewDecoder
from vargen.models.video_vae import CausalVideoVAE
from vargen.pipelines.borrowed import FILE as BORROWED
from vargen.pipelines.borrowed import PARTS
from vargen.pipelines.prompt_names import FILE as NAMES

PIPELINE = "CausalVideoPipeline"
MOST_BYTES = 32 * 2**20  # of a packaged video model
_PARTS = {"vae": "vae", "target": "transformer", "drafter": "transformer", "preview": "preview"}  # what each run holds


def package_video(
    vae_run: Path,
    target_run: Path,
    output: Path,
    lender: Path,
    drafter_run: Path | None = None,
    preview_run: Path | None = None,
    defaults: dict[str, Any] | None = None,
    weight_format: str = "int8",
    note: str = "",
) -> Path:
    """Write the pipeline folder `output`; of one that is there, the model is replaced and other files stay.

    Args:
        vae_run: holds `vae/` and `log.jsonl`. target_run, drafter_run: hold `transformer/`, `sampling.json` and `log.jsonl`;
            the second becomes `draft_transformer`. preview_run: holds `preview/`, which becomes `preview_decoder`.
        lender: folder of the packaged model whose text encoder they were trained with; it is borrowed, not copied.
        defaults: of drawing, beside the levels of the target's run. weight_format: "int8" or "float16".
        note: how it was trained, for the card.

    Raises:
        FileNotFoundError: if a run is not finished. FileExistsError: if `output` is there and no model folder.
        ValueError: for runs of different autoencoders or geometries, for a target and a drafter that are drawn with at
            different levels, or if the whole is larger than 32 MiB.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format must be one of {', '.join(WEIGHT_FORMATS)}, got {weight_format!r}")
    given = {"vae": vae_run, "target": target_run, "drafter": drafter_run, "preview": preview_run}
    runs = {part: run for part, run in given.items() if run is not None}
    for part, run in runs.items():
        for needed in (_PARTS[part], *([SAMPLING] if part in ("target", "drafter") else [])):
            if not (run / needed).exists():
                raise FileNotFoundError(f"{run / needed} is missing: finish the training run first")
    networks = _networks(runs)
    how = _sampling(runs)
    for network in networks.values():
        network.register_to_config(weight_format=weight_format)
    with whole_folder(output, inputs=[], overwrite=True) as staged:
        for part, network in networks.items():
            network.save_pretrained(staged / part)
        text = {"text_encoder": MiniLMTextEncoder.from_pretrained(lender / "text_encoder"), "tokenizer": _tokenizer(lender)}
        missing = dict.fromkeys({"draft_transformer", "preview_decoder"} - networks.keys())
        kept = {"defaults": {**how, **(defaults or {})}, "prompt_styles": ["3d"]}
        write_index(staged, PIPELINE, {**networks, **missing, **text}, **kept)
        borrowed = [part for part in PARTS if part != "prompt_names" or (lender / NAMES).is_file()]
        (staged / BORROWED).write_text(json.dumps(dict.fromkeys(borrowed, lender.name), indent=1) + "\n", "utf-8")
        without_traces(staged)
        size = sum(file.stat().st_size for file in staged.rglob("*") if file.is_file())
        if size > MOST_BYTES:
            raise ValueError(f"the model takes {size / 2**20:.1f} MiB, more than {MOST_BYTES // 2**20}: store it as int8")
        figures = {part: figures_of(run) for part, run in runs.items()}
        (staged / "README.md").write_text(_card(networks, figures, how, weight_format, size, note), "utf-8")
        (staged / "training.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return output


def _networks(runs: dict[str, Path]) -> dict[str, CompactModel]:
    """The networks by their component's name, which fit each other."""
    vae = CausalVideoVAE.from_pretrained(runs["vae"] / "vae")
    for part in ("target", "drafter", "preview"):
        if part in runs:
            check_latents(runs[part], vae, runs["vae"])
    target = CausalVideoTransformer.from_pretrained(runs["target"] / "transformer")
    found: dict[str, CompactModel] = {"vae": vae, "transformer": target}
    if "drafter" in runs:
        drafter = CausalVideoTransformer.from_pretrained(runs["drafter"] / "transformer")
        for name, own, other in (
            ("geometry", drafter.geometry, target.geometry),
            ("text_dim", drafter.config.text_dim, target.config.text_dim),
            ("motion_levels", drafter.config.motion_levels, target.config.motion_levels),
        ):
            same = target.geometry.same_latents(drafter.geometry) if name == "geometry" else own == other
            if not same:
                raise ValueError(f"{name} of the drafter must be the target's, {other}, got {own}")
        found["draft_transformer"] = drafter
    if "preview" in runs:
        found["preview_decoder"] = PreviewDecoder.from_pretrained(runs["preview"] / "preview")
    return found


def _sampling(runs: dict[str, Path]) -> dict[str, Any]:
    """How target and drafter are drawn with."""
    found = {part: json.loads((runs[part] / SAMPLING).read_text("utf-8")) for part in ("target", "drafter") if part in runs}
    if "drafter" in found and found["drafter"] != found["target"]:
        raise ValueError(f"target and drafter must be drawn with alike, got {found['target']} and {found['drafter']}")
    return dict(found["target"])


def _tokenizer(lender: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(lender / "tokenizer")


def _card(
    networks: dict[str, CompactModel],
    figures: dict[str, dict[str, float]],
    how: dict[str, Any],
    weight_format: str,
    size: int,
    note: str,
) -> str:
    """A model card in the hub's form; every number comes from the runs' logs."""
    vae: Any = networks["vae"]
    target: Any = networks["transformer"]
    geometry, codes = target.geometry, figures["vae"]
    lines = [f"| `{part}` | `{type(net).__name__}`{_shape(net)} | {_millions(net)} |" for part, net in networks.items()]
    parts = "\n".join(lines) + "\n"
    rows = "".join(_row(part, figures[part]) for part in ("target", "drafter") if part in figures)
    steps = f"{len(how['levels'])} steps" + (f" of a flow, guidance {how['guidance']:g}" if how["euler"] else "")
    return f"""---
license: apache-2.0
library_name: vargen
pipeline_tag: text-to-video
---
# emoji-video: text to moving emoji of {vae.config.size} x {vae.config.size} pixels, block by block

A small causal video model that draws loops of emoji-like things from English prompts, made for laptops and packaged with
vargen: blocks of {geometry.block_frames} frames at {geometry.fps} a second, {steps} each. Data and licences: `DATA_CARD.md`
beside this folder. Its text encoder is that of the packaged model emoji (`{BORROWED}`).

| part | what | parameters |
|---|---|---|
{parts}
Weights are stored as {weight_format}, {size / 2**20:.1f} MiB in all.

## How far training got

| | steps | hours | loss: training clips, held-out | motion of drawn to real | frozen | recall |
|---|---|---|---|---|---|---|
{rows}
The autoencoder, {codes["step"]:.0f} steps in {codes["seconds"] / 3600:.2f} hours, reaches a PSNR of {codes["psnr"]:.2f} dB on \
held-out clips ({codes["seen_psnr"]:.2f} on training clips), moves {codes["motion"]:.0%} as much as they do, and what stands
still changes {codes["flicker"]:.1%} as much as what moves.
Motion is the median over 16 drawn training captions; frozen is the share that moves less than a fifth of the real clip; recall
is the PSNR in dB of the first frame to that clip's. 33 of 734 concepts are held out.
{note}

## Train it further

```
vargen train video-data
vargen train video-vae
vargen train video-preview --vae runs/video-vae
vargen train video-target --vae runs/video-vae
vargen train video-drafter --vae runs/video-vae
RUN="--vae runs/video-vae --teacher runs/video-target"
vargen train video-target --config emoji-video-target-steps $RUN --output runs/video-target-steps
vargen train video-drafter --config emoji-video-drafter-steps $RUN --init runs/video-drafter --output runs/video-drafter-steps
vargen train package-video --drafter runs/video-drafter-steps --preview runs/video-preview
```

Limits: emoji subjects on white only, in Fluent's style; what it has not seen move, it moves at random; small parts are
blurred; text in any language but English is noise to it.
"""


def _shape(network: Any) -> str:
    if isinstance(network, CausalVideoTransformer):
        return f", {network.config.num_layers} blocks of width {network.config.dim}"
    return ""


def _millions(network: Any) -> str:
    return f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M"


def _row(part: str, figures: dict[str, float]) -> str:
    losses = f"{figures['loss_seen']:.3f}, {figures['loss_held_out']:.3f}"
    rest = f"{figures['motion']:.2f} | {figures['frozen']:.0%} | {figures['recall']:.1f}"
    return f"| {part} | {figures['step']:.0f} | {figures['seconds'] / 3600:.2f} | {losses} | {rest} |\n"
