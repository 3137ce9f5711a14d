"""Acceptance rules: pure, batched functions from the target's probabilities and a draft to a `Verdict`."""

from vargen.decoding.next_token.acceptance.base import FunctionRule, acceptance_rule
from vargen.decoding.next_token.acceptance.exact import (
    chances,
    draft_probs,
    exact,
    judged,
    probability,
    redrawn,
    residual,
    shared_noise,
)
from vargen.decoding.next_token.acceptance.grouped import Grouped
from vargen.decoding.next_token.acceptance.multi_draft import k_seq, recursive_rejection
from vargen.decoding.next_token.acceptance.neighborhood import Neighbourhood
from vargen.decoding.next_token.acceptance.pooled import Pooled
from vargen.decoding.next_token.acceptance.relaxed import Ratio, Relaxed, Typical, granted_in, within_budget
from vargen.decoding.next_token.acceptance.siblings import Siblings, SiblingTest, Tested, sibling_by_sibling
from vargen.decoding.next_token.acceptance.traversal import traversal
from vargen.decoding.next_token.protocols import AcceptanceRule

# By name, as method strings give them; each with its default settings.
RULES: dict[str, AcceptanceRule] = {
    "exact": exact,
    "shared-noise": shared_noise,
    "recursive-rejection": recursive_rejection,
    "k-seq": k_seq,
    "traversal": traversal,
    "grouped": Grouped(),
    "neighbourhood": Neighbourhood(),
    "pooled": Pooled(),
    "typical": Typical(),
    "ratio": Ratio(),
}

__all__ = [
    "RULES",
    "FunctionRule",
    "Grouped",
    "Neighbourhood",
    "Pooled",
    "Ratio",
    "Relaxed",
    "SiblingTest",
    "Siblings",
    "Tested",
    "Typical",
    "acceptance_rule",
    "chances",
    "draft_probs",
    "exact",
    "granted_in",
    "judged",
    "k_seq",
    "probability",
    "recursive_rejection",
    "redrawn",
    "residual",
    "shared_noise",
    "sibling_by_sibling",
    "traversal",
    "within_budget",
]
