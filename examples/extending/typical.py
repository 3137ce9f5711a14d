"""A relaxed acceptance rule: typical acceptance, with the exact test for other draft tokens (Medusa rejects them)."""

from dataclasses import replace

import torch

from vargen.decoding import Purpose
from vargen.decoding.relaxed_rules import sum_relaxation
from vargen.decoding.rules import acceptance_rule, gather_p_and_q, verify_chain


@acceptance_rule(exact=False)
def typical(probs, draft, noise, relaxation, epsilon=0.3, alpha=0.6):
    """Relaxed: accept a draft that is typical of the target (Cai et al. 2024, Medusa, section 2.3.1)."""
    p, q = gather_p_and_q(probs, draft)  # [B, T - 1] each: what target and drafter gave the drafted token
    entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1)[:, :-1]
    exact = (p / q).clamp(max=1)
    accept_prob = torch.where(p > (alpha * (-entropy).exp()).clamp(max=epsilon), 1.0, exact)
    excess = accept_prob - exact
    verdict = verify_chain(noise.uniform(Purpose.ACCEPT)[:, :-1] < accept_prob, probs, draft, noise)
    return replace(verdict, relaxation=sum_relaxation(excess, verdict, draft))
