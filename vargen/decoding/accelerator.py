"""Methods for next-token models: a drafter and an acceptance rule; and the presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vargen.decoding.interfaces import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.methods import DEFAULT_METHOD, Method, register_presets
from vargen.decoding.relaxed_rules import GroupedRule, NeighborhoodRule, PooledRule
from vargen.decoding.rules import shared_noise, speculative_sampling
from vargen.decoding.speculative import Sequential, Speculative
from vargen.decoding.tree_drafters import DynamicTree, Eagle, Medusa
from vargen.decoding.tree_rules import traversal
from vargen.specs import part_name
from vargen.values import short_repr

# Rules by the name that the setting `acceptance` selects.
RULES: dict[str, AcceptanceRule] = {
    "speculative-sampling": speculative_sampling,
    "shared-noise": shared_noise,
    "traversal": traversal,
    "grouped": GroupedRule(),
    "neighborhood": NeighborhoodRule(),
    "pooled": PooledRule(),
}
_REQUIREMENT_MESSAGES = {
    "independent-per-pass": "it needs draft tokens that are sampled again in every pass, each with its own uniforms",
    "with-replacement": "it needs siblings that are sampled with replacement, and whose number does not depend on the samples",
}


@dataclass(frozen=True)
class Accelerator(Method):
    """A method for next-token models: a drafter and an acceptance rule.

    Attributes:
        drafter: proposes draft tokens. Default: none are proposed, and each pass commits one token.
        acceptance: the rule that verifies the draft.

    Raises:
        TypeError: if `drafter` is not a drafter or `acceptance` is not a rule.
        ValueError: if the parts are incompatible; says why.
    """

    drafter: Drafter = field(default_factory=Sequential)
    acceptance: AcceptanceRule = shared_noise
    paradigm: ClassVar[Literal["next-token"]] = "next-token"
    named_parts: ClassVar[Mapping[str, Mapping[str, Any]]] = {"acceptance": RULES}

    def __post_init__(self) -> None:
        rule, drafter = self.acceptance, self.drafter
        if not isinstance(rule, AcceptanceRule):
            raise TypeError(f"acceptance must be a rule, such as shared_noise or GroupedRule(), got {short_repr(rule)}")
        if not isinstance(drafter, Drafter):
            raise TypeError(f"drafter must be a Drafter, such as Jacobi() or Speculative(), got {short_repr(drafter)}")
        parts = f"acceptance {part_name(rule)} cannot be combined with {type(drafter).__name__}"
        if drafter.topology not in rule.topologies:
            raise ValueError(
                f"{parts}: it verifies a {rule.topologies[0]} and would test each sibling against the full target "
                "distribution; shared_noise, recursive_rejection, k_seq and traversal verify trees"
            )
        for requirement in rule.requires:
            needed = requirement != "with-replacement" or drafter.topology == "tree"  # a chain has no siblings
            if needed and requirement not in drafter.provides:
                raise ValueError(f"{parts}: {_REQUIREMENT_MESSAGES[requirement]}")

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        return "exact" if self.acceptance.exact else "relaxed"

    @property
    def sequential_tokens(self) -> bool:
        return self.acceptance.sequential_tokens

    @property
    def parts(self) -> dict[str, Any]:
        return {"drafter": self.drafter, "acceptance": self.acceptance}

    def bind(self, model: TokenModel, slots: int = 0) -> tuple[Drafter, AcceptanceRule]:
        """Return the drafter, with buffers for B slots, and the rule for a model.

        Raises:
            ValueError: if this model cannot run the method; says why.
        """
        return self.drafter.bind(model, slots), self.acceptance.bind(model)


register_presets(
    Accelerator(
        name=DEFAULT_METHOD,
        drafter=Jacobi(window="auto", coupling="gumbel"),
        acceptance=shared_noise,
        summary="the image of ar: gumbel where measured costs show that drafting pays off, otherwise one token per pass",
        source="as gumbel",
    ),
    Accelerator(
        name="ar",
        summary="one token per pass, in raster order: the sequential baseline",
        source="Sun et al. 2024, LlamaGen",
    ),
    Accelerator(
        name="sjd",
        drafter=Jacobi(window=16, coupling="independent"),
        acceptance=speculative_sampling,
        summary="a window of draft tokens, resampled from the last pass; p/q acceptance",
        source="Teng et al. 2024, arXiv 2410.01699",
    ),
    Accelerator(
        name="scd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=speculative_sampling,
        summary="sjd that keeps draft tokens by maximal coupling",
        source="SCD 2025, arXiv 2510.24211",
    ),
    Accelerator(
        name="gumbel",
        drafter=Jacobi(window=16, coupling="gumbel"),
        acceptance=shared_noise,
        summary="the same image as ar for the same seed, in fewer passes",
        source="SCD 2025, arXiv 2510.24211, with shared-noise acceptance",
    ),
    Accelerator(
        name="gsd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=GroupedRule(),
        summary="scd that accepts a draft token by the total probability of a group of tokens",
        source="So et al. 2025, arXiv 2508.07747",
    ),
    Accelerator(
        name="mulo-exact",
        drafter=Jacobi(window=32, coupling="maximal", initial="low-res"),
        acceptance=speculative_sampling,
        summary="scd whose first draft tokens come from a low-resolution image",
        source="MuLo-SD 2026, arXiv 2601.05149, with p/q acceptance",
    ),
    Accelerator(
        name="mulo",
        drafter=Jacobi(window=32, coupling="from-verdict", initial="low-res"),
        acceptance=PooledRule(size=100, radius=2),
        summary="drafts from a low-resolution image, accepted where similar tokens are probable, resampled elsewhere",
        source="MuLo-SD 2026, arXiv 2601.05149",
    ),
    Accelerator(
        name="speculative",
        drafter=Speculative(),
        acceptance=speculative_sampling,
        summary="a small model drafts a chain; p/q acceptance",
        source="Leviathan et al. 2023, arXiv 2211.17192",
    ),
    Accelerator(
        name="eagle",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=traversal,
        summary="a trained layer drafts a tree by sampling, which is verified by whole paths",
        source="Li et al. 2024, arXiv 2401.15077 and 2406.16858, with traversal verification",
    ),
    Accelerator(
        name="lantern",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=NeighborhoodRule(),
        summary="the tree of eagle, each draft token accepted by the total probability of similar tokens",
        source="Jang et al. 2024, LANTERN, arXiv 2410.03355, and Park et al. 2025, LANTERN++, arXiv 2502.06352",
    ),
    Accelerator(
        name="medusa",
        drafter=Medusa(DynamicTree(nodes=15, depth=3, children=3)),
        acceptance=traversal,
        summary="trained heads draft several tokens at once, as a tree, which is verified by whole paths",
        source="Cai et al. 2024, arXiv 2401.10774, with traversal verification",
    ),
)
