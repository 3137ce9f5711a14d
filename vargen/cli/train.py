"""`vargen train`: networks that users train for their own model. `recipes/` has scripts that train models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli import common, inputs
from vargen.cli.console import import_libraries, print_json, print_status
from vargen.device import select_device, set_threads

app = typer.Typer(help="Train drafters, and routers of video drafts, for your own model.", no_args_is_help=True)
HEADS = "Draft heads"
head_option = partial(typer.Option, rich_help_panel=HEADS)
Run = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="For log, checkpoint and weights. A run in it is resumed. Default: runs/KIND."),
]


@app.command("drafter", cls=common.Verb)
def train_drafter(
    ctx: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="low-res: a small model for mulo; upsampler: its upsampler; eagle, medusa: heads."),
    ],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model to draft for, packaged or a folder.")] = "emoji",
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings in TOML. Default: those of the packaged drafter.")
    ] = None,
    output: Run = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Training steps. Default: the recipe's.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of images.npy and captions.jsonl. Heads use the captions.")
    ] = None,
    prompt_file: Annotated[
        Path | None, head_option(metavar="FILE", help="Instead of --data: one prompt per line, for a model that reads text.")
    ] = None,
    features: Annotated[
        Path | None,
        head_option(metavar="FILE", help="Instead, for a model without text encoder: .npz of embeds [n, P, C], mask [n, P]."),
    ] = None,
    generated_images: Annotated[
        Path | None, head_option(metavar="DIR", help="Generated images, which several heads can share. Default: in --output.")
    ] = None,
    num_images: Annotated[
        int | None, head_option(min=2, metavar="N", help="Images to generate and train on. Default: the recipe's.")
    ] = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Train draft heads, a low-resolution model, or its up-sampler."""
    if kind in ("low-res", "upsampler"):
        common.reject(ctx, "is for draft heads", HEADS)
        if data is None:
            raise ValueError("data must be a folder of images.npy and captions.jsonl: give --data")
    import_libraries()
    set_threads(threads)
    from vargen.pipelines.llamagen import LlamaGenPipeline
    from vargen.training.dataset import load_captioned_images
    from vargen.training.generated_images import select_prompt_source
    from vargen.training.heads import HeadConfig, load_target, train_head
    from vargen.training.loop import load_config
    from vargen.training.low_resolution import GeneratorConfig, UpsamplerConfig, train_generator, train_upsampler

    place, heads = select_device(device), [*LlamaGenPipeline.family.drafters]
    if kind not in (kinds := ["low-res", "upsampler", *heads]):
        raise ValueError(f"KIND must be one of {', '.join(kinds)}, got {kind!r}")
    settings = {"low-res": GeneratorConfig, "upsampler": UpsamplerConfig}.get(kind, HeadConfig)
    config: Any = load_config(recipe or kind, settings, steps)
    run = output or Path("runs") / kind
    if kind in heads:
        config, pipe = config.with_images(num_images), load_target(model, place)
        captions = None if data is None else lambda: load_captioned_images(data)
        source = select_prompt_source(pipe, config.num_images, captions, prompt_file, features)
        metrics, trained = train_head(kind, config, pipe, source, run, generated_images), run / "drafter"
        print_json({"drafter": str(trained), **metrics})
    elif data is not None:
        folder, images = _model_folder(model), load_captioned_images(data)
        if kind == "upsampler":
            metrics, trained = train_upsampler(config, images, folder / "vqvae", run, place), run / "upsampler"
        else:
            metrics = train_generator(config, images, folder / "vqvae", folder, run, place)
            trained = run / "transformer"
        print_json({"model": str(trained), **metrics})
    print_status(f"wrote {trained}; next: pipe.load_drafter, see docs/training.md")


def _model_folder(model: str) -> Path:
    """Return the folder of a text-conditional LlamaGen, which has its image tokenizer and text encoder."""
    from vargen.pipelines.llamagen import LLAMAGEN
    from vargen.pipelines.loading import read_model_folder

    folder = read_model_folder(model, LLAMAGEN).path
    for part in ("vqvae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"model {model!r} must have a {part}, which a low-resolution drafter shares")
    return folder


@app.command("router", cls=common.Verb)
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
    import_libraries()
    set_threads(threads)
    from vargen.pipelines.causal_video import CAUSAL_VIDEO
    from vargen.pipelines.loading import open_pipeline, read_model_folder
    from vargen.training.router import RouterConfig, train_router

    config, prompts = RouterConfig(blocks, tuple(seed or (0,)), exit_step), inputs.read_prompts(prompt_file)
    run, place = output or Path("runs/router"), select_device(device)
    pipe = open_pipeline(read_model_folder(model, CAUSAL_VIDEO).path).to(place)
    print_json({"router": str(run / "router"), **train_router(config, pipe, prompts, run)})
    print_status(f"wrote {run / 'router'}; next: pipe.load_drafter, see docs/training.md")
