"""`vargen train package` and its kin: from finished runs to folders that are packaged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import Device, Guidance, Temperature, TopK, TopP, check_range, given_options, pick_device
from vargen.cli.train_options import Data, TrainingDevice, app, open_data
from vargen.files import expanded, whole_files


@app.command("package-drafter")
def package_drafter(
    run: Annotated[Path, typer.Option(metavar="DIR", help="A finished drafter run.")],
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model that it becomes a part of.")] = "emoji",
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the card.")] = "",
) -> None:
    """Write a finished drafter in float16 into the folder of its model, with a card; print its figures."""
    quiet_libraries()
    from recipes.package_drafter import package_drafter as join

    print_json(join(expanded(run, "run"), model, note))


@app.command("package-low-res")
def package_low_res(
    low_res: Annotated[Path, typer.Option(metavar="DIR", help="A finished run of low-res.")] = Path("runs/low-res"),
    upsampler: Annotated[Path, typer.Option(metavar="DIR", help="A finished run of upsampler.")] = Path("runs/upsampler"),
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model that they become parts of.")] = "emoji",
    note: Annotated[str, typer.Option(metavar="TEXT", help="How they were trained, for their cards.")] = "",
) -> None:
    """Write a finished low-resolution model and its up-sampler in int8 into the folder of their model; print their figures."""
    quiet_libraries()
    from recipes.package_low_res import package_low_res as join

    print_json(join(expanded(low_res, "low_res"), expanded(upsampler, "upsampler"), model, note))


@app.command("package-scorer")
def package_scorer(
    run: Annotated[Path, typer.Option(metavar="DIR", help="A finished scorer run.")] = Path("runs/scorer"),
    data: Data = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/, tokenizer/ and vqvae/.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the packaged scorer, which is replaced.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Write a finished scorer in float16, with fixed captions and a card that says what it can tell; print its figures."""
    quiet_libraries()
    import vargen.assets
    from recipes.package_scorer import package_scorer as join

    packaged = Path(vargen.assets.__file__).parent
    parts = expanded(model, "model") if model else packaged / "emoji"
    folder = expanded(output, "output") if output else packaged / "emoji-scorer"
    print_json({"scorer": str(folder), **join(expanded(run, "run"), parts, open_data(data), folder, note)})


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
    from recipes.package_var import package_var as join
    from vargen.pipelines import checks

    given = given_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    checks.check_sampling(given)
    packaged = Path(vargen.assets.__file__).parent
    place = expanded(output, "output") if output else packaged / "emoji-var"
    chosen = small and expanded(small, "small")
    print(join(expanded(tokenizer, "tokenizer"), expanded(run, "run"), place, packaged / "emoji", chosen, given, note))


@app.command()
def package(
    tokenizer: Annotated[
        Path, typer.Option(metavar="DIR", help="A finished tokenizer run, or a packaged model.")
    ] = Path("runs/tokenizer"),
    generator: Annotated[Path, typer.Option(metavar="DIR", help="A finished generator run.")] = Path("runs/generator"),
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A finished run of a smaller generator, for speculative decoding.")
    ] = None,
    text_encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds text_encoder/ and tokenizer/. Default: the packaged one.")
    ] = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the packaged model, which is replaced.")] = None,
    recall: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `vargen train recall` printed, for the model card.")
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Join finished runs to a model folder in int8 and float16, with a card that says how far training got."""
    quiet_libraries()
    import vargen.assets
    from recipes.package import package as join
    from vargen.pipelines import checks

    given = given_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    checks.check_sampling(given)
    packaged = Path(vargen.assets.__file__).parent / "emoji"
    folder = join(
        expanded(tokenizer, "tokenizer"),
        expanded(generator, "generator"),
        expanded(text_encoder or packaged, "text_encoder"),
        expanded(output or packaged, "output"),
        defaults=given,
        note=note,
        drafter_run=drafter and expanded(drafter, "drafter"),
        recall=recall and expanded(recall, "recall"),
    )
    print(folder)


@app.command()
def examples(
    model: Annotated[Path, typer.Option(metavar="DIR", help="The model folder that gets examples.safetensors.")],
    data: Data = None,
    generator: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A generator's run: what it has tokenized is not done again.")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", help="Training pictures, at random.")] = 2000,
    device: TrainingDevice = Device.auto,
) -> None:
    """Put tokens of training pictures beside a model, for the preset lookup. Two bytes a token."""
    quiet_libraries()
    check_range(count, "count", 1)
    folder = expanded(model, "model")
    if not (folder / "vqvae" / "config.json").is_file():
        raise FileNotFoundError(f"model must be a model folder with a vqvae, got {str(folder)!r}")

    from recipes.emoji.lookup_examples import choose_examples, kept_tokens
    from vargen.cli.evaluation_options import bar
    from vargen.models.vq import VQModel
    from vargen.pipelines.examples import write_examples

    pictures = open_data(data)
    vqvae = VQModel.from_pretrained(folder / "vqvae", use_safetensors=True).to(pick_device(device)).eval()
    kept = None if generator is None else kept_tokens(expanded(generator, "generator"), vqvae, len(pictures.images))
    with bar("tokens") as progress:
        tokens = choose_examples(vqvae, pictures, count, kept, progress=progress)
    with whole_files(folder) as staged:
        write_examples(tokens, staged)
    print_json({"folder": str(folder), "pictures": len(tokens), "tokens": tokens.numel()})
