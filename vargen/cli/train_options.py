"""What the verbs of `vargen train` share: options, recipes, data, runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from vargen.cli.options import Device, check_range
from vargen.files import expanded

if TYPE_CHECKING:
    from recipes.emoji.dataset import EmojiDataset

app = typer.Typer(help="Train the small models that vargen ships.", no_args_is_help=True)

R = TypeVar("R")
Recipe = Annotated[str, typer.Option(metavar="FILE|NAME", help="A recipe in TOML, or a packaged one by name.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Data set. Default: where `vargen train data` puts it.")]
Run = Annotated[
    Path, typer.Option(metavar="DIR", help="The run: log, curves, checkpoint, model. A run found there is resumed.")
]
TrainingDevice = Annotated[Device, typer.Option(help="auto takes a GPU where there is one.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")]
TextEncoder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/ and tokenizer/. Default: the packaged one.")
]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Length of the run, instead of the recipe's.")]


def text_encoder_folder(folder: Path | None) -> Path:
    """The folder of a text encoder and its tokenizer, checked; the packaged one by default."""
    import vargen.assets

    encoder = expanded(folder, "text_encoder") if folder else Path(vargen.assets.__file__).parent / "emoji"
    for part in (encoder / "text_encoder", encoder / "tokenizer"):
        if not part.is_dir():
            raise FileNotFoundError(f"text_encoder folder {str(encoder)!r} must hold text_encoder/ and tokenizer/")
    return encoder


def recipe_of(config: str, kind: type[R], steps: int | None) -> R:
    from vargen.training.config import load_config

    check_range(steps, "steps", 1)
    return load_config(expanded(config, "config"), kind, steps)


def open_data(folder: Path | None) -> EmojiDataset:
    from recipes.emoji.dataset import load_emoji_dataset
    from vargen.files import cache_folder

    return load_emoji_dataset(expanded(folder, "data") if folder else cache_folder() / "emoji-128")


def saved(folder: Path, part: str, name: str) -> Path:
    """The saved network in a run's folder, or the folder itself if it is one."""
    from vargen.pipelines.component_files import saved_network

    return saved_network(folder, part, name)
