"""`vargen convert`: official checkpoints to folders that `vargen generate --model` loads.

Each registered family with a converter has a command, whose options are the arguments of the converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from vargen.cli.common import Verb
from vargen.cli.console import import_libraries, print_status

_FOLDERS = ("output", "text_encoder", "tokenizer", "wan")  # arguments that take a folder


class Converters(TyperGroup):
    """The commands of the registered families. Their modules are imported when a command or the list of them is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(_converters())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        convert = _converters().get(cmd_name)
        return convert and converter_command(cmd_name, convert)


app = typer.Typer(cls=Converters, no_args_is_help=True)


@app.callback()
def convert() -> None:
    """Convert official checkpoints, with one command per model family."""


def _converters() -> dict[str, Callable[..., Path]]:
    import_libraries()
    from vargen.pipelines.loading import list_families

    return {family.name: family.convert for family in list_families().values() if family.convert is not None}


def converter_command(name: str, convert: Callable[..., Path]) -> Any:
    """Return the command that runs a converter: an option for each of its arguments, with the help text of its docstring."""
    hints, texts = get_type_hints(convert), argument_descriptions(convert)
    parameters = []
    for key, argument in signature(convert).parameters.items():
        hint: Any = hints[key]
        default = argument.default
        paths = Path in (hint, *get_args(hint))
        metavar = ("DIR" if key in _FOLDERS else "FILE") if paths else None
        names = [f"--{key.replace('_', '-')}", *(["-o"] if key == "output" else [])]
        if key == "dtype":
            hint, default = Literal["file", "float32", "float16", "bfloat16"], "file"
        elif paths and type(None) not in get_args(hint) and hint is not Path:
            hint = list[Path]
        option = Annotated[hint, typer.Option(*names, metavar=metavar, help=texts.get(key))]
        parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=default, annotation=option))

    def run(**given: Any) -> None:
        import torch

        dtype = given.pop("dtype", "file")
        folder = convert(**given, dtype=None if dtype == "file" else getattr(torch, dtype))
        print(folder, flush=True)
        print_status(f"next: vargen generate --model {folder}")

    run.__signature__ = signature(run).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(name, cls=Verb, help=(getdoc(convert) or "").split("\n\n")[0])(run)
    return typer.main.get_command(single)


def argument_descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of a function's arguments in its docstring, by name, each as one line."""
    section = re.search(r"^Args:\n(.*?)(?:\n\S|\Z)", getdoc(function) or "", re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
