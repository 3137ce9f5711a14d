"""One step of a rule, summed exactly over drafts and coins: what follows the root, and how often each draft is accepted."""

from __future__ import annotations

import torch

from vargen.decoding import Draft, Noise, Tree


class Coins(Noise):
    """Noise whose coins are given; what would be sampled from is kept instead of sampled."""

    def __init__(self, coin: float, images: int, slots: int):
        super().__init__(torch.zeros(images, dtype=torch.int64), torch.zeros(images, slots, dtype=torch.int64))
        object.__setattr__(self, "coin", coin)
        object.__setattr__(self, "drawn_from", [])

    def uniform(self, purpose):
        return torch.full(self.position.shape, self.coin, dtype=torch.float64)

    def sample(self, probs, purpose):
        self.drawn_from.append(probs)
        return probs.argmax(-1)

    def select_slot(self, slot):
        return self

    def where(self, needed):
        return self


def random_probs(count: int, vocab: int, zeros: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count + vocab)
    probs = torch.rand(count, 2, vocab, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        probs[:, :, ::3] *= torch.rand(count, 2, 1, generator=generator, dtype=torch.float64) > 0.5
        probs[:, :, 1] += 1e-3
    return probs / probs.sum(-1, keepdim=True)


def one_step(rule, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities of the token after the root under a rule, and the chance to accept each draft: p, q float64 `[B, V]`.

    Each draft d is offered with probability q(d); the coin's threshold is found by bisection on the rule itself.
    """
    B, V = p.shape
    total, spent = torch.zeros_like(p), torch.zeros_like(p)
    rows = p[:, None].expand(B, 2, V)
    for d in range(V):
        draft = Draft(torch.full((B, 1), d), Tree.make_chain(1), q[:, None])
        low, high = torch.zeros(B, dtype=torch.float64), torch.ones(B, dtype=torch.float64)
        for _ in range(60):
            middle = (low + high) / 2
            uniforms = Coins(0.0, B, 2)
            uniforms.uniform = lambda purpose, middle=middle: middle[:, None].expand(B, 2)  # type: ignore[method-assign]
            accepted = rule(rows, draft, uniforms, torch.zeros(B, dtype=torch.float64)).count > 1
            low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
        refused = Coins(1e300, B, 2)  # no ratio is that large, unless q is 0: then the draft is never offered
        assert ((rule(rows, draft, refused, torch.zeros(B, dtype=torch.float64)).count == 1) | (q[:, d] == 0)).all()
        left = refused.drawn_from[-1][:, 0]  # the last draw of a rule is the token
        total[:, d] += q[:, d] * low
        total += (q[:, d] * (1 - low))[:, None] * left / left.sum(-1, keepdim=True)
        spent[:, d] = low
    return total, spent
