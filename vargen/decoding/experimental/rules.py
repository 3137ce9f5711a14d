"""Rules that lose here: recursive rejection and k-SEQ, which are exact on trees; typical acceptance; fixed mixtures.

Shape suffixes: B images, T tokens fed in one pass, S draft tokens, K children of a node, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.relaxed_rules import RelaxedRule
from vargen.decoding.rules import acceptance_rule, dense_draft_probs, gather_prob, residual_weights
from vargen.decoding.tree import Draft, Verdict
from vargen.decoding.tree_rules import DraftTokens, SiblingDecision, verify_siblings
from vargen.values import number_field

_BISECTIONS = 30  # bisection steps on [1, K]: beyond the resolution of float32


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def recursive_rejection(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Verify siblings in order: accept x if u < p(x) / q(x); after a rejection, p becomes norm((p - q)+) for the next sibling.

    The recorded q of each sibling selects one of three published variants. Sampled with replacement, all siblings from one q:
    Miao et al. 2024, SpecInfer. Sampled without replacement, q excluding the earlier siblings: Jeon et al. 2024, RSD; Chen et
    al. 2024, Sequoia. Not sampled, q being one on the token itself, so that x is accepted with probability p(x) and then
    removed from p: Li et al. 2024, EAGLE-2.

    On a chain it equals `speculative_sampling`. The output is distributed as the target provided that each q is the
    distribution its sibling was actually sampled from. Arguments: see `AcceptanceRule`.
    """
    return verify_siblings(_test_ratio, probs, draft, noise, relaxation)


def _test_ratio(drafted: DraftTokens) -> SiblingDecision:
    p, q = drafted.p_and_q
    return SiblingDecision(p / q)


@acceptance_rule(exact=True, topologies=("chain", "tree"), requires=("with-replacement",))
def k_seq(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Accept the first of K siblings, all sampled from one q, with u < p(x) / (rho q(x)).

    k-SEQ of SpecTr (Sun et al. 2023, algorithm 2). With beta(rho) = sum min(q, p / rho), one sibling is accepted with
    probability beta, and some sibling of K with probability a = 1 - (1 - beta)^K. If all are rejected, the next token is
    sampled from p - min(q, p / rho) a / beta, which is nonnegative where a <= rho beta. The smallest such rho in [1, K] is
    found by bisection, for all slots at once.

    With one child per slot it equals `speculative_sampling`. The number of siblings of a slot must not depend on the samples.
    Arguments: see `AcceptanceRule`.
    """
    draft_probs = dense_draft_probs(probs, draft)
    B, T, _ = probs.shape
    image, tree = torch.arange(B, device=probs.device)[:, None], draft.tree
    children = tree.children.expand(B, T, -1)  # [B, T, K]
    at = (children - 1).clamp(min=0)
    exists = children > 0 if draft.valid is None else (children > 0) & draft.valid[image[..., None], at]
    q = draft_probs[image, at[..., 0]] if tree.max_children else probs  # shared by all siblings of a slot
    number = exists.sum(-1).to(probs.dtype)
    rho, beta = _solve_rho(probs, q, number)
    tokens = draft.tokens[image[..., None], at]
    accept_prob = probs.gather(2, tokens) / (rho[..., None] * q.gather(2, tokens))
    uniforms = [noise.fold_in(rank).uniform(Purpose.ACCEPT) for rank in range(tree.max_children)]
    hit = exists & (torch.stack(uniforms, -1) < accept_prob) if uniforms else exists
    hit = hit & (hit.cumsum(-1) == 1)  # only the first
    accepted = torch.zeros(B, T, dtype=torch.bool, device=probs.device).scatter(1, children.flatten(1), hit.flatten(1))
    path, count = tree.follow(accepted)
    last = path.gather(1, count[:, None] - 1)
    accept_any = 1 - (1 - beta) ** number
    share = torch.where(beta > 0, accept_any / beta, 0.0)[image, last]
    target = probs[image, last]
    excess = torch.minimum(q[image, last], target / rho[image, last][..., None]) * share[..., None]
    residual = residual_weights(target, excess)
    return Verdict(path, count, noise.select_slot(last[:, 0]).sample(residual, Purpose.RESIDUAL)[:, 0])


def _solve_rho(p: Tensor, q: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho and beta(rho), `[B, T]` each, for `number` siblings `[B, T]`; a <= rho beta holds up to rounding."""
    low, high = torch.ones_like(number), number.clamp(min=1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle[..., None]).sum(-1)
        fits = 1 - (1 - beta) ** number <= middle * beta
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high, torch.minimum(q, p / high[..., None]).sum(-1)


@dataclass(frozen=True)
class TypicalRule(RelaxedRule):
    """Relaxed rule: always accept a draft token x with p(x) > min(epsilon, alpha exp(-H)), H being the entropy of p in nats.

    Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1). Other draft tokens get the exact test, where Medusa rejects
    them: rejecting more than the exact rule adds bias for no gain. Image models have high entropy, so the second bound
    dominates: at 6 nats, tokens with p = 0.0007 are typical. Defaults are those of Medusa's helper function, with alpha about
    the square root of epsilon; its `generate` passes the two swapped.

    Args:
        epsilon: in (0, 1].
        alpha: above 0; the paper uses about the square root of epsilon.
        budget, tightening: see `RelaxedRule`.
    """

    epsilon: float = number_field(0.09, 0, 1, open_below=True)
    alpha: float = number_field(0.3, 0, open_below=True)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
        return (gather_prob(p, tokens) > (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)).to(p.dtype)


@dataclass(frozen=True)
class MixtureRule(RelaxedRule):
    """Relaxed rule: verify against the mixture w p + (1 - w) q, so accept draft token x if u < w p(x) / q(x) + 1 - w.

    The static ensemble of DIVERSED (2026, arXiv 2604.07622); its learned weights by context are not here. A draft token sampled
    from q is accepted with probability 1 - w TV(p, q), and the result is distributed as the mixture, at a total variation of
    (1 - w) TV(p, q) from p. A draft token that the filters set to probability zero is never accepted: greedy sampling is exact.

    Args:
        weight: w, from 0, where all possible draft tokens are accepted, to 1, the exact rule.
        budget, tightening: see `RelaxedRule`.
    """

    weight: float = number_field(0.8, 0, 1)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        own_p, own_q = gather_prob(p, tokens), gather_prob(q, tokens)
        return torch.where(own_p > 0, self.weight * own_p / own_q.clamp_min(1e-30) + 1 - self.weight, 0.0)
