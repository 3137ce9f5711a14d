"""EAGLE with other children: the most probable tokens (EAGLE-2), or those that the image's own noise favors.

Both are choices of `TreeDrafter.children`, and record no probabilities: q of a draft token is 1.
"""

from __future__ import annotations

from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Tree
from vargen.decoding.tree_drafters import Children, Eagle


class TopK(Children):
    """The K most probable tokens, not sampled (Li et al. 2024, EAGLE-2)."""

    def sample(self, q: Tensor, count: int, noise: Noise) -> tuple[Tensor, Tensor]:
        value, token = q.topk(count, dim=-1)
        return token, value

    def score(self, q: Tensor, token: Tensor, value: Tensor, score: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        likely = score[..., None] + value.log()
        return likely, likely

    def probs(self, q: Tensor, tokens: Tensor, tree: Tree) -> None:
        return None


class SharedNoise(TopK):
    """The K largest values of log q + G with the shared noise G, for the rule `shared_noise`.

    The closer a candidate is to the largest one, the more likely the target's own noise selects it.
    """

    def sample(self, q: Tensor, count: int, noise: Noise) -> tuple[Tensor, Tensor]:
        return super().sample(q / noise.exponential(q.shape[-1], Purpose.TOKEN), count, noise)

    def score(self, q: Tensor, token: Tensor, value: Tensor, score: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        gap = (value / value[..., :1]).nan_to_num(0.0)
        likely = score[..., None] + (gap / gap.sum(-1, keepdim=True).clamp_min(1e-30)).log()
        return likely, likely


class EagleTopK(Eagle):
    """EAGLE whose head proposes its most probable tokens; for the rule `recursive_rejection`."""

    children = TopK()


class EagleSharedNoise(Eagle):
    """EAGLE whose tree shares the image's noise; for the rule `shared_noise`."""

    provides = ()
    children = SharedNoise()
