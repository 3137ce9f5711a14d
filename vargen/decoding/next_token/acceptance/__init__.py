"""Acceptance rules: pure, batched functions from the target distribution and a draft to a `Verdict`."""

from vargen.decoding.interfaces import AcceptanceRule
from vargen.decoding.next_token.acceptance.exact import (
    dense_draft_probs,
    gather_p_and_q,
    gather_prob,
    resample_rejected,
    residual_weights,
    shared_noise,
    speculative_sampling,
    verify_chain,
)
from vargen.decoding.next_token.acceptance.function_rule import FunctionRule, acceptance_rule
from vargen.decoding.next_token.acceptance.grouped import GroupedRule
from vargen.decoding.next_token.acceptance.neighborhood import NeighborhoodRule
from vargen.decoding.next_token.acceptance.pooled import PooledRule
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule, cap_to_budget, sum_relaxation
from vargen.decoding.next_token.acceptance.siblings import SiblingDecision, SiblingRule, Siblings, verify_siblings
from vargen.decoding.next_token.acceptance.tree_rules import traversal

# Rules by the name used in method strings, each with its default settings.
RULES: dict[str, AcceptanceRule] = {
    "speculative-sampling": speculative_sampling,
    "shared-noise": shared_noise,
    "traversal": traversal,
    "grouped": GroupedRule(),
    "neighborhood": NeighborhoodRule(),
    "pooled": PooledRule(),
}

__all__ = [
    "RULES",
    "FunctionRule",
    "GroupedRule",
    "NeighborhoodRule",
    "PooledRule",
    "RelaxedRule",
    "SiblingDecision",
    "SiblingRule",
    "Siblings",
    "acceptance_rule",
    "cap_to_budget",
    "dense_draft_probs",
    "gather_p_and_q",
    "gather_prob",
    "resample_rejected",
    "residual_weights",
    "shared_noise",
    "speculative_sampling",
    "sum_relaxation",
    "traversal",
    "verify_chain",
    "verify_siblings",
]
