"""Commands that evaluate generated images, by the scorer or by raters; and one that adds lookup examples to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import vargen.assets
from recipes.emoji.dataset import load_emoji_dataset
from recipes.emoji.evaluation import CaptionRecall, load_pipeline, make_generate_fn
from recipes.emoji.lookup_examples import choose_examples, load_cached_tokens
from recipes.registry import output_folder, resolve_network_folder
from vargen.cli.console import print_json, progress_bar
from vargen.cli.inputs import read_prompts
from vargen.cli.options import Device, require_device, validate_range
from vargen.device import set_threads
from vargen.evaluation.contact_sheets import numbered_sheet
from vargen.files import atomic_merge, expand_user
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.loading import save_example_tokens
from vargen.scoring.image_text import ImageTextScorer
from vargen.training.augment import SamplingWeights

Model = Annotated[str, typer.Option(metavar="NAME|DIR", help="A packaged model or a folder.")]
Transformer = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Replaces the model's own: a generator's run, or a saved transformer.")
]
Guidance = Annotated[float | None, typer.Option(metavar="S", help="Guidance scale. Default: the model's.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="Default: the model's.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the first image.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the output of `python -m recipes emoji-data`.")]


def recall(
    model: Model = "emoji",
    transformer: Transformer = None,
    num_images: Annotated[int | None, typer.Option(metavar="N", help="Approximate number of images. Default: 448.")] = None,
    guidance: Guidance = None,
    temperature: Temperature = None,
    seed: Seed = 0,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Generate images from captions of the data; print how often the packaged scorer ranks the caption first among 1,000."""
    validate_range(num_images, "num_images", 1)
    pipe = _load_pipeline(model, transformer)
    settings = _settings(guidance, temperature)
    measure = CaptionRecall(_load_data(data), SamplingWeights(), ImageTextScorer())
    set_threads(threads)
    metrics = measure(make_generate_fn(pipe, **settings), num_images, seed)
    print_json({"model": str(transformer or model), **settings, **metrics})


def sheet(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The PNG. The answers are written next to it, as JSON.")
    ],
    prompt_file: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Repeatable. Default: the packaged sheet.txt and everyday.txt.")
    ] = None,
    model: Model = "emoji",
    transformer: Transformer = None,
    guidance: Guidance = None,
    temperature: Temperature = None,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Generate a sheet of numbered images in random order, whose prompts a rater has to guess."""
    target = expand_user(output, "output")
    packaged = Path(vargen.assets.__file__).parent
    files = [expand_user(file, "prompt_file") for file in prompt_file or (packaged / "sheet.txt", packaged / "everyday.txt")]
    texts = [text for file in files for text in read_prompts(file)]
    pipe = _load_pipeline(model, transformer)
    set_threads(threads)
    key = numbered_sheet(texts, make_generate_fn(pipe, **_settings(guidance, temperature)), target, seed)
    print_json({"sheet": str(target), "key": str(key), "images": len(texts)})


def lookup_examples(
    model: Annotated[Path, typer.Option(metavar="DIR", help="The model folder that receives examples.safetensors.")],
    data: Data = None,
    generator: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A generator's run whose cached tokens are used.")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", help="Training images, at random.")] = 2000,
    device: Annotated[Device, typer.Option(help="auto takes a GPU where there is one.")] = Device.auto,
) -> None:
    """Write tokens of training images into a model's folder, for the preset lookup; two bytes per token."""
    validate_range(count, "count", 1)
    folder = expand_user(model, "model")
    if not (folder / "vqvae" / "config.json").is_file():
        raise FileNotFoundError(f"model must be a model folder with a vqvae, got {str(folder)!r}")
    images = _load_data(data)
    vqvae = VQModel.from_pretrained(folder / "vqvae", use_safetensors=True).to(require_device(device)).eval()
    cached = None if generator is None else load_cached_tokens(expand_user(generator, "generator"), vqvae, len(images.images))
    with progress_bar("tokens", "images") as progress:
        tokens = choose_examples(vqvae, images, count, cached, progress=progress)
    with atomic_merge(folder) as staged:
        save_example_tokens(tokens, staged)
    print_json({"folder": str(folder), "images": len(tokens), "tokens": tokens.numel()})


def _load_data(folder: Path | None) -> Any:
    return load_emoji_dataset(expand_user(folder, "data") if folder else output_folder("emoji-data"))


def _load_pipeline(model: str, transformer: Path | None) -> Any:
    folder = transformer and resolve_network_folder(expand_user(transformer, "transformer"), "transformer", "transformer")
    return load_pipeline(model, folder)


def _settings(guidance: float | None, temperature: float | None) -> dict[str, float]:
    settings = {"guidance_scale": guidance, "temperature": temperature}
    return {name: value for name, value in settings.items() if value is not None}
