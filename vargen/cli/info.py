"""`vargen info`: versions, devices, packaged models and presets."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli import common
from vargen.cli.console import print_json, table

app = typer.Typer(help="Show versions, devices, packaged models and presets.", invoke_without_command=True)

_PACKAGES = ("vargen", "torch", "diffusers", "transformers", "safetensors", "torchvision", "triton", "numba")
_WIDTH = 100  # columns per line


@app.callback()
def info(
    ctx: typer.Context,
    as_json: common.JsonFlag = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        return
    facts = collect_facts()
    if as_json:
        print_json(facts)
        return
    shown = {**facts.pop("versions"), **facts.pop("machine"), **facts}
    models, names = shown.pop("models"), ", ".join(preset["name"] for preset in shown.pop("presets"))
    rows = [[name.replace("_", " "), _to_text(value)] for name, value in shown.items()]
    print(table(["", ""], rows, "<<").lstrip("\n"))
    print("\nPackaged models:" if models else "\nPackaged models: none")
    for each in models:
        print(f"  {each['name']}  {each['megabytes']:.1f} MB  {each['summary']}".rstrip())
    print(f"\nPresets: {names}")


def _to_text(value: Any) -> str:
    """Format a fact in words, and the values of lists and dictionaries one after the other."""
    if isinstance(value, list | dict):
        return ", ".join(map(_to_text, value.values() if isinstance(value, dict) else value)) or "none"
    return {"True": "yes", "False": "no", "None": "none"}.get(str(value), str(value))


@app.command("presets", cls=common.Verb)
def list_presets(
    everything: Annotated[bool, typer.Option("--all", help="The experimental methods, too.")] = False,
    as_json: common.JsonFlag = False,
) -> None:
    """List the methods: exact ones sample from the model's own distribution, relaxed ones do not."""
    found = presets()
    if as_json:
        print_json(found)
        return
    hidden = 0 if everything else sum(preset["experimental"] for preset in found)
    shown = [preset for preset in found if everything or not preset["experimental"]]
    for paradigm, members in itertools.groupby(shown, lambda preset: preset["paradigm"]):
        print(f"models: {paradigm}", *map(_format, members), "", sep="\n")
    if hidden:
        print(f"{hidden} experimental methods: vargen info presets --all")


def _format(preset: dict[str, Any]) -> str:
    """Format a preset in lines of at most `_WIDTH` columns: name, kind and summary, then its defaults and its source."""
    head = f"  {preset['name']:16}  {preset['kind']:7}  "
    defaults = (f"{key} {str(value).lower() if value in (True, False) else value}" for key, value in preset["defaults"].items())
    indent = " " * (len(head) + 2)
    lines = textwrap.wrap(preset["summary"], _WIDTH, initial_indent=head, subsequent_indent=indent[2:])
    for part in (", ".join(defaults), f"source: {preset['source']}"):
        lines += textwrap.wrap(part, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def presets() -> list[dict[str, Any]]:
    from vargen.decoding import PRESETS

    names = ("name", "paradigm", "kind", "summary", "source", "experimental")
    return [{**{name: getattr(each, name) for name in names}, "defaults": each.settings} for each in PRESETS.values()]


def collect_facts() -> dict[str, Any]:
    """Collect everything that `vargen info` shows, as plain values."""
    import torch

    from vargen import __version__
    from vargen.assets import packaged_model_path, packaged_models
    from vargen.compat import installed_version
    from vargen.device import describe_machine, preferred_dtype
    from vargen.kernels.dispatch import explain_kernels
    from vargen.kernels.host import explain_capture
    from vargen.kernels.int8.instructions import cpu_instructions
    from vargen.kernels.int8.load import explain_int8_passes

    machine, device = describe_machine(), "cuda" if torch.cuda.is_available() else "cpu"
    versions = {name: installed_version(name) for name in _PACKAGES}
    return {
        "versions": {**versions, "vargen": __version__, "python": machine["python"]},
        "machine": machine,
        "threads": describe_threads(),
        "default_device": device,
        "default_dtype": str(preferred_dtype(device)).removeprefix("torch."),
        "kernels": ": ".join(explain_kernels(device)),
        "cpu_instructions": list(cpu_instructions()),
        "int8_passes": ": ".join(explain_int8_passes()),
        "graphs": explain_capture(torch.device(device)),
        "models": [describe_folder(name, packaged_model_path(name)) for name in packaged_models()],
        "presets": presets(),
    }


def describe_threads() -> str:
    """Return the number of CPU threads that passes use, and the reason."""
    from vargen.decoding.costs import MIN_THREAD_SPEEDUP
    from vargen.device import available_cores, user_thread_count

    if (chosen := user_thread_count()) is not None:
        return f"{chosen[0]}, set by {chosen[1]}"
    found = f"up to {available_cores()}, autotuned with the first image: each doubling must make a pass"
    return f"{found} {MIN_THREAD_SPEEDUP} times as fast"


def describe_folder(name: str, folder: Path) -> dict[str, Any]:
    """Return name, size, and the first sentence of the model card, after front matter and headings; empty without a card."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    card = next((file for file in (folder / "README.md", folder / "MODEL_CARD.md") if file.is_file()), None)
    lines = [line.strip() for line in card.read_text("utf-8").splitlines()] if card else []
    if lines[:1] == ["---"] and "---" in lines[1:]:
        lines = lines[lines.index("---", 1) + 1 :]
    text = itertools.dropwhile(lambda line: not line or line[0] in "#<![", lines)
    summary = " ".join(itertools.takewhile(bool, text)).split(". ")[0].removesuffix(".")
    return {"name": name, "megabytes": round(size / 1e6, 1), "summary": summary}
