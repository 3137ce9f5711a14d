"""From the logits of a pass to the verdict on its draft.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vargen.decoding.compiled_sampling import sample_from_logits
from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.next_token.protocols import AcceptanceRule, Drafter
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling, to_probs


def verify_draft(
    rule: AcceptanceRule,
    drafter: Drafter,
    logits: Tensor,
    draft: Draft,
    noise: Noise,
    relaxation: Tensor,
    sampling: Sampling,
) -> tuple[Tensor | None, Verdict]:
    """Verify a draft.

    Args:
        logits: `[B, T, V]`.
        draft, noise, relaxation: see `AcceptanceRule`.

    Returns:
        The target's probabilities float32 `[B, T, V]`, None if nothing uses them, and the verdict.
    """
    if rule.verify_tokens is not None and not drafter.uses_probs:
        tokens = sample_from_logits(logits, sampling, noise)
        if tokens is not None:
            return None, rule.verify_tokens(tokens, draft)
    probs = to_probs(logits, sampling)
    return probs, rule(probs, _add_unfiltered_probs(draft, rule, logits, sampling), noise, relaxation)


def _add_unfiltered_probs(draft: Draft, rule: AcceptanceRule, logits: Tensor, sampling: Sampling) -> Draft:
    """Add `Draft.unfiltered_probs` if the rule is relaxed and sampling is greedy; otherwise return the draft unchanged."""
    if rule.exact or not sampling.is_greedy:
        return draft
    return replace(draft, unfiltered_probs=to_probs(logits, sampling.with_temperature(1.0)))
