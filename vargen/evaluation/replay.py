"""Replay of measured acceptance: the speed of a large model if its drafts were accepted as often as those of a small one.

Random weights accept nearly no draft token, so their speed says nothing. A replay runs the real passes, drafting and sampling
of a network, and only the number of accepted tokens comes from a histogram that was measured with trained weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Accelerator, Draft
from vargen.decoding.next_token.draft import Verdict
from vargen.decoding.next_token.protocols import AcceptanceRule
from vargen.decoding.noise import Noise, Purpose


class ReplayedAcceptance(AcceptanceRule):
    """Commit k tokens with the frequency of a measured histogram, whatever the probabilities are; for chains.

    Args:
        histogram: `[k]` passes that committed k tokens, as in `MethodResult.committed_histogram`; entry 0 is not used.

    Raises:
        ValueError: if no pass committed a token.
    """

    exact = False

    def __init__(self, histogram: Sequence[int]):
        counts = torch.tensor([0, *histogram[1:]], dtype=torch.float64)
        if not counts.sum() > 0:
            raise ValueError(f"histogram must count passes that committed tokens, got {list(histogram)}")
        self.cumulative = (counts.cumsum(0) / counts.sum()).float()

    def bind(self, model: Any) -> ReplayedAcceptance:
        bound = copy.copy(self)
        bound.cumulative = self.cumulative.to(model.device)
        return bound

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        B, T = probs.shape[:2]
        uniform = noise.uniform(Purpose.ACCEPT)[:, :1].contiguous()
        count = torch.searchsorted(self.cumulative, uniform)[:, 0].clamp(min=1, max=T)
        sampled = noise.sample(probs, Purpose.RESAMPLE).gather(1, (count - 1)[:, None])[:, 0]
        path = torch.arange(T, device=probs.device).expand(B, T)
        return Verdict(path, count, sampled, relaxation=torch.zeros_like(relaxation))


def replay_acceptance(method: Accelerator, histogram: Sequence[int]) -> Accelerator:
    """Return the method with its acceptance replaced by the histogram, named `NAME, replayed`."""
    return replace(method, name=f"{method.name}, replayed", acceptance=ReplayedAcceptance(histogram))
