"""State of next-scale images during generation: drafts, verification, the canvas.

Shape suffixes: B images, L tokens of all scales, n tokens of one scale, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding.next_scale.protocols import ScaleModel
from vargen.decoding.next_scale.schedule import Stage
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.stats import DecodeStats

# Fixed tokens of a scale, given the canvas before it and its index: tokens int64 [B, n], and which are fixed, bool [B, n].
Keep = Callable[[Tensor, int], tuple[Tensor, Tensor]]
SKIPPED_TOKEN = -1  # token of scales that a schedule skips


class Draws(Protocol):
    """Runs one of the models; see `vargen.decoding.next_scale.loop`."""

    def logits(self, name: str, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]) -> list[Tensor]: ...


class Drafts:
    """Scales proposed by the draft model, from the current one on.

    Per scale: tokens, probabilities, the transformer input of the next scale, and the canvas after it.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.probs: list[Tensor] = []
        self.inputs: list[Tensor | None] = []
        self.canvases: list[Tensor] = []


class Images:
    """The tokens of B images during generation.

    Attributes:
        tokens: int64 `[B, L]`.
        length: int64 `[B]`, number of tokens decided.
        round: int64 `[B]`, the scale at which the current draft of the image starts.
        scale: the first scale that is not decided in every image.
        canvases: the canvas after the first k scales, for k from 0 to `scale`.
        inputs: transformer inputs of scales 0 to `scale`.
    """

    def __init__(self, seeds: Tensor, model: ScaleModel, stages: Sequence[Stage], sampling: Sampling, keep: Keep | None):
        self.seeds, self.model, self.stages, self.sampling, self.keep = seeds, model, stages, sampling, keep
        B, device = len(seeds), seeds.device
        self.sizes = model.scale_tokens
        self.ends = list(accumulate(self.sizes))
        self.tokens = torch.zeros(B, self.ends[-1], dtype=torch.int64, device=device)
        self.length = torch.zeros(B, dtype=torch.int64, device=device)
        self.round = torch.zeros_like(self.length)
        self.scale = 0
        self.canvases = [model.canvas(B)]
        self.inputs: list[Tensor | None] = [None]
        self.by_scale: list[dict[str, Any]] = [
            {"tokens": n, "model": stage.model, "passes": 0, "drafted": 0, "kept": 0, "seconds": 0.0}
            for n, stage in zip(self.sizes, stages, strict=True)
        ]
        self.histogram: Counter[int] = Counter()
        self._clock = time.perf_counter()

    def place(self, scale: int) -> slice:
        """Return the slice of a scale's tokens in `tokens`."""
        return slice(self.ends[scale] - self.sizes[scale], self.ends[scale])

    def noise(self, scale: int) -> Noise:
        """Return the noise at a scale's tokens.

        It is the same in every pass; that is safe because the samples of a discarded draft had no effect.
        """
        at = self.place(scale)
        return Noise(self.seeds, torch.arange(at.start, at.stop, device=self.seeds.device).expand(len(self.seeds), -1))

    def begin(self, given: Sequence[Tensor]) -> None:
        """Start after the given scales."""
        for scale, tokens in enumerate(given):
            self.tokens[:, self.place(scale)] = tokens.to(self.tokens)
            self.length = torch.full_like(self.length, self.ends[scale])
            self.by_scale[scale]["model"] = "given"
            self._add(scale)

    def leave_out(self) -> None:
        """Skip the current scale: it adds nothing to the canvas."""
        at = self.place(self.scale)
        self.tokens[:, at] = SKIPPED_TOKEN
        self.length = self.length.clamp(min=at.stop)
        self._append(*self.model.add(self.canvases[-1], None, self.scale))

    def _add(self, scale: int) -> None:
        self._append(*self.model.add(self.canvases[-1], self.tokens[:, self.place(scale)], scale))

    def _append(self, canvas: Tensor, following: Tensor | None) -> None:
        self.canvases.append(canvas)
        self.inputs.append(following)
        self.scale += 1

    def guidance(self) -> list[float]:
        """Guidance factors of the scales from the current one on."""
        return [stage.guidance for stage in self.stages[self.scale :]]

    def probs(self, logits: Tensor, scale: int, canvas: Tensor) -> Tensor:
        """Probabilities of a scale's tokens, `[B, n, V]`; one-hot where a token is fixed."""
        probs = to_probs(logits, self.stages[scale].sampling(self.sampling, logits.shape[-1]))
        if self.keep is None:
            return probs
        tokens, stands = self.keep(canvas, scale)
        certain = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
        return torch.where(stands[..., None], certain, probs)

    def end_of(self, stage: Stage) -> int:
        """Return the first scale after the current one that belongs to another stage."""
        return next((k for k in range(self.scale, len(self.stages)) if self.stages[k] is not stage), len(self.stages))

    def drafted(self, players: Draws, stage: Stage) -> Drafts:
        """Draft the next scales, up to the number the stage sets, excluding the last scale of the stage.

        The last is excluded because the pass that verifies the draft samples one more scale itself.
        """
        drafts, canvas = Drafts(), self.canvases[-1]
        for scale in range(self.scale, min(self.scale + stage.drafted, self.end_of(stage) - 1)):
            logits = players.logits("draft", [*self.inputs, *drafts.inputs], 1, [stage.guidance])[0]
            probs = self.probs(logits, scale, canvas)
            tokens = self.noise(scale).draw(probs, stage.rule.drafts)
            at = self.place(scale)
            tokens = torch.where((self.length >= at.stop)[:, None], self.tokens[:, at], tokens)
            canvas, following = self.model.add(canvas, tokens, scale)
            drafts.tokens.append(tokens)
            drafts.probs.append(probs)
            drafts.inputs.append(following)
            drafts.canvases.append(canvas)
        return drafts

    def judged(self, logits: Sequence[Tensor], drafts: Drafts) -> int:
        """Decide the scales that a pass fed, as far as each image's draft is accepted.

        Whether a scale counts as drafted depends on where the image's own round began, not on the position of the batch, so the
        image equals the one generated alone.

        Returns:
            Number of scales completed in all images by this pass.
        """
        self._tick()
        stage = self.stages[self.scale]
        last, canvas = self.end_of(stage) - 1, self.canvases[-1]
        going = torch.ones_like(self.length, dtype=torch.bool)
        self.round = self.round.clamp(min=self.scale)
        for i, of_scale in enumerate(logits):
            scale, at = self.scale + i, self.place(self.scale + i)
            probs, noise = self.probs(of_scale, scale, canvas), self.noise(scale)
            fresh = going & (self.length < at.stop)
            judged = (scale < self.round + stage.drafted) & (scale < last)
            if i < len(drafts.tokens):
                draft = drafts.tokens[i]
                tokens, same = stage.rule(probs, drafts.probs[i], draft, noise)
                if not judged.all():
                    own = noise.draw(probs, Purpose.TOKEN)
                    tokens = torch.where(judged[:, None], tokens, own)
                    same = torch.where(judged, same, (own == draft).all(1))
                canvas = drafts.canvases[i]
                self.by_scale[scale]["drafted"] += int((fresh & judged).sum())
                self.by_scale[scale]["kept"] += int((fresh & judged & same).sum())
            else:
                fresh = fresh & ~judged  # not for images that draft this scale in the next pass
                tokens, same = noise.draw(probs, Purpose.TOKEN), going
            self.by_scale[scale]["passes"] += 1
            self.tokens[:, at] = torch.where(fresh[:, None], tokens, self.tokens[:, at])
            self.length = torch.where(fresh, at.stop, self.length)
            self.round = torch.where(fresh & ~(judged & same), scale + 1, self.round)
            going = going & (same | ~fresh)
        if not drafts.tokens:  # known without synchronization
            return 1
        return self.ends.index(int(self.length.amin())) + 1 - self.scale

    def _tick(self) -> None:
        now = time.perf_counter()
        self.by_scale[self.scale]["seconds"] += now - self._clock
        self._clock = now

    def report(self, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the harness needs: values that are finite exactly if the logits are, their positions, and all tokens."""
        sums = torch.cat([each.sum(-1, keepdim=True) for each in logits], dim=1)
        start = self.place(self.scale).start
        position = torch.arange(start, start + sums.shape[1], device=sums.device).expand(len(sums), -1)
        return sums, position, self.tokens

    def advance(self, scales: int) -> None:
        """Add the scales completed in every image to the canvas."""
        self.histogram[sum(self.sizes[self.scale : self.scale + scales])] += len(self.seeds)
        for scale in range(self.scale, self.scale + scales):
            self._add(scale)

    def stats(self, name: str, fed: dict[str, Counter[int]]) -> DecodeStats:
        histogram = [self.histogram.get(k, 0) for k in range(max(self.histogram, default=0) + 1)]
        return DecodeStats(
            accelerator=name,
            images=len(self.seeds),
            tokens=int(self.length.sum()),
            accepted_histogram=histogram,
            fed=dict(fed["target"]),
            draft_fed=dict(fed["draft"]),
            relaxation=[0.0] * len(self.seeds),
            seeds=self.seeds.tolist(),
            threads=torch.get_num_threads(),
            by_scale=self.by_scale,
        )
