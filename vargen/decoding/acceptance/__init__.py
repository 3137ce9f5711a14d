"""Acceptance rules: pure, batched functions from the target's probabilities and a draft to a `Verdict`."""

from vargen.decoding.acceptance.coupled import shared_noise
from vargen.decoding.acceptance.exact import chances, draft_probs, exact, judged, residual
from vargen.decoding.acceptance.grouped import Grouped
from vargen.decoding.acceptance.relaxation import granted_in, within_budget
from vargen.decoding.acceptance.rule import FunctionRule, acceptance_rule

__all__ = [
    "FunctionRule",
    "Grouped",
    "acceptance_rule",
    "chances",
    "draft_probs",
    "exact",
    "granted_in",
    "judged",
    "residual",
    "shared_noise",
    "within_budget",
]
