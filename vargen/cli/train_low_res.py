"""`vargen train low-res` and `train upsampler`: what drafts for a next-token model from a picture at a low resolution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import Device, pick_device
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

TOKENIZER = typer.Option(metavar="DIR", help="A tokenizer's run, or a saved image tokenizer. Default: the packaged model's.")


def _tokenizer(folder: Path | None) -> Path:
    import vargen.assets

    given = expanded(folder, "tokenizer") if folder else Path(vargen.assets.__file__).parent / "emoji"
    return saved(given, "vqvae", "tokenizer")


@app.command("low-res")
def low_res(
    tokenizer: Annotated[Path | None, TOKENIZER] = None,
    config: Recipe = "emoji-low-res",
    data: Data = None,
    text_encoder: TextEncoder = None,
    output: Run = Path("runs/low-res"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train a small transformer on pictures at a low resolution; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji.evaluation import caption_recall
    from vargen.models.vq import VQModel
    from vargen.training.config import NextTokenConfig
    from vargen.training.low_res import downscale_dataset
    from vargen.training.next_token import train_next_token

    output = expanded(output, "output")
    recipe = recipe_of(config, NextTokenConfig, steps)
    encoder, codes = text_encoder_folder(text_encoder), _tokenizer(tokenizer)
    pictures, place = open_data(data), pick_device(device)
    fix_threads(threads)
    small = downscale_dataset(pictures, recipe, VQModel.from_pretrained(codes).downsampling)
    figures = train_next_token(recipe, small, codes, encoder, output, place, None, caption_recall(small, recipe, place))
    print_json({"model": str(output / "transformer"), **figures})


@app.command()
def upsampler(
    tokenizer: Annotated[Path | None, TOKENIZER] = None,
    config: Recipe = "emoji-upsampler",
    data: Data = None,
    output: Run = Path("runs/upsampler"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train what makes tokens of a picture likely that is known at a low resolution; print its held-out figures."""
    quiet_libraries()
    from vargen.training.upsampler import UpsamplerConfig, train_upsampler

    output = expanded(output, "output")
    recipe = recipe_of(config, UpsamplerConfig, steps)
    codes, pictures, place = _tokenizer(tokenizer), open_data(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "upsampler"), **train_upsampler(recipe, pictures, codes, output, place)})
