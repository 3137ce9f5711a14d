"""A method is data: who drafts, in what shape, and which rule accepts. Presets are named instances."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from vargen.decoding.acceptance import same_noise
from vargen.decoding.types import AcceptanceRule, Drafter


@dataclass(frozen=True)
class Accelerator:
    """A composed method.

    Attributes:
        name: what statistics and messages call it.
        drafter: who proposes; None proposes nothing, so each pass commits one token.
        acceptance: the rule that judges a draft.
        kind: `"exact"` when the output follows the target's own law, else `"relaxed"`.
        summary: one line for people.
        source: paper.
    """

    name: str = "custom"
    drafter: Drafter | None = None
    acceptance: AcceptanceRule = same_noise
    kind: Literal["exact", "relaxed"] = "exact"
    summary: str = ""
    source: str = ""


PRESETS: dict[str, Accelerator] = {
    preset.name: preset
    for preset in (
        Accelerator(
            name="ar",
            summary="one token a pass, in raster order: the sequential baseline",
            source="Sun et al. 2024, LlamaGen",
        ),
    )
}


def resolve_accelerator(accelerator: str | Accelerator) -> Accelerator:
    """A preset by name, or the object itself.

    Raises:
        ValueError: for an unknown name (names the nearest).
        TypeError: for anything else.
    """
    if isinstance(accelerator, Accelerator):
        return accelerator
    if not isinstance(accelerator, str):
        raise TypeError(f"accelerator must be a preset's name or an Accelerator, got {type(accelerator).__name__}")
    if accelerator not in PRESETS:
        near = difflib.get_close_matches(accelerator, PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"presets: {', '.join(PRESETS)}"
        raise ValueError(f"unknown accelerator {accelerator!r}; {hint}")
    return PRESETS[accelerator]
