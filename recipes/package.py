"""From two training runs to a packaged model: a pipeline folder in int8, with a model card that says how far training got."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.emoji.evaluation import COUNTS, DEFAULTS
from vargen.files import whole_file, whole_files, whole_folder
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.vq import VQModel
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.prompt_names import PromptNames
from vargen.training.run import TrainingRun
from vargen.training.token_cache import check_tokens

_RECALL = [f"top{count}_{group}" for group in COUNTS for count in (1, 5)]
_PARTS = {"tokenizer": "vqvae", "upsampler": "upsampler"}
_STYLES = ("3d", "flat")  # those that the recipes see most: the others come out worse, and are not offered


def package(
    tokenizer_run: Path,
    generator_run: Path,
    text_encoder_folder: Path,
    output: Path,
    defaults: dict[str, Any] | None = None,
    note: str = "",
    drafter_run: Path | None = None,
    recall: Path | None = None,
) -> Path:
    """Write the pipeline folder `output` from finished runs; of one that is there, the model is replaced and other files stay.

    Args:
        tokenizer_run: holds `vqvae/` and `log.jsonl`; or a packaged model, whose tokenizer it is.
        generator_run: holds `transformer/` and `log.jsonl`.
        text_encoder_folder: holds `text_encoder/` and `tokenizer/`, and may hold `prompt_names.json`, which
            `recipes.emoji.names.write_emoji_names` makes; may be `output` itself.
        defaults: sampling defaults of the model. note: how it was trained, for the card.
        drafter_run: a generator's run of a smaller model on the same tokens, packaged as `draft_transformer`.
        recall: what `vargen train recall` printed of the generator, in place of the few drawings that its run logged.

    Raises:
        ValueError: if a generator's run was trained on the tokens of another tokenizer, or `recall` holds no such figures.
        FileNotFoundError: if a run is not finished. FileExistsError: if `output` is there and no model folder.
    """
    from transformers import AutoTokenizer

    runs = {"tokenizer": tokenizer_run, "generator": generator_run, **({"drafter": drafter_run} if drafter_run else {})}
    check_finished(runs)
    told = {} if recall is None else recall_figures(recall)
    vqvae = VQModel.from_pretrained(tokenizer_run / "vqvae")
    for part, run in runs.items():
        if part != "tokenizer":
            check_tokens(run, vqvae, tokenizer_run)
    transformer = LlamaGenTransformer.from_pretrained(generator_run / "transformer")
    drafter = LlamaGenTransformer.from_pretrained(drafter_run / "transformer") if drafter_run else None
    settings = dict(DEFAULTS)
    if settings["top_k"] > transformer.config.vocab_size:  # as in a converted model: a call would be refused
        del settings["top_k"]
    settings |= defaults or {}
    pipeline = LlamaGenPipeline(
        vqvae=vqvae,
        transformer=transformer,
        text_encoder=MiniLMTextEncoder.from_pretrained(text_encoder_folder / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(text_encoder_folder / "tokenizer"),
        draft_transformer=drafter,
        defaults=settings,
        prompt_styles=list(_STYLES),
        prompt_names=PromptNames.read(text_encoder_folder),
    )
    vqvae.half()  # every parameter, the codebook too: decoding normalises its rows in float32
    for network in (transformer, drafter):
        if network is not None:
            network.register_to_config(weight_format="int8")
    with whole_folder(output, inputs=[], overwrite=True) as staged:
        pipeline.save_pretrained(staged)
        for name in ("text_encoder", "tokenizer"):  # as they were: saving writes the tokenizer anew, a little larger
            shutil.rmtree(staged / name)
            shutil.copytree(text_encoder_folder / name, staged / name)
        without_traces(staged)
        figures = {part: figures_of(run, part) for part, run in runs.items()}
        figures["generator"] |= told
        card = model_card(vqvae, transformer, drafter, figures, pipeline.default_sampling, note)
        (staged / "README.md").write_text(card)
        (staged / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    return output


def recall_figures(file: Path) -> dict[str, float]:
    """`top1_seen`, `top5_styles` and so on of what `vargen train recall` printed; ValueError where they are missing."""
    found = json.loads(file.read_text("utf-8"))
    given = found if isinstance(found, dict) else {}
    figures = {key: float(given[key]) for key in _RECALL if isinstance(given.get(key), int | float) and 0 <= given[key] <= 1}
    if len(figures) < len(_RECALL):
        raise ValueError(f"recall: {file} is not what `vargen train recall` prints: shares from 0 to 1 as {', '.join(_RECALL)}")
    return figures


def check_finished(runs: Mapping[str, Path]) -> None:
    """Raise FileNotFoundError for a run without the network that its end writes: a `transformer`, but for those of `_PARTS`."""
    for part, run in runs.items():
        finished = run / _PARTS.get(part, "transformer")
        if not finished.is_dir():
            raise FileNotFoundError(f"{finished} is missing: finish the training run first")


def add_part(folder: Path, name: str, network: Any, card: str) -> None:
    """Write a network and its card into a model's folder, of which it is the component `name` from then on."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    with whole_files(folder / name) as staged:
        network.save_pretrained(staged)
        without_traces(staged)
        (staged / "README.md").write_text(card, "utf-8")
    index[name] = [type(network).__module__, type(network).__name__]
    with whole_file(folder / "model_index.json") as temporary:
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def without_traces(folder: Path) -> None:
    """Take out what saving leaves of a machine in networks under `folder`: where they were trained, and who may read them."""
    for config in folder.rglob("config.json"):
        values = json.loads(config.read_text("utf-8"))
        if values.pop("_name_or_path", None) is not None:
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # diffusers leaves them readable to their owner alone


def figures_of(run: Path, part: str | None = None) -> dict[str, float]:
    """The last logged value of everything in a run, with its steps and seconds; of a packaged model, what it says of a part."""
    packaged = run / "training.json"
    if part is not None and packaged.is_file():
        return dict(json.loads(packaged.read_text("utf-8"))[part])
    figures: dict[str, float] = {}
    for record in TrainingRun(run, {}, 0).records():
        figures.update(record)
    return figures


def model_card(
    vqvae: VQModel,
    transformer: LlamaGenTransformer,
    drafter: LlamaGenTransformer | None,
    figures: dict[str, dict[str, float]],
    sampling: dict[str, Any],
    note: str = "",
) -> str:
    """A model card in the hub's form; every number comes from the runs' logs."""
    tokenizer, generator = figures["tokenizer"], figures["generator"]
    config, N, millions = transformer.config, transformer.tokens, sum(p.numel() for p in transformer.parameters()) / 1e6
    draft_part, draft_row = "", ""
    if drafter is not None:
        draft_millions, draft = sum(p.numel() for p in drafter.parameters()) / 1e6, figures["drafter"]
        draft_part = (
            f"| `draft_transformer` | `LlamaGenTransformer`, {drafter.config.n_layer} layers of width {drafter.config.dim}, "
            f"for speculative decoding | {draft_millions:.1f} M |\n"
        )
        draft_row = (
            f"| drafter | {draft['step']:.0f} | {draft['seconds'] / 3600:.2f} | loss {draft['final_held_out_loss']:.3f}, "
            f"entropy {draft['final_entropy']:.3f} nats per token |\n"
        )
    plain = f", {tokenizer['plain_perplexity']:.1f} of them for a plain colour" if "plain_perplexity" in tokenizer else ""
    vq_millions = sum(p.numel() for p in vqvae.parameters()) / 1e6
    defaults = ", ".join(f"{key} {value}" for key, value in sampling.items())
    return f"""---
license: apache-2.0
library_name: vargen
pipeline_tag: text-to-image
---
# emoji: text to 128 x 128 pictures

A small LlamaGen that draws emoji-like pictures from English prompts, packaged with vargen. Data and licences: `DATA_CARD.md`
beside this folder.

| part | what | parameters |
|---|---|---|
| `vqvae` | `VQModel`, downsampling {vqvae.downsampling}, {vqvae.config.codebook_size} unit-norm codes of width \
{vqvae.config.codebook_embed_dim} | {vq_millions:.1f} M |
| `transformer` | `LlamaGenTransformer`, {config.n_layer} layers of width {config.dim}, {N} tokens | {millions:.1f} M |
{draft_part}| `text_encoder` | all-MiniLM-L6-v2 (Apache-2.0), int8 weights, {config.cls_token_num} caption rows | 22.6 M |

Weights are stored as int8 with a scale for each 32, those of `vqvae` in float16.
Default sampling: {defaults}.

## How far training got

| | steps | hours | held-out figures |
|---|---|---|---|
| tokenizer | {tokenizer["step"]:.0f} | {tokenizer["seconds"] / 3600:.2f} | PSNR {tokenizer["psnr"]:.2f} dB, \
{tokenizer["codebook_use"]:.1%} of the codes in use{plain} |
| generator | {generator["step"]:.0f} | {generator["seconds"] / 3600:.2f} | loss {generator["final_held_out_loss"]:.3f}, \
entropy {generator["final_entropy"]:.3f} nats per token |
{draft_row}
Held out are 86 of 1,959 concepts, with all their styles; the generator's weights are the average of its last ones.
{_recall(generator)}{_verdict(tokenizer)}{" " + note if note else ""}

## Train it further

```
vargen train data
vargen train tokenizer --config emoji-tokenizer-gpu     # or, on two CPU cores, emoji-tokenizer, then -plain, then -decoder
vargen train generator --config emoji-generator-gpu --tokenizer runs/tokenizer     # or emoji-generator
vargen train generator --config emoji-drafter --tokenizer runs/tokenizer --output runs/drafter
vargen train package --drafter runs/drafter
vargen generate --prompt-file assets/sheet.txt --seed 0 -o pictures/ --sheet assets/emoji/contact_sheet.png     # look at it
```

Limits: emoji subjects on white only; no lettering; text in any language but English is noise to it. Styles twemoji and noto
were seen a fifth as often as 3d and flat, and come out worse. People and skin tones are drawn as the emoji sets draw them.
"""


def _recall(generator: dict[str, float]) -> str:
    """What the packaged scorer makes of its pictures, where training had it look."""
    named = {"seen": "training captions", "styles": "held-out styles of known concepts", "concepts": "held-out concepts"}
    told = [
        f"{generator[f'top5_{group}']:.0%} ({generator[f'top1_{group}']:.0%} first) of {what}"
        for group, what in named.items()
        if f"top5_{group}" in generator
    ]
    return f"The packaged scorer finds the caption among the first 5 of 1,000 for {', '.join(told)}.\n" if told else ""


def _verdict(tokenizer: dict[str, float]) -> str:
    if tokenizer["psnr"] >= 29:
        return "The tokenizer meets its goal of 29 dB."
    if tokenizer["psnr"] >= 26:
        return "The tokenizer meets its goal of 26 dB for a CPU; that for a GPU, 29 dB, is still to be tried."
    return "The tokenizer is below its goal of 26 dB for a CPU: more training, with the commands below, is expected to help."
