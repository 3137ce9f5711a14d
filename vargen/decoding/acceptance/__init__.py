"""Acceptance rules: pure, batched functions from the target's probabilities and a draft to a `Verdict`."""

from vargen.decoding.acceptance.coupled import shared_noise
from vargen.decoding.acceptance.exact import chances, draft_probs, exact, judged, probability, redrawn, residual
from vargen.decoding.acceptance.grouped import Grouped
from vargen.decoding.acceptance.kseq import k_seq
from vargen.decoding.acceptance.neighbourhood import Neighbourhood
from vargen.decoding.acceptance.pooled import Pooled
from vargen.decoding.acceptance.ratio import Ratio
from vargen.decoding.acceptance.recursive import recursive_rejection
from vargen.decoding.acceptance.relaxation import Relaxed, granted_in, within_budget
from vargen.decoding.acceptance.rule import FunctionRule, acceptance_rule
from vargen.decoding.acceptance.siblings import Siblings, SiblingTest, Tested, sibling_by_sibling
from vargen.decoding.acceptance.traversal import traversal
from vargen.decoding.acceptance.typical import Typical
from vargen.decoding.protocols import AcceptanceRule

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
