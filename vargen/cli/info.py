"""`vargen info`: versions, devices, packaged models and presets."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli.console import print_json, table

app = typer.Typer(help="Show versions, devices, packaged models and presets.", invoke_without_command=True)

_PACKAGES = ("vargen", "torch", "diffusers", "transformers", "safetensors", "torchvision", "triton", "numba")
_WIDTH = 100  # columns per line
_JSON = typer.Option("--json", help="Print one JSON document.")


@app.callback()
def info(
    ctx: typer.Context,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        return
    facts = collect_facts()
    if as_json:
        print_json(facts)
        return
    machine = facts["machine"]
    bfloat16 = "in hardware" if machine["bfloat16_in_hardware"] else "emulated, slow"
    gpus = [f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in machine["gpus"]]
    rows = [
        *([name, version or "not installed"] for name, version in facts["versions"].items()),
        ["cpu", f"{machine['cpu']}; {machine['threads']} threads on {machine['cores']} cores; bfloat16 {bfloat16}"],
        *([f"gpu {number}", gpu] for number, gpu in enumerate(gpus)),
        *([["gpu", "none"]] if not gpus else []),
        ["default dtype", f"{facts['default_dtype']}; float32 for small models on a CPU"],
        ["kernels", facts["kernels"]],
        ["cpu instructions", ", ".join(facts["cpu_instructions"]) or "none of those that passes use"],
        ["int8 passes", facts["int8_passes"]],
        ["passes are", facts["graphs"]],
        ["passes run on", facts["threads"]],
    ]
    print(table(["", ""], rows, "<<").lstrip("\n"))
    print("\nPackaged models:")
    for each in facts["models"]:
        print(f"  {each['name']}  {each['megabytes']:.1f} MB  {each['summary']}".rstrip())
    if not facts["models"]:
        print("  none")
    print("\nPresets: " + ", ".join(preset["name"] for preset in facts["presets"]))


@app.command("presets")
def list_presets(
    everything: Annotated[bool, typer.Option("--all", help="The experimental methods, too.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the methods: exact ones sample from the model's own distribution, relaxed ones do not."""
    found = presets()
    if as_json:
        print_json(found)
        return
    hidden = 0 if everything else sum(preset["experimental"] for preset in found)
    found = [preset for preset in found if everything or not preset["experimental"]]
    for number, (paradigm, members) in enumerate(itertools.groupby(found, lambda preset: preset["paradigm"])):
        print(f"{chr(10) * min(number, 1)}models: {paradigm}")
        print("\n".join(line for preset in members for line in _preset_lines(preset)))
    if hidden:
        print(f"\n{hidden} experimental methods: vargen info presets --all")


def _preset_lines(preset: dict[str, Any]) -> list[str]:
    """Format a preset in lines of at most `_WIDTH` columns: name, kind and summary, then its defaults and its source."""
    head = f"  {preset['name']:16}  {preset['kind']:7}  "
    below = [_format_settings(preset["defaults"]), f"source: {preset['source']}"]
    lines = textwrap.wrap(preset["summary"], _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    indent = " " * (len(head) + 2)
    for part in below:
        lines += textwrap.wrap(part, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines


def _format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items())


def presets() -> list[dict[str, Any]]:
    from vargen.decoding import PRESETS

    return [
        {
            "name": preset.name,
            "paradigm": preset.paradigm,
            "kind": preset.kind,
            "summary": preset.summary,
            "defaults": preset.settings,
            "source": preset.source,
            "experimental": preset.experimental,
        }
        for preset in PRESETS.values()
    ]


def collect_facts() -> dict[str, Any]:
    """Collect everything that `vargen info` shows, as plain values."""
    import torch

    from vargen import __version__
    from vargen.assets import packaged_model_path, packaged_models
    from vargen.compat import installed_version
    from vargen.device import describe_machine, preferred_dtype
    from vargen.kernels.dispatch import explain_kernels
    from vargen.kernels.host import explain_capture
    from vargen.kernels.int8.load import cpu_instructions, explain_int8_passes

    machine = describe_machine()
    versions = {name: installed_version(name) for name in _PACKAGES}
    models = []
    for name in packaged_models():
        folder = packaged_model_path(name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        models.append({"name": name, "megabytes": round(size / 1e6, 1), "summary": read_card_summary(folder)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
        "models": models,
        "presets": presets(),
    }


def describe_threads() -> str:
    """Return the number of CPU threads that passes use, and the reason."""
    from vargen.decoding.costs import MIN_THREAD_SPEEDUP
    from vargen.device import available_cores, user_thread_count

    if (chosen := user_thread_count()) is not None:
        return f"{chosen[0]} CPU threads, set by {chosen[1]}"
    found = f"up to {available_cores()} CPU threads, autotuned with the first image: each doubling must make a pass"
    return f"{found} {MIN_THREAD_SPEEDUP} times as fast"


def read_card_summary(folder: Path) -> str:
    """Return the first sentence of a folder's model card, after front matter and headings; empty without a card."""
    card = next((folder / name for name in ("README.md", "MODEL_CARD.md") if (folder / name).is_file()), None)
    if card is None:
        return ""
    lines = [line.strip() for line in card.read_text(encoding="utf-8").splitlines()]
    if lines and lines[0] == "---" and "---" in lines[1:]:
        lines = lines[lines.index("---", 1) + 1 :]
    start = next((i for i, line in enumerate(lines) if line and line[0] not in "#<!["), len(lines))
    paragraph = " ".join(itertools.takewhile(bool, lines[start:]))
    return paragraph.split(". ")[0].removesuffix(".")
