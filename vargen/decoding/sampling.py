"""Convert logits to the probabilities tokens are sampled from: temperature, top-k, top-p and softmax, in this order.

Guidance comes first; everything is computed in float32. Every method, `ar` included, takes its probabilities from here, which
defines "the same distribution" in this library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.kernels import ops
from vargen.kernels.dispatch import is_eager_cpu
from vargen.kernels.token_steps import SampledRows, sample_rows
from vargen.options import OPTIONS
from vargen.values import short_repr


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


class SlotSampling:
    """The sampling options of B slots, each of which holds an image or is free.

    An image has the same probabilities whatever is beside it. On a CPU, images with equal options are computed together, by the
    same operations as without the others. On other devices the options are tensors, so that a captured pass serves any mixture.

    Args:
        slots: number of slots B, all free.
        vocab: number of tokens V.
        device: of the logits.

    Attributes:
        options: by slot; None for a free one.
        rows: the options of each slot; those of the first image for a free slot.
        filters: whether any image has a filter or is sampled greedily. Part of the key of a captured pass.
        any_greedy: whether any image is sampled greedily.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device):
        self.options: list[Sampling | None] = [None] * slots
        self.vocab = vocab
        self.temperature = torch.ones(slots, 1, 1, dtype=torch.float32, device=device)
        self._top_k = torch.full((slots, 1, 1), vocab, dtype=torch.int64, device=device)
        self._top_p = torch.full((slots, 1, 1), ops.KEEP_ALL, dtype=torch.float64, device=device)
        self._is_greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self._set([], None)

    def reset(self, rows: list[int], sampling: Sampling) -> None:
        """Give images in some slots these options."""
        self.temperature[rows] = max(sampling.temperature, ops.MIN_TEMPERATURE)
        self._top_k[rows] = sampling.top_k or self.vocab
        self._top_p[rows] = sampling.top_p if sampling.top_p < 1 else ops.KEEP_ALL
        self._is_greedy[rows] = sampling.is_greedy
        self._set(rows, sampling)

    def free(self, rows: list[int]) -> None:
        """Forget the options of some slots."""
        self._set(rows, None)

    def _set(self, rows: list[int], sampling: Sampling | None) -> None:
        for row in rows:
            self.options[row] = sampling
        used = list(dict.fromkeys(each for each in self.options if each is not None))
        self.filters = any(each.is_greedy or each.top_k is not None or each.top_p < 1 for each in used)
        self.any_greedy = any(each.is_greedy for each in used)
        first = used[0] if used else Sampling()
        self.rows = tuple(first if each is None else each for each in self.options)
        self._arrays = (  # temperature, top-k and top-p for compiled code, `[B]` each
            np.array([max(row.temperature, ops.MIN_TEMPERATURE) for row in self.rows], np.float32),
            np.array([min(row.top_k or self.vocab, self.vocab) for row in self.rows], np.int64),
            np.array([row.top_p for row in self.rows], np.float64),
        )
        self._groups: dict[Sampling, list[int]] = {first: []}
        for row, each in enumerate(self.rows):
            self._groups.setdefault(each, []).append(row)

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities, float32 `[B, T, V]`, from guided logits `[B, T, V]`."""
        if not is_eager_cpu(logits):
            return ops.probs_by_image(logits, self.temperature, self._top_k, self._top_p, self.filters)
        return self._by_group(logits, lambda sampling: sampling)

    def probs_at_one(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities float32 `[B, T, V]` with the same filters at temperature 1, and which images are greedy, bool `[B]`."""
        if not is_eager_cpu(logits):
            one = torch.ones_like(self.temperature)
            return ops.probs_by_image(logits, one, self._top_k, self._top_p, self.filters), self._is_greedy
        return self._by_group(logits, lambda sampling: replace(sampling, temperature=1.0)), self._is_greedy

    def sample_tokens(self, logits: Tensor, noise: Noise, drafted: Tensor | None = None) -> SampledRows | None:
        """Sample the tokens of `noise.sample(self.probs(logits), Purpose.TOKEN)` by compiled code; None where there is none.

        Args:
            drafted: int64 `[B, T - 1]`, the draft tokens of a chain; see `SampledRows`.
        """
        return sample_rows(logits, self._arrays, noise.keys(Purpose.TOKEN), drafted)

    def _by_group(self, logits: Tensor, options: Callable[[Sampling], Sampling]) -> Tensor:
        if len(self._groups) == 1:
            return to_probs(logits, options(next(iter(self._groups))))
        probs = torch.empty_like(logits, dtype=torch.float32)
        for sampling, rows in self._groups.items():
            probs[rows] = to_probs(logits[rows], options(sampling))
        return probs


def to_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities, float32 `[..., V]`, from guided logits `[..., V]`."""
    return ops.probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)
