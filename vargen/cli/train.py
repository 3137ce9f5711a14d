"""`vargen train`: the data set, the tokenizer, the generator, and the folder that joins them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import Device, Guidance, Temperature, TopK, TopP, check_range, given_options, pick_device
from vargen.device import fix_threads
from vargen.files import expanded, whole_files

if TYPE_CHECKING:
    from vargen.training.emoji import EmojiDataset

app = typer.Typer(help="Train the small models that vargen ships.", no_args_is_help=True)

R = TypeVar("R")
_CONFIG = typer.Option(metavar="FILE|NAME", help="A recipe in TOML, or a packaged one by name.")
_DATA = typer.Option(metavar="DIR", help="Data set. Default: where `vargen train data` puts it.")
_RUN = typer.Option(metavar="DIR", help="The run: log, curves, checkpoint, model. A run found there is resumed.")
_DEVICE = typer.Option(help="auto takes a GPU where there is one.")
_THREADS = typer.Option(metavar="N", help="CPU threads. Default: torch's.")
_STEPS = typer.Option(metavar="N", help="Length of the run, instead of the recipe's.")


@app.command()
def data(
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: a folder of the user's cache.")] = None,
    size: Annotated[int, typer.Option(metavar="N", help="Side of the pictures in pixels.")] = 128,
) -> None:
    """Build the emoji data set: fetch the pinned packages, check their sums, draw every emoji."""
    from vargen.files import cache_folder
    from vargen.training.emoji import build_emoji_dataset

    output = output and expanded(output, "output")
    built = build_emoji_dataset(output, size=size)
    folder = output or cache_folder() / f"emoji-{size}"
    splits = {split: len(built.indices(split)) for split in ("train", "validation")}
    print_json({"folder": str(folder), "pictures": len(built.records), **splits, "report": built.report})


@app.command()
def tokenizer(
    config: Annotated[str, _CONFIG] = "emoji-tokenizer",
    data: Annotated[Path | None, _DATA] = None,
    output: Annotated[Path, _RUN] = Path("runs/tokenizer"),
    steps: Annotated[int | None, _STEPS] = None,
    device: Annotated[Device, _DEVICE] = Device.auto,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Train the image tokenizer; print its held-out figures."""
    quiet_libraries()
    from vargen.training.recipe import TokenizerRecipe
    from vargen.training.tokenizer import train_tokenizer

    output = expanded(output, "output")
    recipe = _recipe(config, TokenizerRecipe, steps)
    pictures, place = _open_data(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "vqvae"), **train_tokenizer(recipe, pictures, output, place)})


@app.command("var-tokenizer")
def var_tokenizer(
    config: Annotated[str, _CONFIG] = "emoji-var-tokenizer",
    data: Annotated[Path | None, _DATA] = None,
    output: Annotated[Path, _RUN] = Path("runs/var-tokenizer"),
    steps: Annotated[int | None, _STEPS] = None,
    device: Annotated[Device, _DEVICE] = Device.auto,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Train the multi-scale image tokenizer of a next-scale model; print its held-out figures."""
    quiet_libraries()
    from vargen.training.multi_scale_recipe import MultiScaleTokenizerRecipe
    from vargen.training.multi_scale_tokenizer import train_multi_scale_tokenizer

    output = expanded(output, "output")
    recipe = _recipe(config, MultiScaleTokenizerRecipe, steps)
    pictures, place = _open_data(data), pick_device(device)
    fix_threads(threads)
    print_json({"model": str(output / "vqvae"), **train_multi_scale_tokenizer(recipe, pictures, output, place)})


@app.command()
def generator(
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A tokenizer's run, or a saved image tokenizer.")],
    config: Annotated[str, _CONFIG] = "emoji-generator",
    data: Annotated[Path | None, _DATA] = None,
    init: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Start from these weights: a generator's run, or a saved transformer.")
    ] = None,
    text_encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/ and tokenizer/. Default: the packaged one.")
    ] = None,
    output: Annotated[Path, _RUN] = Path("runs/generator"),
    steps: Annotated[int | None, _STEPS] = None,
    device: Annotated[Device, _DEVICE] = Device.auto,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Train the transformer on an image tokenizer's tokens; print its held-out figures."""
    quiet_libraries()
    from vargen.training.generator import train_generator
    from vargen.training.recipe import GeneratorRecipe

    output, tokenizer = expanded(output, "output"), expanded(tokenizer, "tokenizer")
    recipe = _recipe(config, GeneratorRecipe, steps)
    encoder = _text_encoder(text_encoder)
    codes = _saved(tokenizer, "vqvae", "tokenizer")
    start = _saved(expanded(init, "init"), "transformer", "init") if init else None
    pictures, place = _open_data(data), pick_device(device)
    fix_threads(threads)
    figures = train_generator(recipe, pictures, codes, encoder, output, place, start)
    print_json({"model": str(output / "transformer"), **figures})


@app.command()
def var(
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A multi-scale tokenizer's run, or a saved one.")],
    config: Annotated[str, _CONFIG] = "emoji-var",
    data: Annotated[Path | None, _DATA] = None,
    teacher: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A run, or a saved model, that a small one imitates.")
    ] = None,
    text_encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/ and tokenizer/. Default: the packaged one.")
    ] = None,
    output: Annotated[Path, _RUN] = Path("runs/var"),
    steps: Annotated[int | None, _STEPS] = None,
    device: Annotated[Device, _DEVICE] = Device.auto,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Train the next-scale transformer on a multi-scale tokenizer's codes; print its held-out figures."""
    quiet_libraries()
    from vargen.training.var import train_var
    from vargen.training.var_recipe import VARRecipe

    output, tokenizer = expanded(output, "output"), expanded(tokenizer, "tokenizer")
    recipe = _recipe(config, VARRecipe, steps)
    encoder = _text_encoder(text_encoder)
    codes = _saved(tokenizer, "vqvae", "tokenizer")
    guide = _saved(expanded(teacher, "teacher"), "transformer", "teacher") if teacher else None
    pictures, place = _open_data(data), pick_device(device)
    fix_threads(threads)
    figures = train_var(recipe, pictures, codes, encoder, output, place, guide)
    print_json({"model": str(output / "transformer"), **figures})


def _text_encoder(folder: Path | None) -> Path:
    """The folder of a text encoder and its tokenizer, checked; the packaged one by default."""
    import vargen.assets

    encoder = expanded(folder, "text_encoder") if folder else Path(vargen.assets.__file__).parent / "emoji"
    for part in (encoder / "text_encoder", encoder / "tokenizer"):
        if not part.is_dir():
            raise FileNotFoundError(f"text_encoder folder {str(encoder)!r} must hold text_encoder/ and tokenizer/")
    return encoder


@app.command()
def scorer(
    config: Annotated[str, _CONFIG] = "emoji-scorer",
    data: Annotated[Path | None, _DATA] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/, tokenizer/ and vqvae/.")] = None,
    output: Annotated[Path, _RUN] = Path("runs/scorer"),
    steps: Annotated[int | None, _STEPS] = None,
    device: Annotated[Device, _DEVICE] = Device.auto,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Train the scorer that tells how well a picture fits a caption; print its held-out figures."""
    quiet_libraries()
    import vargen.assets
    from vargen.training.recipe import ScorerRecipe
    from vargen.training.scorer import train_scorer

    output = expanded(output, "output")
    recipe = _recipe(config, ScorerRecipe, steps)
    parts = expanded(model, "model") if model else Path(vargen.assets.__file__).parent / "emoji"
    for part in (parts / "text_encoder", parts / "tokenizer", parts / "vqvae"):
        if not part.is_dir():
            raise FileNotFoundError(f"model folder {str(parts)!r} must hold text_encoder/, tokenizer/ and vqvae/")
    pictures, place = _open_data(data), pick_device(device)
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
    data: Annotated[Path | None, _DATA] = None,
    drawn: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Drawn pictures, which kinds may share. Default: in the run's folder.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The run, as above. Default: runs/KIND.")] = None,
    pictures: Annotated[int | None, typer.Option(metavar="N", help="Drawn pictures, instead of the recipe's.")] = None,
    steps: Annotated[int | None, _STEPS] = None,
    device: Annotated[Device, _DEVICE] = Device.auto,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Train a drafter on a LlamaGen's features and on pictures that it draws; print its held-out figures."""
    quiet_libraries()
    from dataclasses import replace

    import torch

    from vargen.pipelines.registry import describe, open_pipeline
    from vargen.training.drafter import train_drafter
    from vargen.training.drafter_data import subjects_of
    from vargen.training.drafter_recipe import DrafterRecipe

    output = expanded(output, "output") if output else Path("runs") / kind.value
    recipe = _recipe(config or kind.value, DrafterRecipe, steps)
    check_range(pictures, "pictures", 2)
    if pictures is not None:
        recipe = replace(recipe, pictures=pictures, held_out=min(recipe.held_out, max(1, pictures // 10)))
    if describe(model).pipeline != "LlamaGenPipeline":
        raise ValueError(f"model must be a LlamaGen, whose features drafters take, got {model!r}")
    fix_threads(threads)
    pipe = open_pipeline(model, torch_dtype=torch.float32).to(pick_device(device))
    given = {"prompts": prompts, "features": features}
    files = {name: path and expanded(path, name) for name, path in given.items()}
    subjects = subjects_of(pipe, recipe.pictures, lambda: _open_data(data), **files)
    place = drawn and expanded(drawn, "drawn")
    print_json({"drafter": str(output / "drafter"), **train_drafter(kind.value, recipe, pipe, subjects, output, place)})


@app.command("package-drafter")
def package_drafter(
    run: Annotated[Path, typer.Option(metavar="DIR", help="A finished drafter run.")],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model that it becomes a part of.")] = "emoji",
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the card.")] = "",
) -> None:
    """Write a finished drafter in float16 into the folder of its model, with a card; print its figures."""
    quiet_libraries()
    from vargen.training.package_drafter import package_drafter as join

    print_json(join(expanded(run, "run"), model, note))


@app.command("package-scorer")
def package_scorer(
    run: Annotated[Path, typer.Option(metavar="DIR", help="A finished scorer run.")] = Path("runs/scorer"),
    data: Annotated[Path | None, _DATA] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/, tokenizer/ and vqvae/.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the packaged scorer, which is replaced.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Write a finished scorer in float16, with fixed captions and a card that says what it can tell; print its figures."""
    quiet_libraries()
    import vargen.assets
    from vargen.training.package_scorer import package_scorer as join

    packaged = Path(vargen.assets.__file__).parent
    parts = expanded(model, "model") if model else packaged / "emoji"
    folder = expanded(output, "output") if output else packaged / "emoji-scorer"
    print_json({"scorer": str(folder), **join(expanded(run, "run"), parts, _open_data(data), folder, note)})


@app.command()
def package_var(
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A run of var-tokenizer.")] = Path("runs/var-tokenizer"),
    run: Annotated[Path, typer.Option(metavar="DIR", help="A finished run of var.")] = Path("runs/var"),
    small: Annotated[Path | None, typer.Option(metavar="DIR", help="A finished run of a small model, for late scales.")] = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the packaged model, which is replaced.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Join finished next-scale runs to a model folder in int8, with a card that says how far training got."""
    quiet_libraries()
    import vargen.assets
    from vargen.pipelines import checks
    from vargen.training.package_var import package_var as join

    given = given_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    checks.check_sampling(given)
    packaged = Path(vargen.assets.__file__).parent
    place = expanded(output, "output") if output else packaged / "emoji-var"
    chosen = small and expanded(small, "small")
    print(join(expanded(tokenizer, "tokenizer"), expanded(run, "run"), place, packaged / "emoji", chosen, given, note))


def _recipe(config: str, kind: type[R], steps: int | None) -> R:
    from vargen.training.recipe import load_recipe

    check_range(steps, "steps", 1)
    return load_recipe(expanded(config, "config"), kind, steps)


def _open_data(folder: Path | None) -> EmojiDataset:
    from vargen.files import cache_folder
    from vargen.training.emoji import load_emoji_dataset

    return load_emoji_dataset(expanded(folder, "data") if folder else cache_folder() / "emoji-128")


def _saved(folder: Path, part: str, name: str) -> Path:
    """The saved network in a run's folder, or the folder itself if it is one."""
    for place in (folder / part, folder):
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(f"{name} must be a run's folder with {part}/, or a saved model, got {str(folder)!r}")


_MODEL = typer.Option(metavar="NAME|DIR", help="A packaged model or a folder.")
_TRANSFORMER = typer.Option(metavar="DIR", help="In the place of the model's own: a generator's run, or a saved transformer.")
_GUIDANCE = typer.Option(metavar="S", help="Guidance scale. Default: the model's.")
_TEMPERATURE = typer.Option(metavar="T", help="Default: the model's.")


@app.command()
def recall(
    model: Annotated[str, _MODEL] = "emoji",
    transformer: Annotated[Path | None, _TRANSFORMER] = None,
    num: Annotated[int | None, typer.Option(metavar="N", help="Draw about so many pictures. Default: 448.")] = None,
    guidance: Annotated[float | None, _GUIDANCE] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first picture.")] = 0,
    data: Annotated[Path | None, _DATA] = None,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Draw captions of the data and let the packaged scorer look for each among 1,000; print how often it finds them."""
    quiet_libraries()
    from vargen.scoring.packaged import PackagedScorer
    from vargen.training.focus import Focus
    from vargen.training.recall import Recall, pipeline_draw

    check_range(num, "num", 1)
    pipe = _opened(model, transformer)
    settings = _settings(guidance, temperature)
    judge = Recall(_open_data(data), Focus(), PackagedScorer())
    fix_threads(threads)
    figures = judge(pipeline_draw(pipe, **settings), num, seed)
    print_json({"model": str(transformer or model), **settings, **figures})


@app.command()
def sheet(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The PNG. Its key lies beside it, as JSON.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Repeatable. Default: the packaged sheet.txt and everyday.txt.")
    ] = None,
    model: Annotated[str, _MODEL] = "emoji",
    transformer: Annotated[Path | None, _TRANSFORMER] = None,
    guidance: Annotated[float | None, _GUIDANCE] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first picture.")] = 0,
    threads: Annotated[int | None, _THREADS] = None,
) -> None:
    """Draw prompts for a viewer who has to name them: numbers in the place of prompts, in another order."""
    quiet_libraries()
    import vargen.assets
    from vargen.cli.subjects import read_prompts
    from vargen.evaluation.sheet import blind_sheet
    from vargen.training.recall import pipeline_draw

    target = expanded(output, "output")
    packaged = Path(vargen.assets.__file__).parent
    files = [expanded(file, "prompts") for file in prompts or (packaged / "sheet.txt", packaged / "everyday.txt")]
    texts = [text for file in files for text in read_prompts(file)]
    pipe = _opened(model, transformer)
    fix_threads(threads)
    key = blind_sheet(texts, pipeline_draw(pipe, **_settings(guidance, temperature)), target, seed)
    print_json({"sheet": str(target), "key": str(key), "pictures": len(texts)})


def _opened(model: str, transformer: Path | None) -> Any:
    from vargen.training.recall import open_pipeline

    place = _saved(expanded(transformer, "transformer"), "transformer", "transformer") if transformer else None
    return open_pipeline(model, place)


def _settings(guidance: float | None, temperature: float | None) -> dict[str, float]:
    given = {"guidance_scale": guidance, "temperature": temperature}
    return {name: value for name, value in given.items() if value is not None}


@app.command()
def package(
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A finished tokenizer run.")] = Path("runs/tokenizer"),
    generator: Annotated[Path, typer.Option(metavar="DIR", help="A finished generator run.")] = Path("runs/generator"),
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A finished run of a smaller generator, for speculative decoding.")
    ] = None,
    text_encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/ and tokenizer/. Default: the packaged one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the packaged model, which is replaced.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Join finished runs to a model folder in float16, with a card that says how far training got."""
    quiet_libraries()
    import vargen.assets
    from vargen.training.package import package as join

    packaged = Path(vargen.assets.__file__).parent / "emoji"
    folder = join(
        expanded(tokenizer, "tokenizer"),
        expanded(generator, "generator"),
        expanded(text_encoder or packaged, "text_encoder"),
        expanded(output or packaged, "output"),
        note=note,
        drafter_run=drafter and expanded(drafter, "drafter"),
    )
    print(folder)


@app.command()
def examples(
    model: Annotated[Path, typer.Option(metavar="DIR", help="The model folder that gets examples.safetensors.")],
    data: Annotated[Path | None, _DATA] = None,
    generator: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A generator's run: what it has tokenized is not done again.")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", help="Training pictures, at random.")] = 2000,
    device: Annotated[Device, _DEVICE] = Device.auto,
) -> None:
    """Put tokens of training pictures beside a model, for the preset lookup. Two bytes a token."""
    quiet_libraries()
    check_range(count, "count", 1)
    folder = expanded(model, "model")
    if not (folder / "vqvae" / "config.json").is_file():
        raise FileNotFoundError(f"model must be a model folder with a vqvae, got {str(folder)!r}")

    from vargen.cli.evaluation_options import bar
    from vargen.models.vq import VQModel
    from vargen.pipelines.examples import write_examples
    from vargen.training.examples import choose_examples, kept_tokens

    pictures = _open_data(data)
    vqvae = VQModel.from_pretrained(folder / "vqvae", use_safetensors=True).to(pick_device(device)).eval()
    kept = None if generator is None else kept_tokens(expanded(generator, "generator"), vqvae, len(pictures.images))
    with bar("tokens") as progress:
        tokens = choose_examples(vqvae, pictures, count, kept, progress=progress)
    with whole_files(folder) as staged:
        write_examples(tokens, staged)
    print_json({"folder": str(folder), "pictures": len(tokens), "tokens": tokens.numel()})
