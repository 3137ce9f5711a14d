"""`vargen train`: networks that users train for their own model. `recipes/` has scripts that train models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import Device, DeviceName, TorchThreads, require_device
from vargen.device import set_threads
from vargen.files import expand_user

if TYPE_CHECKING:
    from vargen.training.dataset import CaptionedImages


class Drafters(TyperGroup):
    """The commands of this file, and one for each registered drafter that is trained on the features of a LlamaGen.

    The registration is imported when such a command or the list of commands is needed.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_registered_drafters(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (command := super().get_command(ctx, cmd_name)) or cmd_name not in _registered_drafters():
            return command
        network = _registered_drafters()[cmd_name].network_class
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(cmd_name, help=f"Train a {network.__name__} on a LlamaGen's features.")(_train_head(cmd_name))
        return typer.main.get_command(single)


def _registered_drafters() -> dict[str, Any]:
    quiet_libraries()
    from vargen.pipelines.llamagen import LlamaGenPipeline

    return LlamaGenPipeline.family.drafters


app = typer.Typer(help="Train drafters, and routers of video drafts, for your own model.", no_args_is_help=True)
drafter = typer.Typer(cls=Drafters, help="Train draft heads, a low-resolution model, or its up-sampler.", no_args_is_help=True)
app.add_typer(drafter, name="drafter")

R = TypeVar("R")
Recipe = Annotated[str | None, typer.Option(metavar="FILE", help="Settings in TOML. Default: those of the packaged drafter.")]
Data = Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.npy and captions.jsonl.")]
Run = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="For log, checkpoint and weights. An unfinished run in it is resumed. Default: runs/KIND."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help="Training steps. Default: the recipe's.")]
Model = Annotated[str, typer.Option(metavar="NAME|DIR", help="The model to draft for, packaged or a folder.")]


def _config(recipe: str | None, name: str, kind: type[R], steps: int | None) -> R:
    from vargen.training.config import load_config

    return load_config(expand_user(recipe, "recipe") if recipe else name, kind, steps)


def _load_data(folder: Path) -> CaptionedImages:
    from vargen.training.dataset import load_captioned_images

    return load_captioned_images(expand_user(folder, "data"))


def _output(output: Path | None, name: str) -> Path:
    return expand_user(output, "output") if output else Path("runs") / name


def _train_head(kind: str) -> Callable[..., None]:
    def train(
        model: Model = "emoji",
        recipe: Recipe = None,
        prompt_file: Annotated[
            Path | None, typer.Option(metavar="FILE", help="One prompt per line, for a model that reads text.")
        ] = None,
        data: Annotated[
            Path | None, typer.Option(metavar="DIR", help="Instead: folder of images.npy and captions.jsonl with the prompts.")
        ] = None,
        features: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help="Instead, for a model without text encoder: .npz of embeds [n, P, C] and mask [n, P]."
            ),
        ] = None,
        generated_images: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR", help="Folder of generated images, which several heads can share. Default: in --output."
            ),
        ] = None,
        output: Run = None,
        num_images: Annotated[
            int | None, typer.Option(min=2, metavar="N", help="Images to generate and train on. Default: the recipe's.")
        ] = None,
        steps: Steps = None,
        device: DeviceName = Device.auto,
        threads: TorchThreads = None,
    ) -> None:
        quiet_libraries()
        from vargen.training.generated_images import select_prompt_source
        from vargen.training.heads import HeadConfig, load_target, train_head

        run = _output(output, kind)
        config = _config(recipe, kind, HeadConfig, steps).with_images(num_images)
        prompts = prompt_file and expand_user(prompt_file, "prompt_file")
        embeddings = features and expand_user(features, "features")
        shared = generated_images and expand_user(generated_images, "generated_images")
        set_threads(threads)
        pipe = load_target(model, require_device(device))
        captions = None if data is None else lambda: _load_data(data)
        source = select_prompt_source(pipe, config.num_images, captions, prompts, embeddings)
        print_json({"drafter": str(run / "drafter"), **train_head(kind, config, pipe, source, run, shared)})

    return train


@drafter.command("low-res")
def low_res(
    data: Data,
    model: Model = "emoji",
    recipe: Recipe = None,
    output: Run = None,
    steps: Steps = None,
    device: DeviceName = Device.auto,
    threads: TorchThreads = None,
) -> None:
    """Train a small transformer on low-resolution images."""
    quiet_libraries()
    from vargen.training.generator import GeneratorConfig, train_generator

    config = _config(recipe, "low-res", GeneratorConfig, steps)
    run, folder = _output(output, "low-res"), _model_folder(model)
    images, place = _load_data(data), require_device(device)
    set_threads(threads)
    metrics = train_generator(config, images, folder / "vqvae", folder, run, place)
    print_json({"model": str(run / "transformer"), **metrics})


@drafter.command()
def upsampler(
    data: Data,
    model: Model = "emoji",
    recipe: Recipe = None,
    output: Run = None,
    steps: Steps = None,
    device: DeviceName = Device.auto,
    threads: TorchThreads = None,
) -> None:
    """Train an up-sampler from low-resolution images to tokens."""
    quiet_libraries()
    from vargen.training.upsampler import UpsamplerConfig, train_upsampler

    config = _config(recipe, "upsampler", UpsamplerConfig, steps)
    run, folder = _output(output, "upsampler"), _model_folder(model)
    images, place = _load_data(data), require_device(device)
    set_threads(threads)
    print_json({"model": str(run / "upsampler"), **train_upsampler(config, images, folder / "vqvae", run, place)})


@app.command()
def router(
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="One prompt per line; a hundred are enough.")],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The video model, packaged or a folder.")] = "emoji-video",
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For pairs and weights. An unfinished run in it is resumed. Default: runs/router."),
    ] = None,
    blocks: Annotated[int, typer.Option(metavar="N", help="Length of the videos. Each block more doubles the work.")] = 6,
    exit_step: Annotated[
        int, typer.Option(metavar="N", help="For early-exit: the draft is the large model's estimate after N steps.")
    ] = 0,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Seed of the first prompt; the next has one more. Repeat for further rounds. Default: 0."
        ),
    ] = None,
    device: DeviceName = Device.auto,
    threads: TorchThreads = None,
) -> None:
    """Train the router of sdvg-learned: it predicts which drafts of a video the large model would improve."""
    quiet_libraries()
    from vargen.cli.inputs import read_prompts
    from vargen.pipelines.causal_video import CAUSAL_VIDEO
    from vargen.pipelines.loading import open_pipeline, read_model_folder
    from vargen.training.router import RouterConfig, train_router

    config = RouterConfig(blocks, tuple(seed or (0,)), exit_step)
    run, prompts = _output(output, "router"), read_prompts(prompt_file)
    place = require_device(device)
    set_threads(threads)
    pipe = open_pipeline(str(read_model_folder(model, CAUSAL_VIDEO).path)).to(place)
    print_json({"router": str(run / "router"), **train_router(config, pipe, prompts, run)})


def _model_folder(model: str) -> Path:
    """Return the folder of a text-conditional LlamaGen, which has its image tokenizer and text encoder."""
    from vargen.pipelines.llamagen import LLAMAGEN
    from vargen.pipelines.loading import read_model_folder

    folder = read_model_folder(model, LLAMAGEN).path
    for part in ("vqvae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"model {model!r} must have a {part}, which a low-resolution drafter shares")
    return folder
