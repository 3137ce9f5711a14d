"""`vargen train video-...`: the clips, and the networks of a block-wise video model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import Device, pick_device
from vargen.cli.train_options import (
    Recipe,
    Run,
    Steps,
    TextEncoder,
    Threads,
    TrainingDevice,
    app,
    recipe_of,
    saved,
    text_encoder_folder,
)
from vargen.device import fix_threads
from vargen.files import expanded

if TYPE_CHECKING:
    from recipes.emoji_video.clips import VideoDataset

_Clips = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Clips. Default: where `vargen train video-data` puts them.")
]


def open_clips(folder: Path | None) -> VideoDataset:
    from recipes.emoji_video.clips import load_video_dataset
    from vargen.files import cache_folder

    return load_video_dataset(expanded(folder, "data") if folder else cache_folder() / "emoji-video-64")


@app.command("video-data")
def video_data(
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: a folder of the user's cache.")] = None,
    size: Annotated[int, typer.Option(metavar="N", help="Side of the frames in pixels.")] = 64,
) -> None:
    """Build the clips: fetch four pinned packages of animated emoji (0.7 GB), cut 24 frames of each. Resumes."""
    from recipes.emoji_video.clips import build_video_dataset
    from vargen.files import cache_folder

    output = output and expanded(output, "output")
    built = build_video_dataset(output, size=size)
    folder = output or cache_folder() / f"emoji-video-{size}"
    splits = {split: len(built.indices(split)) for split in ("train", "validation")}
    print_json({"folder": str(folder), "clips": len(built.records), **splits, "report": built.report})


@app.command("video-vae")
def video_vae(
    config: Recipe = "emoji-video-vae",
    data: _Clips = None,
    output: Run = Path("runs/video-vae"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train the causal autoencoder of a video model; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji_video.autoencoder import train_autoencoder
    from recipes.emoji_video.config import AutoencoderConfig

    output = expanded(output, "output")
    recipe = recipe_of(config, AutoencoderConfig, steps)
    clips, place = open_clips(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "vae"), **train_autoencoder(recipe, clips, output, place)})


_Autoencoder = Annotated[Path, typer.Option(metavar="DIR", help="A run of video-vae, or a saved autoencoder.")]


@app.command("video-preview")
def video_preview(
    vae: _Autoencoder,
    config: Recipe = "emoji-video-preview",
    data: _Clips = None,
    output: Run = Path("runs/video-preview"),
    steps: Steps = None,
    device: TrainingDevice = Device.auto,
    threads: Threads = None,
) -> None:
    """Train a small decoder that shows latents to a scorer; print its held-out figures."""
    quiet_libraries()
    from recipes.emoji_video.config import PreviewConfig
    from recipes.emoji_video.preview import train_video_preview

    output = expanded(output, "output")
    recipe = recipe_of(config, PreviewConfig, steps)
    codes = saved(expanded(vae, "vae"), "vae", "vae")
    clips, place = open_clips(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "preview"), **train_video_preview(recipe, clips, codes, output, place)})


def _network_command(name: str, summary: str) -> None:
    """Add a command that trains a block-wise video model; the two that draw together differ by their recipe."""

    @app.command(name, help=summary)
    def train(
        vae: _Autoencoder,
        config: Recipe = f"emoji-{name}",
        data: _Clips = None,
        teacher: Annotated[
            Path | None, typer.Option(metavar="DIR", help="A run, or a saved model, whose flow a few-step model follows.")
        ] = None,
        init: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="Start from these weights: a run, or a saved model. Default: the teacher's."),
        ] = None,
        text_encoder: TextEncoder = None,
        output: Run = Path("runs") / name,
        steps: Steps = None,
        device: TrainingDevice = Device.auto,
        threads: Threads = None,
    ) -> None:
        quiet_libraries()
        from recipes.emoji_video.config import VideoConfig
        from recipes.emoji_video.transformer import train_video

        output = expanded(output, "output")
        recipe = recipe_of(config, VideoConfig, steps)
        encoder, codes = text_encoder_folder(text_encoder), saved(expanded(vae, "vae"), "vae", "vae")
        guide = saved(expanded(teacher, "teacher"), "transformer", "teacher") if teacher else None
        start = saved(expanded(init, "init"), "transformer", "init") if init else None
        clips, place = open_clips(data), pick_device(device)
        fix_threads(threads)
        figures = train_video(recipe, clips, codes, encoder, output, place, guide, start)
        print_json({"model": str(output / "transformer"), **figures})


_network_command(
    "video-target",
    "Train the large block-wise video model on latents, or, with a teacher, to draw in few steps; print its figures.",
)
_network_command("video-drafter", "Train the small one, which drafts blocks for the large one; print its figures.")


@app.command("package-video")
def package_video(
    vae: Annotated[Path, typer.Option(metavar="DIR", help="A finished run of video-vae.")] = Path("runs/video-vae"),
    target: Annotated[Path, typer.Option(metavar="DIR", help="Of video-target.")] = Path("runs/video-target-steps"),
    drafter: Annotated[Path | None, typer.Option(metavar="DIR", help="Of video-drafter.")] = None,
    preview: Annotated[Path | None, typer.Option(metavar="DIR", help="Of video-preview.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the packaged model, which is replaced.")] = None,
    tau: Annotated[float | None, typer.Option(help="The score that a draft needs by default, on the scorer's scale.")] = None,
    scored_frames: Annotated[int | None, typer.Option(min=1, help="Of a drafted block, by default; all if not given.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Join finished video runs to a model folder in int8, with a card that says how far training got."""
    quiet_libraries()
    import vargen.assets
    from recipes.package_video import package_video as join

    packaged = Path(vargen.assets.__file__).parent
    place = expanded(output, "output") if output else packaged / "emoji-video"
    given = {"vae": vae, "target": target, "drafter": drafter, "preview": preview}
    runs = {name: path and expanded(path, name) for name, path in given.items()}
    assert runs["vae"] and runs["target"]
    if tau is not None and not math.isfinite(tau):
        raise ValueError(f"--tau must be a finite number, got {tau}")
    usual = {name: value for name, value in (("tau", tau), ("scored_frames", scored_frames)) if value is not None}
    print(join(runs["vae"], runs["target"], place, packaged / "emoji", runs["drafter"], runs["preview"], usual, note=note))
