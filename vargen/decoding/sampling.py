"""Convert logits to the probabilities tokens are sampled from: temperature, top-k, top-p, min-p and softmax, in this order.

Guidance comes first; everything is computed in float32. Every method, `ar` included, takes its probabilities from here, which
defines "the same distribution" in this library.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.kernels import ops
from vargen.kernels.token_steps import SampledRows, sample_rows
from vargen.values import OPTIONS, short_repr


@dataclass(frozen=True)
class Sampling:
    """How probabilities are computed from guided logits; see `to_probs`.

    Args:
        temperature: at least 0; 0 is greedy.
        top_k: 1 to V; None or 0 disables it, and reads as None.
        top_p: in (0, 1].
        min_p: in [0, 1]; 0 disables it.

    Raises:
        ValueError: if a value is out of range.
    """

    temperature: float = field(default=1.0, metadata={"option": OPTIONS["temperature"]})
    top_k: int | None = field(default=None, metadata={"option": OPTIONS["top_k"]})
    top_p: float = field(default=1.0, metadata={"option": OPTIONS["top_p"]})
    min_p: float = field(default=0.0, metadata={"option": OPTIONS["min_p"]})

    def __post_init__(self) -> None:
        for each in fields(self):  # convert NumPy numbers, which JSON cannot serialize
            object.__setattr__(self, each.name, each.metadata["option"].range.check(each.name, getattr(self, each.name)))
        object.__setattr__(self, "top_k", self.top_k or None)

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

    An image has the same probabilities whatever is beside it. The options are tensors, so that a captured pass serves any
    mixture; a free slot has those of the first image, with which it is computed.

    Args:
        slots: number of slots B, all free.
        vocab: number of tokens V.
        device: of the logits.

    Attributes:
        options: by slot; None for a free one.
        temperature, top_k, top_p, min_p: of each slot, float32, int64, float64 and float64 `[B, 1, 1]`, as
            `ops.probs_by_image` takes them.
        is_greedy: bool `[B]`.
        filters, has_min_p: whether any image has a filter or is sampled greedily, and whether any has min-p.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device):
        self.options: list[Sampling | None] = [None] * slots
        self.vocab = vocab
        self.temperature = torch.zeros(slots, 1, 1, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(slots, 1, 1, dtype=torch.int64, device=device)
        self.top_p = torch.zeros(slots, 1, 1, dtype=torch.float64, device=device)
        self.min_p = torch.zeros(slots, 1, 1, dtype=torch.float64, device=device)
        self.is_greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self.set([], None)

    def set(self, slots: list[int], sampling: Sampling | None) -> None:
        """Give the images in some slots these options; None: the slots are free."""
        for slot in slots:
            self.options[slot] = sampling
        used = [each for each in self.options if each is not None]
        self.has_min_p = any(each.min_p > 0 for each in used)
        limited = any(each.is_greedy or each.top_k is not None or each.top_p < 1 for each in used)
        self.filters = limited or self.has_min_p
        rows = [each or (used or [Sampling()])[0] for each in self.options]
        for held, values in (
            (self.temperature, [max(row.temperature, ops.MIN_TEMPERATURE) for row in rows]),
            (self.top_k, [row.top_k or self.vocab for row in rows]),
            (self.top_p, [row.top_p if row.top_p < 1 else ops.KEEP_ALL for row in rows]),
            (self.min_p, [row.min_p for row in rows]),
            (self.is_greedy, [row.is_greedy for row in rows]),
        ):
            held.copy_(torch.tensor(values, dtype=held.dtype).view(held.shape))

    @property
    def kind(self) -> tuple[bool, bool]:
        """What a captured pass depends on."""
        return self.filters, self.has_min_p

    def may_be_greedy(self) -> bool:
        """Return False if no image is sampled greedily, as far as the host and the key of a captured pass say."""
        known = ops.host_values(self.is_greedy)
        return self.filters if known is None else any(known)

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities, float32 `[B, T, V]`, from guided logits `[B, T, V]`."""
        return self._probs(logits, self.temperature)

    def probs_at_one(self, logits: Tensor) -> Tensor:
        """Probabilities float32 `[B, T, V]` with the same filters at temperature 1."""
        return self._probs(logits, torch.ones_like(self.temperature))

    def _probs(self, logits: Tensor, temperature: Tensor) -> Tensor:
        min_p = self.min_p if self.has_min_p else None
        return ops.probs_by_image(logits, temperature, self.top_k, self.top_p, min_p, self.filters)

    def sample_tokens(self, logits: Tensor, noise: Noise, drafted: Tensor | None = None) -> SampledRows | None:
        """Sample the tokens of `noise.sample(self.probs(logits), Purpose.TOKEN)` by compiled code; None where there is none.

        Args:
            drafted: int64 `[B, T - 1]`, the draft tokens of a chain; see `SampledRows`.
        """
        if self.has_min_p:
            return None
        return sample_rows(logits, (self.temperature, self.top_k, self.top_p), noise.keys(Purpose.TOKEN), drafted)


def to_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities, float32 `[..., V]`, from guided logits `[..., V]`."""
    return ops.probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
