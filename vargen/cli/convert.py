"""`vargen convert`: convert official checkpoints to folders that `vargen generate --model` loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.console import quiet_libraries
from vargen.cli.options import check_range
from vargen.files import expand_user

app = typer.Typer(help="Convert official checkpoints.", no_args_is_help=True)

_HUB_FOLDER = "Folder as transformers saves it"


class StoredDtype(StrEnum):
    file = "file"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.callback()
def root() -> None:
    """Convert official checkpoints, with one command per model family."""  # keeps the subcommand: typer drops a lone one


@app.command()
def var(
    transformer: Annotated[Path, typer.Option(metavar="FILE", help="VAR's, or CoDe's: .pt, .pth, .bin, .safetensors.")],
    vae: Annotated[Path, typer.Option(metavar="FILE", help="The image tokenizer that they share.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Appears whole or not at all.")],
    id2label: Annotated[Path | None, typer.Option(metavar="FILE", help="Class names in JSON.")] = None,
    dtype: Annotated[StoredDtype, typer.Option(help="How weights are stored; file keeps theirs.")] = StoredDtype.file,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that is a model folder.")] = False,
) -> None:
    """Convert official VAR or CoDe files to a pipeline folder and print its path.

    Files are read as tensors only, never executed.
    """
    quiet_libraries()
    import torch

    from vargen.convert.var import convert_var

    stored = None if dtype is StoredDtype.file else getattr(torch, dtype.value)
    print(convert_var(transformer, vae, output, id2label=id2label, dtype=stored, overwrite=overwrite))


@app.command()
def llamagen(
    transformer: Annotated[Path, typer.Option(metavar="FILE", help="Class or text model: .pt, .pth, .bin, .safetensors.")],
    vq: Annotated[Path, typer.Option(metavar="FILE", help="Its image tokenizer.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Appears whole or not at all.")],
    text_encoder: Annotated[Path | None, typer.Option(metavar="DIR", help=f"{_HUB_FOLDER}: T5, for text models.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="T5's tokenizer. Default: beside it.")] = None,
    id2label: Annotated[Path | None, typer.Option(metavar="FILE", help="Class names in JSON, for class models.")] = None,
    dtype: Annotated[StoredDtype, typer.Option(help="How weights are stored; file keeps theirs.")] = StoredDtype.file,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the output; other files stay.")] = False,
    n_head: Annotated[int | None, typer.Option(metavar="N", help="Heads, for a size outside the official table.")] = None,
    grid_size: Annotated[int | None, typer.Option(metavar="N", help="Side of the token grid, where no file tells.")] = None,
) -> None:
    """Convert official LlamaGen files to a pipeline folder and print its path.

    Files are read as tensors only, never executed.
    """
    check_range(n_head, "n_head", 1)
    check_range(grid_size, "grid_size", 1)
    quiet_libraries()
    import torch

    from vargen.convert.llamagen import convert_llamagen

    folder = convert_llamagen(
        expand_user(transformer, "transformer"),
        expand_user(vq, "vq"),
        expand_user(output, "output"),
        text_encoder=text_encoder and expand_user(text_encoder, "text_encoder"),
        tokenizer=tokenizer and expand_user(tokenizer, "tokenizer"),
        id2label=id2label and expand_user(id2label, "id2label"),
        dtype=None if dtype is StoredDtype.file else getattr(torch, dtype.value),
        overwrite=overwrite,
        n_head=n_head,
        grid_size=grid_size,
    )
    print(folder)


@app.command("causal-video")
def causal_video(
    transformer: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Repeatable, for parts of one model: .pt, .pth, .bin, .safetensors.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Appears whole or not at all.")],
    dtype: Annotated[StoredDtype, typer.Option(help="How weights are stored; file keeps theirs.")] = StoredDtype.file,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that is a model folder.")] = False,
    n_head: Annotated[int | None, typer.Option(metavar="N", help="Heads, where they are not 128 wide.")] = None,
) -> None:
    """Convert a causal video transformer in Wan2.1's layout, such as Self-Forcing's, to a folder and print its path."""
    check_range(n_head, "n_head", 1)
    quiet_libraries()
    import torch

    from vargen.convert.causal_video import convert_causal_video

    stored = None if dtype is StoredDtype.file else getattr(torch, dtype.value)
    files = [expand_user(file, "transformer") for file in transformer]
    print(convert_causal_video(files, expand_user(output, "output"), heads=n_head, dtype=stored, overwrite=overwrite))
