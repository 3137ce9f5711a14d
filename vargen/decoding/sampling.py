"""Convert logits to the probabilities tokens are sampled from: temperature, top-k, top-p and softmax, in this order.

Guidance comes first (`apply_guidance`); everything is computed in float32. Every method, `ar` included, takes its probabilities
from here, which defines "the same distribution" in this library.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from vargen.kernels.dispatch import supports_rows
from vargen.kernels.row_ops import kth_largest_value, top_k_sorted
from vargen.options import OPTIONS
from vargen.values import short_repr

MIN_TEMPERATURE = 1e-5  # used in place of 0 (greedy): dividing float32 logits by it leaves only the argmax, or ties


@dataclass(frozen=True)
class Sampling:
    """How probabilities are computed from guided logits; see `to_probs`.

    Args:
        temperature: at least 0; 0 is greedy.
        top_k: 1 to V; None disables it.
        top_p: in (0, 1].

    Raises:
        ValueError: if a value is out of range.
    """

    temperature: float = field(default=1.0, metadata={"option": OPTIONS["temperature"]})
    top_k: int | None = field(default=None, metadata={"option": OPTIONS["top_k"]})
    top_p: float = field(default=1.0, metadata={"option": OPTIONS["top_p"]})

    def __post_init__(self) -> None:
        for each in fields(self):  # convert NumPy numbers, which JSON cannot serialize
            object.__setattr__(self, each.name, each.metadata["option"].check(getattr(self, each.name)))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def validate_top_k(self, vocab: int) -> None:
        """Raise ValueError if `top_k` exceeds the vocabulary."""
        if self.top_k is not None and self.top_k > vocab:
            raise ValueError(
                f"top_k must be at most the vocabulary of {vocab} tokens, got {short_repr(self.top_k)}; None keeps all"
            )


def apply_guidance(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance on float32 logits: u + s (c - u) (Ho & Salimans 2022, in LlamaGen's form)."""
    return unconditional + scale * (conditional - unconditional)


def filter_logits(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Set the logits `[..., V]` that the filters remove to -inf.

    top-k keeps all values that are at least the k-th largest. top-p then keeps the most probable tokens until their sum exceeds
    p, including the one that crosses it. Ties are kept in both cases, so the result depends on values and not on the order of
    equal values in a sort.
    """
    kept = min(top_k or logits.shape[-1], logits.shape[-1])
    if top_p < 1.0:
        ordered = top_k_sorted(logits, kept)
        before = (ordered.softmax(-1).cumsum(-1) <= top_p).sum(-1, keepdim=True)
        least = ordered.gather(-1, before.clamp(max=kept - 1))
    elif kept < logits.shape[-1]:
        least = kth_largest_value(logits, kept)
    else:
        return logits
    return torch.where(logits < least, float("-inf"), logits)


def to_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities, float32 `[..., V]`, from guided logits `[..., V]`."""
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    if supports_rows(logits) and not torch.is_grad_enabled():
        from vargen.kernels.sampler import sample_from_logits

        made = sample_from_logits(logits, temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        assert made.probs is not None
        return made.probs
    scaled = logits.float() / temperature
    return filter_logits(scaled, sampling.top_k, sampling.top_p).softmax(-1)
