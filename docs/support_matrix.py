"""Writes docs/support.md from the registries of models and methods: `python docs/support_matrix.py` from the root.

A cell is *refused* where the pipeline itself refuses the method, *tested* where a test of `EVIDENCE` runs it, else *expected*.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).with_name("support.md")
# Device and dtypes: the columns.
COLUMNS = [("CPU", each) for each in ("float64", "float32", "bfloat16", "float16")]
COLUMNS += [("GPU", each) for each in ("float32", "bfloat16", "float16")]
# Packaged models that stand for a kind of checkpoint, and what such a checkpoint is called when nothing drafts beside it.
ALONE = {
    "emoji": "LlamaGen, converted from the official checkpoints",
    "emoji-var": "VAR, converted from the official checkpoints",
    "emoji-video": "A causal video model without a drafter",
}


class Evidence(NamedTuple):
    """A test file that runs every method of a packaged model on a device in a dtype, but for those `left_out`."""

    model: str
    device: str
    dtype: str
    test: str
    left_out: tuple[str, ...] = ()


EVIDENCE = [
    Evidence("emoji", "CPU", "float64", "tests/decoding/test_recorded_tokens.py", ("auto",)),
    Evidence("emoji", "CPU", "float32", "tests/pipelines/test_accelerators.py"),
    Evidence("emoji-var", "CPU", "float32", "tests/assets/test_emoji_var.py"),
    Evidence("emoji-video", "CPU", "float32", "tests/assets/test_emoji_video.py"),
]
HEAD = """# Support matrix

Find here whether a method runs with your model, on your device, in your dtype. This page is generated from the registries by
`python docs/support_matrix.py`, and a test compares it with them.

- **tested**: a test of the suite runs the method with this model, on this device, in this dtype.
- **expected**: the same code runs, but no test does so. No test runs a whole model on a GPU; the kernels have
  [tests of their own](kernels.md), which a GPU runs compiled and a CPU interpreted.
- **refused**: the call raises a `ValueError` before anything is generated, for the numbered reason below the table.

`from_pretrained(..., torch_dtype=...)` sets the dtype; without it, [the fastest of the device](usage.md) is chosen. {compile}
"""


def open_model(name: str) -> Any:
    from vargen import open_pipeline

    pipe = open_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def remove_drafters(pipe: Any) -> None:
    """Leave what a converted checkpoint has: networks and text, and nothing that drafts."""
    kept = ("text_encoder", "tokenizer")
    pipe.register_modules(**{part: None for part in pipe._optional_components if part not in kept})


def make_cell(model: str | None, method: str, device: str, dtype: str) -> str:
    """ "tested" or "expected"; `model` is None for weights that no test has."""
    tested = any(
        (each.model, each.device, each.dtype) == (model, device, dtype) and method not in each.left_out for each in EVIDENCE
    )
    return "tested" if tested else "expected"


def format_model(title: str, pipe: Any, model: str | None) -> str:
    """A heading, a table of methods by device and dtype, and the reasons for what is refused."""
    from vargen.decoding import PRESETS

    reasons: dict[str, int] = {}
    heads = " | ".join(f"{device} {dtype}" for device, dtype in COLUMNS)
    lines = [f"| method | kind | status | {heads} |", "|---|---|---|" + "---|" * len(COLUMNS)]
    for method in pipe.list_methods():
        cells = [make_cell(model, method.name, *column) for column in COLUMNS]
        if method.unsupported_reason is not None:
            cells = [f"refused ({reasons.setdefault(method.unsupported_reason, len(reasons) + 1)})"] * len(COLUMNS)
        status = "experimental" if PRESETS[method.name].experimental else "core"
        lines.append(f"| `{method.name}` | {method.kind} | {status} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([f"## {title}", "", *lines, *(["", *notes] if notes else [])]) + "\n"


def make_page() -> str:
    """The page; opens every packaged model."""
    from vargen.assets import packaged_models
    from vargen.device import validate_compile

    try:
        validate_compile(True, "cpu")
        refusal = ""
    except ValueError as error:
        refusal = f"`compile=True` is refused on a CPU: {str(error).removeprefix('compile must be False on a CPU: ')}."
    sections = [HEAD.format(compile=refusal)]
    for name in packaged_models():
        pipe = open_model(name)
        sections.append(format_model(f"`{name}`", pipe, name))
        if name in ALONE:
            remove_drafters(pipe)
            sections.append(format_model(ALONE[name], pipe, None))
    tests = [f"- `{each.model}` on a {each.device} in {each.dtype}: `{each.test}`" for each in EVIDENCE]
    return "\n".join([*sections, "## What tests them", "", *tests]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
