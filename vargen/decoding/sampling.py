"""Convert logits to the probabilities tokens are sampled from: temperature, top-k, top-p and softmax, in this order.

Guidance comes first (`apply_guidance`); everything is computed in float32. Every method, `ar` included, takes its probabilities
from here, which defines "the same distribution" in this library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

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

    def with_temperature(self, temperature: float) -> Sampling:
        """Return the options with another temperature."""
        return replace(self, temperature=temperature)

    def select_rows(self, rows: Tensor) -> Sampling:
        """Return the options of some images `[n]` of a batch, which all have these."""
        return self

    def validate_top_k(self, vocab: int) -> None:
        """Raise ValueError if `top_k` exceeds the vocabulary."""
        if self.top_k is not None and self.top_k > vocab:
            raise ValueError(
                f"top_k must be at most the vocabulary of {vocab} tokens, got {short_repr(self.top_k)}; None keeps all"
            )


class RowSampling(Sampling):
    """The sampling options of each image of a batch; see `to_probs`.

    Images with equal options are computed together, by the same operations as without the others.

    Args:
        rows: one per image. For relaxed rules, either all are greedy or none is.
    """

    def __init__(self, rows: Sequence[Sampling]):
        super().__init__(temperature=rows[0].temperature)  # for `is_greedy`
        object.__setattr__(self, "rows", list(rows))
        self._find_groups()

    rows: list[Sampling]
    _groups: dict[Sampling, list[int]]

    def _find_groups(self) -> None:
        groups: dict[Sampling, list[int]] = {}
        for row, sampling in enumerate(self.rows):
            groups.setdefault(sampling, []).append(row)
        object.__setattr__(self, "_groups", groups)

    @property
    def is_mixed(self) -> bool:
        """Whether options differ between images."""
        return len(self._groups) > 1

    def with_temperature(self, temperature: float) -> RowSampling:
        return RowSampling([each.with_temperature(temperature) for each in self.rows])

    def select_rows(self, rows: Tensor) -> RowSampling:
        return RowSampling([self.rows[row] for row in rows.tolist()])

    def validate_top_k(self, vocab: int) -> None:
        for each in self.rows:
            each.validate_top_k(vocab)

    def insert_rows(self, new: RowSampling, rows: Tensor) -> RowSampling:
        """Replace the options of some rows `[n]` of the batch by those of n other images, in place."""
        for row, sampling in zip(rows.tolist(), new.rows, strict=True):
            self.rows[row] = sampling
        object.__setattr__(self, "temperature", new.temperature)
        self._find_groups()
        return self

    def to_probs(self, logits: Tensor) -> Tensor:
        """Probabilities, float32 `[B, ..., V]`, from guided logits `[B, ..., V]`."""
        if not self.is_mixed:
            return to_probs(logits, next(iter(self._groups)))
        probs = torch.empty_like(logits, dtype=torch.float32)
        for sampling, rows in self._groups.items():
            index = torch.tensor(rows, device=logits.device)
            probs[index] = to_probs(logits[index], sampling)
        return probs


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
    if isinstance(sampling, RowSampling):
        return sampling.to_probs(logits)
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    if supports_rows(logits) and not torch.is_grad_enabled():
        from vargen.kernels.sampler import probs_from_logits

        return probs_from_logits(logits, temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    scaled = logits.float() / temperature
    return filter_logits(scaled, sampling.top_k, sampling.top_p).softmax(-1)
