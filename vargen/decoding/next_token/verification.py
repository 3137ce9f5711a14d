"""From the logits of a pass to the verdict on its draft.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from vargen.decoding.compiled_sampling import sample_from_logits
from vargen.decoding.harness import sum_rows
from vargen.decoding.interfaces import AcceptanceRule, Drafter
from vargen.decoding.next_token.acceptance.exact import verify_shared_tokens
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.tree import Draft, Verdict
from vargen.device import normal_tensors


def verify_draft(
    rule: AcceptanceRule,
    drafter: Drafter,
    logits: Tensor,
    draft: Draft,
    noise: Noise,
    relaxation: Tensor,
    sampling: Sampling,
) -> tuple[Tensor | None, Verdict, Tensor]:
    """Verify a draft.

    Args:
        logits: `[B, T, V]`.
        draft, noise, relaxation: see `AcceptanceRule`.

    Returns:
        The target's probabilities float32 `[B, T, V]`, None if nothing uses them, the verdict, and the sum of each row of
        logits, float32 `[B, T]` (`sum_rows`).
    """
    if rule.verify_tokens is not None and not drafter.uses_probs:
        is_shared_chain = rule.verify_tokens is verify_shared_tokens and draft.tree.is_chain
        found = sample_from_logits(logits, sampling, noise, draft.tokens if is_shared_chain else None)
        if found is not None and found.outcome is not None:
            return None, Verdict(_chain_path(*found.tokens.shape), *found.outcome, sampled=found.tokens), found.sums
        if found is not None:
            return None, rule.verify_tokens(found.tokens, draft), found.sums
    probs = to_probs(logits, sampling)
    verdict = rule(probs, _add_unfiltered_probs(draft, rule, logits, sampling), noise, relaxation)
    return probs, verdict, sum_rows(logits)


@lru_cache(maxsize=64)
@normal_tensors()
def _chain_path(images: int, slots: int) -> Tensor:
    return torch.arange(slots).repeat(images, 1)


def _add_unfiltered_probs(draft: Draft, rule: AcceptanceRule, logits: Tensor, sampling: Sampling) -> Draft:
    """Add `Draft.unfiltered_probs` if the rule is relaxed and sampling is greedy; otherwise return the draft unchanged."""
    if rule.exact or not sampling.is_greedy:
        return draft
    return replace(draft, unfiltered_probs=to_probs(logits, sampling.with_temperature(1.0)))
