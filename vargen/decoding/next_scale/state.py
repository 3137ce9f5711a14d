"""State of next-scale images during generation: tokens, inputs, the canvas.

Shape suffixes: B images, L tokens of all scales, n tokens of one scale, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.compiled_sampling import sample_from_logits
from vargen.decoding.harness import sum_rows
from vargen.decoding.next_scale.protocols import ScaleModel
from vargen.decoding.next_scale.schedule import Stage
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.stats import DecodeStats

# Fixed tokens of a scale, given the canvas before it and its index: tokens int64 [B, n], and which are fixed, bool [B, n].
FixedTokens = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class ImageState:
    """The tokens of B images during generation.

    Attributes:
        tokens: int64 `[B, L]`.
        length: int64 `[B]`, number of tokens decided.
        scale: the first scale that is not decided.
        canvas: the canvas after the scales before it.
        inputs: transformer inputs of scales 0 to `scale`.
    """

    def __init__(
        self,
        seeds: Tensor,
        model: ScaleModel,
        stages: Sequence[Stage],
        sampling: Sampling,
        fixed_scales: Sequence[Tensor] = (),
        fixed_tokens: FixedTokens | None = None,
        noise_class: Callable[[Tensor, Tensor], Noise] = Noise,
    ):
        self.seeds, self.model, self.stages = seeds, model, stages
        self.sampling, self.fixed_tokens, self.noise_class = sampling, fixed_tokens, noise_class
        B, device = len(seeds), seeds.device
        self.sizes = model.scale_tokens
        self.ends = list(accumulate(self.sizes))
        self.tokens = torch.zeros(B, self.ends[-1], dtype=torch.int64, device=device)
        self.length = torch.zeros(B, dtype=torch.int64, device=device)
        self.scale = 0
        self.canvas = model.canvas(B)
        self.inputs: list[Tensor | None] = [None]
        self.by_scale: list[dict[str, Any]] = [
            {"tokens": n, "model": stage.model, "passes": 0, "seconds": 0.0}
            for n, stage in zip(self.sizes, stages, strict=True)
        ]
        self.histogram: Counter[int] = Counter()
        self._last_time = time.perf_counter()
        for scale, tokens in enumerate(fixed_scales):
            self.tokens[:, self.token_slice(scale)] = tokens.to(self.tokens)
            self.length = torch.full_like(self.length, self.ends[scale])
            self.by_scale[scale]["model"] = "given"
            self._append_scale()

    def token_slice(self, scale: int) -> slice:
        """Return the slice of a scale's tokens in `tokens`."""
        return slice(self.ends[scale] - self.sizes[scale], self.ends[scale])

    def make_noise(self, scale: int) -> Noise:
        """Return the noise at a scale's tokens."""
        at = self.token_slice(scale)
        position = torch.arange(at.start, at.stop, device=self.seeds.device)
        return self.noise_class(self.seeds, position.expand(len(self.seeds), -1))

    def _append_scale(self) -> None:
        self.canvas, following = self.model.add(self.canvas, self.tokens[:, self.token_slice(self.scale)], self.scale)
        self.inputs.append(following)
        self.scale += 1

    def sample_scale(self, logits: Tensor) -> None:
        """Sample the tokens of the current scale with the shared noise."""
        self._charge_time()
        noise, at = self.make_noise(self.scale), self.token_slice(self.scale)
        found = None if self.fixed_tokens is not None else sample_from_logits(logits, self.sampling, noise)
        self.tokens[:, at] = noise.sample(self._compute_probs(logits), Purpose.TOKEN) if found is None else found.tokens
        self.length = torch.full_like(self.length, at.stop)
        self.by_scale[self.scale]["passes"] += 1

    def _compute_probs(self, logits: Tensor) -> Tensor:
        """Probabilities of the current scale's tokens, `[B, n, V]`; one-hot where a token is fixed."""
        probs = to_probs(logits, self.sampling)
        if self.fixed_tokens is None:
            return probs
        tokens, fixed = self.fixed_tokens(self.canvas, self.scale)
        one_hot = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
        return torch.where(fixed[..., None], one_hot, probs)

    def _charge_time(self) -> None:
        now = time.perf_counter()
        self.by_scale[self.scale]["seconds"] += now - self._last_time
        self._last_time = now

    def summarize_pass(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the harness needs: values that are finite exactly if the logits are, their positions, and all tokens."""
        at = self.token_slice(self.scale)
        position = torch.arange(at.start, at.stop, device=logits.device).expand(len(logits), -1)
        return sum_rows(logits), position, self.tokens

    def commit_scale(self) -> None:
        """Add the current scale to the canvas."""
        self.histogram[self.sizes[self.scale]] += len(self.seeds)
        self._append_scale()

    def stats(self, name: str, fed: dict[str, Counter[int]]) -> DecodeStats:
        histogram = [self.histogram.get(k, 0) for k in range(max(self.histogram, default=0) + 1)]
        return DecodeStats(
            accelerator=name,
            images=len(self.seeds),
            tokens=int(self.length.sum()),
            committed_histogram=histogram,
            passes_by_width=dict(fed["target"]),
            draft_passes_by_width=dict(fed["draft"]),
            relaxation=[0.0] * len(self.seeds),
            seeds=self.seeds.tolist(),
            threads=torch.get_num_threads(),
            by_scale=self.by_scale,
        )
