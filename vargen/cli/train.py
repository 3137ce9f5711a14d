"""`vargen train`: the data set, the tokenizer, the generator, and the folder that joins them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import Device, check_range, pick_device
from vargen.cli.train_options import (
    Data,
    Recipe,
    Run,
    Steps,
    TextEncoder,
    Threads,
    TrainingDevice,
    app,
    open_data,
    recipe_of,
    saved,
    text_encoder_folder,
)
from vargen.device import fix_threads
from vargen.files import expanded


@app.command()
def data(
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: a folder of the user's cache.")] = None,
    size: Annotated[int, typer.Option(metavar="N", help="Side of the pictures in pixels.")] = 128,
) -> None:
    """Build the emoji data set: fetch the pinned packages, check their sums, draw every emoji."""
    from recipes.emoji.dataset import build_emoji_dataset
    from vargen.files import cache_folder

    output = output and expanded(output, "output")
    built = build_emoji_dataset(output, size=size)
    folder = output or cache_folder() / f"emoji-{size}"
    splits = {split: len(built.indices(split)) for split in ("train", "validation")}
    print_json({"folder": str(folder), "pictures": len(built.records), **splits, "report": built.report})


@app.command()
def tokenizer(
    config: Recipe = "emoji-tokenizer",
    data: Data = None,
    output: Run = Path("runs/tokenizer"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train the image tokenizer; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji.tokenizer import train_tokenizer
    from vargen.training.config import TokenizerConfig

    output = expanded(output, "output")
    recipe = recipe_of(config, TokenizerConfig, steps)
    pictures, place = open_data(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "vqvae"), **train_tokenizer(recipe, pictures, output, place)})


@app.command("var-tokenizer")
def var_tokenizer(
    config: Recipe = "emoji-var-tokenizer",
    data: Data = None,
    output: Run = Path("runs/var-tokenizer"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train the multi-scale image tokenizer of a next-scale model; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji_var.tokenizer import train_multi_scale_tokenizer
    from recipes.emoji_var.tokenizer_config import MultiScaleTokenizerConfig

    output = expanded(output, "output")
    recipe = recipe_of(config, MultiScaleTokenizerConfig, steps)
    pictures, place = open_data(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "vqvae"), **train_multi_scale_tokenizer(recipe, pictures, output, place)})


@app.command()
def generator(
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A tokenizer's run, or a saved image tokenizer.")],
    config: Recipe = "emoji-generator",
    data: Data = None,
    init: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Start from these weights: a generator's run, or a saved transformer.")
    ] = None,
    text_encoder: TextEncoder = None,
    output: Run = Path("runs/generator"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train the transformer on an image tokenizer's tokens; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji.evaluation import caption_recall
    from vargen.training.config import NextTokenConfig
    from vargen.training.next_token import train_next_token

    output, tokenizer = expanded(output, "output"), expanded(tokenizer, "tokenizer")
    recipe = recipe_of(config, NextTokenConfig, steps)
    encoder = text_encoder_folder(text_encoder)
    codes = saved(tokenizer, "vqvae", "tokenizer")
    start = saved(expanded(init, "init"), "transformer", "init") if init else None
    pictures, place = open_data(data), pick_device(device)
    fix_threads(threads)
    figures = train_next_token(recipe, pictures, codes, encoder, output, place, start, caption_recall(pictures, recipe, place))
    print_json({"model": str(output / "transformer"), **figures})


@app.command()
def var(
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A multi-scale tokenizer's run, or a saved one.")],
    config: Recipe = "emoji-var",
    data: Data = None,
    teacher: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A run, or a saved model, that a small one imitates.")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Start from these weights: a run, or a saved transformer.")
    ] = None,
    text_encoder: TextEncoder = None,
    output: Run = Path("runs/var"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train the next-scale transformer on a multi-scale tokenizer's codes; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji_var.config import NextScaleConfig
    from recipes.emoji_var.transformer import train_next_scale

    output, tokenizer = expanded(output, "output"), expanded(tokenizer, "tokenizer")
    recipe = recipe_of(config, NextScaleConfig, steps)
    encoder = text_encoder_folder(text_encoder)
    codes = saved(tokenizer, "vqvae", "tokenizer")
    guide = saved(expanded(teacher, "teacher"), "transformer", "teacher") if teacher else None
    start = saved(expanded(init, "init"), "transformer", "init") if init else None
    pictures, place = open_data(data), pick_device(device)
    fix_threads(threads)
    figures = train_next_scale(recipe, pictures, codes, encoder, output, place, guide, start)
    print_json({"model": str(output / "transformer"), **figures})


@app.command()
def scorer(
    config: Recipe = "emoji-scorer",
    data: Data = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/, tokenizer/ and vqvae/.")] = None,
    output: Run = Path("runs/scorer"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train the scorer that tells how well a picture fits a caption; print its held-out figures."""
    quiet_libraries()
    import vargen.assets
    from recipes.emoji.scorer import train_scorer
    from vargen.training.config import ScorerConfig

    output = expanded(output, "output")
    recipe = recipe_of(config, ScorerConfig, steps)
    parts = expanded(model, "model") if model else Path(vargen.assets.__file__).parent / "emoji"
    for part in (parts / "text_encoder", parts / "tokenizer", parts / "vqvae"):
        if not part.is_dir():
            raise FileNotFoundError(f"model folder {str(parts)!r} must hold text_encoder/, tokenizer/ and vqvae/")
    pictures, place = open_data(data), pick_device(device)
    fix_threads(threads)
    figures = train_scorer(recipe, pictures, parts, parts / "vqvae", output, place)
    print_json({"model": str(output / "scorer"), **figures})


class _Kind(StrEnum):
    eagle = "eagle"
    medusa = "medusa"


@app.command()
def drafter(
    kind: Annotated[_Kind, typer.Option(help="EAGLE's layer, which drafts token by token, or Medusa's heads, all at once.")],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model to draft for, packaged or a folder.")] = "emoji",
    config: Annotated[str | None, typer.Option(metavar="FILE|NAME", help="A recipe. Default: that of the kind.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to draw, one a line. Default: the data set's captions; classes.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Caption features .npz: embeds [n, P, C], mask [n, P].")
    ] = None,
    data: Data = None,
    drawn: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Drawn pictures, which kinds may share. Default: in the run's folder.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The run, as above. Default: runs/KIND.")] = None,
    pictures: Annotated[int | None, typer.Option(metavar="N", help="Drawn pictures, instead of the recipe's.")] = None,
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train a drafter on a LlamaGen's features and on pictures that it draws; print its held-out figures."""
    quiet_libraries()
    from dataclasses import replace

    import torch

    from vargen.pipelines.registry import describe, open_pipeline
    from vargen.training.generated_images import select_prompt_source
    from vargen.training.heads import train_head
    from vargen.training.heads_config import HeadConfig

    output = expanded(output, "output") if output else Path("runs") / kind.value
    recipe = recipe_of(config or kind.value, HeadConfig, steps)
    check_range(pictures, "pictures", 2)
    if pictures is not None:
        recipe = replace(recipe, pictures=pictures, held_out=min(recipe.held_out, max(1, pictures // 10)))
    if describe(model).pipeline != "LlamaGenPipeline":
        raise ValueError(f"model must be a LlamaGen, whose features drafters take, got {model!r}")
    fix_threads(threads)
    pipe = open_pipeline(model, torch_dtype=torch.float32).to(pick_device(device))
    given = {"prompts": prompts, "features": features}
    files = {name: path and expanded(path, name) for name, path in given.items()}
    subjects = select_prompt_source(pipe, recipe.pictures, lambda: open_data(data), **files)
    place = drawn and expanded(drawn, "drawn")
    print_json({"drafter": str(output / "drafter"), **train_head(kind.value, recipe, pipe, subjects, output, place)})
