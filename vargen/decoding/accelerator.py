"""A method is data: who drafts, in what shape, and which rule accepts. Presets are named instances."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from vargen.decoding.acceptance import Grouped, exact, same_noise
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.naming import nearest
from vargen.decoding.speculative import Speculative
from vargen.decoding.types import AcceptanceRule, Drafter
from vargen.values import shown


@dataclass(frozen=True)
class Accelerator:
    """A composed method.

    Attributes:
        name: what statistics and messages call it.
        drafter: who proposes; None proposes nothing, so each pass commits one token.
        topology: `"chain"` or `"tree"`, the shape of a draft; None takes the drafter's.
        acceptance: the rule that judges a draft.
        summary: one line for people.
        source: paper.

    Raises:
        TypeError: for a drafter or a rule that is none.
        ValueError: for parts that do not go together, saying why.
    """

    name: str = "custom"
    drafter: Drafter | None = None
    acceptance: AcceptanceRule = same_noise
    topology: Literal["chain", "tree"] | None = None
    summary: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # statistics and reports are keyed by it
            raise TypeError(f"name must be a string, got {shown(self.name)}")
        if self.topology not in (None, "chain", "tree"):
            raise ValueError(f"topology must be 'chain', 'tree' or None, got {shown(self.topology)}")
        if isinstance(self.acceptance, type) or not callable(self.acceptance):
            raise TypeError(f"acceptance must be a rule, such as same_noise, exact or Grouped(), got {self.acceptance!r}")
        if self.drafter is None:
            if self.topology not in (None, "chain"):
                raise ValueError("topology 'tree' needs a drafter that proposes trees; without a drafter nothing is proposed")
            return
        if isinstance(self.drafter, type) or not hasattr(self.drafter, "propose"):
            made = ", a class: call it" if isinstance(self.drafter, type) else ""
            given = shown(self.drafter) + made
            raise TypeError(f"drafter must be a drafter, such as Jacobi() or Speculative(), or None, got {given}")
        proposes = getattr(self.drafter, "topology", "tree")
        if self.topology is None:
            object.__setattr__(self, "topology", proposes)
        who = type(self.drafter).__name__
        if self.topology == "tree" and proposes == "chain":
            raise ValueError(f"topology 'tree' cannot go with {who}: it draws one token per position, which is a chain")
        if self.topology == "chain" and proposes == "tree":
            raise ValueError(f"topology 'chain' cannot go with {who}: it proposes siblings, which need a tree")
        judges = getattr(self.acceptance, "topologies", ("chain",))
        if self.topology not in judges:
            rule = getattr(self.acceptance, "__name__", type(self.acceptance).__name__)
            raise ValueError(
                f"acceptance {rule} cannot judge a {self.topology}: it follows one {judges[0]} of drafts, and siblings would "
                "each be tested against the full law; same_noise judges trees"
            )

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` when the output follows the target's own law. Rules that do not say so count as relaxed."""
        return "exact" if getattr(self.acceptance, "exact", False) else "relaxed"

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters of the drafter and of the rule that are set, by name."""
        parts: tuple[Any, ...] = (self.drafter, self.acceptance)
        return {
            field.name: value
            for part in parts
            if is_dataclass(part)
            for field in fields(part)
            if field.init and isinstance(value := getattr(part, field.name), int | float | str)
        }


DEFAULT = "auto"  # what pipelines, page and command draw with
PRESETS: dict[str, Accelerator] = {
    preset.name: preset
    for preset in (
        Accelerator(
            name=DEFAULT,
            drafter=Jacobi(window="auto", tail="gumbel"),
            acceptance=same_noise,
            summary="the picture of ar, by gumbel where measured costs say that drafting pays, else token by token",
            source="as gumbel",
        ),
        Accelerator(
            name="ar",
            summary="one token a pass, in raster order: the sequential baseline",
            source="Sun et al. 2024, LlamaGen",
        ),
        Accelerator(
            name="sjd",
            drafter=Jacobi(window=16, tail="independent"),
            acceptance=exact,
            summary="a window of drafts, redrawn from the last pass; p/q acceptance",
            source="Teng et al. 2024, arXiv 2410.01699",
        ),
        Accelerator(
            name="scd",
            drafter=Jacobi(window=16, tail="maximal"),
            acceptance=exact,
            summary="sjd whose drafts survive by maximal coupling",
            source="SCD 2025, arXiv 2510.24211",
        ),
        Accelerator(
            name="gumbel",
            drafter=Jacobi(window=16, tail="gumbel"),
            acceptance=same_noise,
            summary="the same picture as ar for the same seed, in fewer passes",
            source="SCD 2025, arXiv 2510.24211, with same-noise acceptance",
        ),
        Accelerator(
            name="gsd",
            drafter=Jacobi(window=16, tail="maximal"),
            acceptance=Grouped(),
            summary="scd that judges a draft by the mass of a group around it",
            source="So et al. 2025, arXiv 2508.07747",
        ),
        Accelerator(
            name="speculative",
            drafter=Speculative(),
            acceptance=exact,
            summary="a small model drafts a chain; p/q acceptance",
            source="Leviathan et al. 2023, arXiv 2211.17192",
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
        raise TypeError(f"accelerator must be a preset's name or an Accelerator, got {shown(accelerator)}")
    if accelerator not in PRESETS:
        raise ValueError(f"unknown accelerator {shown(accelerator)}; {nearest(accelerator, PRESETS)}")
    return PRESETS[accelerator]
