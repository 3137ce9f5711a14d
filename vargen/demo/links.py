"""Links to a result: a query string with mode, prompt, seed, method, and the sampling that differs from the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from vargen.values import OPTIONS, short_repr

MAX_PROMPT = 1000  # characters
MAX_SEED = 2**53 - 8  # below the largest exact integer in a browser, with room for the seeds of more images


def make_link(mode: str, prompt: str, seed: int, method: str, sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a link; `sampling` holds values of the page by the names of arguments, of which the defaults are left out."""
    changed = {name: value for name, value in sampling.items() if (value or None) != (defaults.get(name) or None)}
    return "?" + urlencode({"mode": mode, "prompt": prompt, "seed": seed, "method": method, **changed})


def read_link(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a link, with numbers as such; parameters that no page knows are ignored.

    Raises:
        ValueError: for a number that is none, or beyond what the page takes.
    """
    texts = ("mode", "prompt", "method", "negative_prompt")
    found: dict[str, Any] = {name: query[name][:MAX_PROMPT] for name in texts if query.get(name)}
    limits = {"seed": (0, MAX_SEED, 1), **{name: option.slider for name, option in OPTIONS.items()}}
    for name, (least, most, step) in limits.items():
        if not (text := query.get(name)):
            continue
        try:
            value = int(text[:20]) if step == 1 else float(text)
        except ValueError:
            value = -1
        if not least <= value <= most:
            raise ValueError(f"The link has the {name} {short_repr(text)}; it must be from {least} to {most}.")
        found[name] = value
    return found
