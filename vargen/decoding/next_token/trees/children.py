"""The children of a slot in a draft tree: how they are sampled, and the probabilities to record for them.

Shape suffixes: B images, F slots of one level, K children of a slot, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vargen.decoding.next_token.trees.shapes import DynamicTree, TreeShape
from vargen.decoding.noise import Noise, Purpose
from vargen.values import short_repr

ChildSampling = Literal["top-k", "without-replacement", "with-replacement", "shared-noise"]
CHILD_SAMPLING: dict[str, tuple[str, ...]] = {  # and what each provides to rules; see `Drafter.provides`
    "top-k": ("independent-per-pass",),
    "without-replacement": ("independent-per-pass",),
    "with-replacement": ("independent-per-pass", "with-replacement"),
    "shared-noise": (),
}


def validate_child_sampling(child_sampling: object, shape: TreeShape) -> None:
    """Raise ValueError unless `child_sampling` is a known way to select children and applies to trees of this shape."""
    if child_sampling not in CHILD_SAMPLING:
        raise ValueError(f"child_sampling must be one of {', '.join(CHILD_SAMPLING)}, got {short_repr(child_sampling)}")
    if child_sampling == "with-replacement" and isinstance(shape, DynamicTree):
        raise ValueError(
            "child_sampling 'with-replacement' needs a StaticTree: in a DynamicTree the number of siblings depends on them"
        )


def sample_children(probs: Tensor, count: int, child_sampling: ChildSampling, noise: Noise) -> tuple[Tensor, Tensor]:
    """Select the children of each slot.

    Returns int64 `[B, F, K]`, in order, and the float `[B, F, K]` values that define the order, which are 0 where a slot has no
    further child.

    Args:
        probs: float32 `[B, F, V]`.
        count: K.
        child_sampling: how the K children of a slot are selected from its q. `"top-k"`: the K most probable tokens (EAGLE-2),
            not sampled. `"without-replacement"`: the K largest values of log q + Gumbel noise (Kool et al. 2019), in descending
            order. `"with-replacement"`: sampled independently of each other, for static trees only. `"shared-noise"`: the K
            largest values of log q + G with the shared noise G, for the rule `shared_noise`.
        noise: its position `[B, 1]` is that of all these children.
    """
    B, F, V = probs.shape
    if child_sampling == "top-k":
        order = probs
    elif child_sampling == "shared-noise":
        order = probs / noise.exponential(V, Purpose.TOKEN)
    else:
        if child_sampling == "with-replacement":
            ranks = torch.arange(count, device=probs.device).repeat(F)
            places = torch.arange(F, device=probs.device).repeat_interleave(count)
            samples = noise.fold_in(places * count + ranks).sample(probs.repeat_interleave(count, 1), Purpose.DRAFT)
            drafted = samples.view(B, F, count)
            return drafted, probs.gather(2, drafted)
        slots = noise.fold_in(torch.arange(F, device=probs.device))
        return slots.sample_without_replacement(probs, count, Purpose.DRAFT)
    value, token = order.topk(count, dim=-1)
    return token, value


def exclude_earlier_siblings(q: Tensor, tokens: Tensor, siblings: Tensor, earlier: Tensor) -> Tensor:
    """Remove the earlier siblings of draft tokens `[B, S]` from q `[B, S, V]`, and renormalize.

    Args:
        siblings: tokens `[B, S, K]` or `[B, 1, K]`, which hold the siblings of each draft token.
        earlier: bool, `[B, S, K]` or `[S, K]`, which of them are earlier siblings.
    """
    own = tokens[..., None]
    rest = q.scatter(2, torch.where(earlier, siblings, own), 0.0).scatter(2, own, q.gather(2, own))
    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)
