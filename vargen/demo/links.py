"""Links to a result: a query string that holds what differs from the defaults, and the request that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import urlencode

from vargen.demo.request import RANGES, PageRequest, new_seed

# Parameter of a link -> field of a request. `method` and `seed` are always in a link: another default would give another image.
_FIELDS = {
    "prompt": "prompt", "seed": "seed", "method": "method", "guidance": "guidance_scale", "temperature": "temperature",
    "top_k": "top_k", "top_p": "top_p", "negative": "negative_prompt", "images": "num_images", "best_of": "best_of",
}  # fmt: skip
_ALWAYS = ("prompt", "seed", "method")


def link_to(request: PageRequest, defaults: Mapping[str, Any], mode: str = "image", **more: Any) -> str:
    """Return the query string of a link to what a request generates.

    Args:
        defaults: sampling defaults of the model; equal values are left out. more: parameters that only this mode reads.
    """
    usual = {**{field.name: field.default for field in fields(PageRequest)}, **defaults}
    values = {key: getattr(request, name) for key, name in _FIELDS.items()}
    kept = {key: value for key, value in values.items() if key in _ALWAYS or value != usual[_FIELDS[key]]}
    return "?" + urlencode({**({"mode": mode} if mode != "image" else {}), **kept, **more})


def request_of_link(query: Mapping[str, str], defaults: Mapping[str, Any]) -> PageRequest | None:
    """Return the request that a link means; None if it has no prompt. A missing seed is random."""
    if not query.get("prompt"):
        return None
    given: dict[str, Any] = {name: query[key] for key, name in _FIELDS.items() if query.get(key)}
    for name in RANGES.keys() & given.keys():
        given[name] = _parse_number(given[name])
    return PageRequest(**{**defaults, "seed": new_seed(), **given})


def _parse_number(text: str) -> Any:
    """Return the number in a text, or else the text, which the limits then reject."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text
