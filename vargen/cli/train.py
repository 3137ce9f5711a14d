"""`vargen train`: networks that users train for their own model. `recipes/` has scripts that train models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli import common
from vargen.cli.console import Verb, import_libraries, print_json, print_status
from vargen.device import select_device, set_threads
from vargen.files import expand_user

app = typer.Typer(help="Train drafters, and routers of video drafts, for your own model.", no_args_is_help=True)
data_option = partial(typer.Option, rich_help_panel="What to train on")
Run = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="For log, checkpoint and weights. A run in it is resumed. Default: runs/KIND."),
]
_OF_HEADS = ("prompt_file", "features", "generated_images")


@app.command("drafter", cls=Verb)
def train_drafter(
    ctx: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="low-res: a small model for mulo; upsampler: its upsampler; eagle, medusa: heads."),
    ],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model to draft for, packaged or a folder.")] = "emoji",
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings in TOML. Default: those of the packaged drafter.")
    ] = None,
    output: Run = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Training steps. Default: the recipe's.")] = None,
    data: Annotated[
        Path | None, data_option(metavar="DIR", help="Folder of images.npy and captions.jsonl. Heads use the captions.")
    ] = None,
    prompt_file: Annotated[
        Path | None, data_option(metavar="FILE", help="For heads: one prompt per line, for a model that reads text.")
    ] = None,
    features: Annotated[
        Path | None,
        data_option(metavar="FILE", help="For heads of a model without text encoder: .npz of embeds [n, P, C], mask [n, P]."),
    ] = None,
    generated_images: Annotated[
        Path | None, data_option(metavar="DIR", help="Generated images, which several heads can share. Default: in --output.")
    ] = None,
    num_images: Annotated[
        int | None, data_option(min=2, metavar="N", help="For heads: images to generate and train on. Default: the recipe's.")
    ] = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Train draft heads, a low-resolution model, or its up-sampler."""
    common.check_names(model)
    import_libraries()
    set_threads(threads)

    from vargen.pipelines.llamagen import LlamaGenPipeline
    from vargen.training.config import load_config
    from vargen.training.dataset import load_captioned_images
    from vargen.training.generated_images import select_prompt_source
    from vargen.training.generator import GeneratorConfig, train_generator
    from vargen.training.heads import HeadConfig, load_target, train_head
    from vargen.training.upsampler import UpsamplerConfig, train_upsampler

    heads = [*LlamaGenPipeline.family.drafters]
    if kind not in (kinds := ["low-res", "upsampler", *heads]):
        raise ValueError(f"KIND must be one of {', '.join(kinds)}, got {kind!r}")
    trained = {"low-res": GeneratorConfig, "upsampler": UpsamplerConfig}.get(kind, HeadConfig)
    config: Any = load_config(expand_user(recipe, "recipe") if recipe else kind, trained, steps)
    run = expand_user(output, "output") if output else Path("runs") / kind
    folder = None if data is None else expand_user(data, "data")
    files = {name: expand_user(path, name) for name, path in common.chosen(ctx, *_OF_HEADS).items()}
    if kind in heads:
        config, pipe = config.with_images(num_images), load_target(model, select_device(device))
        captions = None if folder is None else lambda: load_captioned_images(folder)
        source = select_prompt_source(pipe, config.num_images, captions, files.get("prompt_file"), files.get("features"))
        metrics = train_head(kind, config, pipe, source, run, files.get("generated_images"))
        print_json({"drafter": str(run / "drafter"), **metrics})
        print_status(f'next: pipe.load_drafter("{run}/drafter")')
        return
    common.reject(ctx, "is for draft heads", "num_images", *_OF_HEADS)
    if folder is None:
        raise ValueError("data must be a folder of images.npy and captions.jsonl: give --data")
    tokenizer, images = _model_folder(model) / "vqvae", load_captioned_images(folder)
    place = select_device(device)
    if kind == "upsampler":
        metrics, trained_folder = train_upsampler(config, images, tokenizer, run, place), run / "upsampler"
    else:
        metrics = train_generator(config, images, tokenizer, tokenizer.parent, run, place)
        trained_folder = run / "transformer"
    print_json({"model": str(trained_folder), **metrics})
    print_status('next: pipe.load_drafter("runs/low-res", "runs/upsampler"), with both folders')


def _model_folder(model: str) -> Path:
    """Return the folder of a text-conditional LlamaGen, which has its image tokenizer and text encoder."""
    from vargen.pipelines.llamagen import LLAMAGEN
    from vargen.pipelines.loading import read_model_folder

    folder = read_model_folder(model, LLAMAGEN).path
    for part in ("vqvae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"model {model!r} must have a {part}, which a low-resolution drafter shares")
    return folder


@app.command("router", cls=Verb)
def train_router(
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="One prompt per line; a hundred are enough.")],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The video model, packaged or a folder.")] = "emoji-video",
    output: Run = None,
    blocks: Annotated[int, typer.Option(metavar="N", help="Length of the videos. Each block more doubles the work.")] = 6,
    exit_step: Annotated[
        int, typer.Option(metavar="N", help="For early-exit: the draft is the large model's estimate after N steps.")
    ] = 0,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Of the first prompt; the next has one more. Repeat for more rounds. Default: 0."),
    ] = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Train the router of sdvg-learned: it predicts which drafts of a video the large model would improve."""
    common.check_names(model)
    import_libraries()
    set_threads(threads)

    from vargen.pipelines.causal_video import CAUSAL_VIDEO
    from vargen.pipelines.loading import open_pipeline, read_model_folder
    from vargen.training.router import RouterConfig, train_router

    config, prompts = RouterConfig(blocks, tuple(seed or (0,)), exit_step), common.read_prompts(prompt_file)
    run, place = expand_user(output or "runs/router", "output"), select_device(device)
    pipe = open_pipeline(read_model_folder(model, CAUSAL_VIDEO).path).to(place)
    print_json({"router": str(run / "router"), **train_router(config, pipe, prompts, run)})
    print_status(f'next: pipe.load_drafter("{run}/router")')
