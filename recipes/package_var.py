"""From finished next-scale runs to a packaged model: a pipeline folder in int8, with a card that says how far training got."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from recipes.emoji.dataset import STYLES
from recipes.emoji_var.data import check_latents
from recipes.package import check_finished, figures_of, without_traces
from vargen.files import whole_folder
from vargen.models.multi_scale_vq import MultiScaleVQModel
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.var import VARTransformer
from vargen.pipelines.borrowed import FILE as BORROWED
from vargen.pipelines.borrowed import PARTS
from vargen.pipelines.prompt_names import FILE as NAMES
from vargen.pipelines.var import VARPipeline

DEFAULTS = {"guidance_scale": 3.0, "temperature": 0.8, "top_p": 1.0}


def package_var(
    tokenizer_run: Path,
    model_run: Path,
    output: Path,
    lender: Path,
    small_run: Path | None = None,
    defaults: dict[str, Any] | None = None,
    note: str = "",
) -> Path:
    """Write the pipeline folder `output`; of one that is there, the model is replaced and other files stay.

    Args:
        tokenizer_run: holds `vqvae/` and `log.jsonl`. model_run, small_run: hold `transformer/` and `log.jsonl`; the small
            one becomes `draft_transformer`.
        lender: folder of the packaged model whose text encoder it was trained with; it is borrowed, not copied.
        defaults: sampling defaults of the model. note: how it was trained, for the card.

    Raises:
        FileNotFoundError: if a run is not finished. FileExistsError: if `output` is there and no model folder.
        ValueError: for runs of different tokenizers.
    """
    from transformers import AutoTokenizer

    runs = {"tokenizer": tokenizer_run, "model": model_run, **({"small": small_run} if small_run else {})}
    check_finished(runs)
    vqvae = MultiScaleVQModel.from_pretrained(tokenizer_run / "vqvae")
    for run in (model_run, *([small_run] if small_run else [])):
        check_latents(run, vqvae, tokenizer_run)
    transformer = VARTransformer.from_pretrained(model_run / "transformer")
    small = VARTransformer.from_pretrained(small_run / "transformer") if small_run else None
    for network in (vqvae, transformer, small):
        if network is not None:
            network.register_to_config(weight_format="int8")
    pipeline = VARPipeline(
        vqvae=vqvae,
        transformer=transformer,
        text_encoder=MiniLMTextEncoder.from_pretrained(lender / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(lender / "tokenizer"),
        draft_transformer=small,
        defaults={**DEFAULTS, **(defaults or {})},
        prompt_styles=list(STYLES),
    )
    with whole_folder(output, inputs=[], overwrite=True) as staged:
        pipeline.save_pretrained(staged)
        for part in ("text_encoder", "tokenizer"):
            shutil.rmtree(staged / part)
        borrowed = [part for part in PARTS if part != "prompt_names" or (lender / NAMES).is_file()]
        (staged / BORROWED).write_text(json.dumps(dict.fromkeys(borrowed, lender.name), indent=1) + "\n", "utf-8")
        without_traces(staged)
        figures = {part: figures_of(run) for part, run in runs.items()}
        (staged / "README.md").write_text(_card(pipeline, figures, note), "utf-8")
        (staged / "training.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return output


def _card(pipeline: VARPipeline, figures: dict[str, dict[str, float]], note: str) -> str:
    """A model card in the hub's form; every number comes from the runs' logs."""
    vqvae, transformer, small = pipeline.vqvae, pipeline.transformer, pipeline.draft_transformer
    sides = ", ".join(map(str, transformer.scales))
    small_part = ""
    if small is not None:
        small_part = f"| `draft_transformer` | {_network(small)}, for the late scales | {_millions(small)} |\n"
    defaults = ", ".join(f"{key} {value}" for key, value in pipeline.default_sampling.items())
    rows = "".join(_row(name, figures[name]) for name in ("model", "small") if name in figures)
    codes = figures["tokenizer"]
    return f"""---
license: apache-2.0
library_name: vargen
pipeline_tag: text-to-image
---
# emoji-var: text to {vqvae.image_size} x {vqvae.image_size} pictures in {len(transformer.scales)} passes

A small VAR that draws emoji-like pictures from English prompts, made for laptops and packaged with vargen. Data and licences:
`DATA_CARD.md` beside this folder. Its text encoder is that of the packaged model emoji (`{BORROWED}`).

| part | what | parameters |
|---|---|---|
| `vqvae` | `MultiScaleVQModel`, scales {sides}: {transformer.tokens} tokens, {vqvae.config.codebook_size} codes of width \
{vqvae.config.codebook_embed_dim} | {_millions(vqvae)} |
| `transformer` | {_network(transformer)} | {_millions(transformer)} |
{small_part}
Weights are stored as int8 with a scale for each 32. Default sampling: {defaults}.

## How far training got

| | steps | hours | nats a token: seen, held-out styles, held-out concepts | right caption of 16 |
|---|---|---|---|---|
{rows}
The tokenizer, {codes["step"]:.0f} steps in {codes["seconds"] / 3600:.2f} hours, reaches a PSNR of {codes["psnr"]:.2f} dB on \
held-out pictures.
Held out are 86 of 1,959 concepts with all their styles, and cells of (concept, style) whose other styles are known.
"Right caption" is how often a picture's own caption is the likeliest of 16 at the first scales.
{note}

## Train it further

```
vargen train data
vargen train var-tokenizer --output runs/var-tokenizer
vargen train var --tokenizer runs/var-tokenizer --output runs/var
vargen train var --config emoji-var-small --tokenizer runs/var-tokenizer --teacher runs/var --output runs/var-small
vargen train package-var --tokenizer runs/var-tokenizer --run runs/var --small runs/var-small
vargen generate --model emoji-var --prompt-file assets/prompts.txt -o pictures/ --sheet assets/emoji-var/contact_sheet.png
```

Limits: emoji subjects on white only; no lettering; small things are blurred; text in any language but English is noise to it.
People and skin tones are drawn as the emoji sets draw them.
"""


def _network(transformer: VARTransformer) -> str:
    return f"`VARTransformer`, {transformer.config.depth} blocks of width {transformer.config.dim}"


def _millions(network: Any) -> str:
    return f"{sum(p.numel() for p in network.parameters()) / 1e6:.1f} M"


def _row(name: str, figures: dict[str, float]) -> str:
    groups = ("seen", "styles", "concepts")
    losses = ", ".join(f"{figures[f'loss_{group}']:.2f}" for group in groups)
    ranks = ", ".join(f"{figures[f'rank_{group}']:.0%}" for group in groups)
    return f"| {name} | {figures['step']:.0f} | {figures['seconds'] / 3600:.2f} | {losses} | {ranks} |\n"
