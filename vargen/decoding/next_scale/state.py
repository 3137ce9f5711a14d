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

from vargen.decoding.compiled_sampling import sample_from_logits
from vargen.decoding.harness import sum_rows
from vargen.decoding.next_scale.protocols import ScaleModel
from vargen.decoding.next_scale.schedule import Stage
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.stats import DecodeStats

# Fixed tokens of a scale, given the canvas before it and its index: tokens int64 [B, n], and which are fixed, bool [B, n].
FixedTokens = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class ModelRunner(Protocol):
    """Runs one of the models; see `vargen.decoding.next_scale.loop`."""

    def run(self, name: str, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]) -> list[Tensor]: ...


class ScaleDrafts:
    """Scales proposed by the draft model, from the current one on.

    Per scale: tokens, probabilities, the transformer input of the next scale, and the canvas after it.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.probs: list[Tensor] = []
        self.inputs: list[Tensor | None] = []
        self.canvases: list[Tensor] = []


class ImageState:
    """The tokens of B images during generation.

    Attributes:
        tokens: int64 `[B, L]`.
        length: int64 `[B]`, number of tokens decided.
        draft_start: int64 `[B]`, the scale at which the current draft of the image starts.
        scale: the first scale that is not decided in every image.
        canvases: the canvas after the first k scales, for k from 0 to `scale`.
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
        self.canvases = [model.canvas(B)]
        self.inputs: list[Tensor | None] = [None]
        self.by_scale: list[dict[str, Any]] = [
            {"tokens": n, "model": stage.model, "passes": 0, "drafted": 0, "kept": 0, "seconds": 0.0}
            for n, stage in zip(self.sizes, stages, strict=True)
        ]
        self.histogram: Counter[int] = Counter()
        self._last_time = time.perf_counter()
        for scale, tokens in enumerate(fixed_scales):
            self.tokens[:, self.token_slice(scale)] = tokens.to(self.tokens)
            self.length = torch.full_like(self.length, self.ends[scale])
            self.by_scale[scale]["model"] = "given"
            self._append_scale(scale)
        self.draft_start = torch.full_like(self.length, self.scale)

    def token_slice(self, scale: int) -> slice:
        """Return the slice of a scale's tokens in `tokens`."""
        return slice(self.ends[scale] - self.sizes[scale], self.ends[scale])

    def make_noise(self, scale: int) -> Noise:
        """Return the noise at a scale's tokens.

        It is the same in every pass; that is safe because the samples of a discarded draft had no effect.
        """
        at = self.token_slice(scale)
        position = torch.arange(at.start, at.stop, device=self.seeds.device)
        return self.noise_class(self.seeds, position.expand(len(self.seeds), -1))

    def _append_scale(self, scale: int) -> None:
        canvas, following = self.model.add(self.canvases[-1], self.tokens[:, self.token_slice(scale)], scale)
        self.canvases.append(canvas)
        self.inputs.append(following)
        self.scale += 1

    def list_guidance(self) -> list[float]:
        """Guidance factors of the scales from the current one on."""
        return [stage.guidance for stage in self.stages[self.scale :]]

    def compute_probs(self, logits: Tensor, scale: int, canvas: Tensor) -> Tensor:
        """Probabilities of a scale's tokens, `[B, n, V]`; one-hot where a token is fixed."""
        probs = to_probs(logits, self.sampling)
        if self.fixed_tokens is None:
            return probs
        tokens, fixed = self.fixed_tokens(canvas, scale)
        one_hot = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
        return torch.where(fixed[..., None], one_hot, probs)

    def sample_scale(self, logits: Tensor, scale: int, canvas: Tensor, noise: Noise) -> Tensor:
        """Sample the tokens int64 `[B, n]` of a scale with the shared noise."""
        found = None if self.fixed_tokens is not None else sample_from_logits(logits, self.sampling, noise)
        return noise.sample(self.compute_probs(logits, scale, canvas), Purpose.TOKEN) if found is None else found.tokens

    def stage_end(self, stage: Stage) -> int:
        """Return the first scale after the current one that belongs to another stage."""
        return next((k for k in range(self.scale, len(self.stages)) if self.stages[k] is not stage), len(self.stages))

    def draft_scales(self, models: ModelRunner, stage: Stage) -> ScaleDrafts:
        """Draft the next scales, up to the number the stage sets, excluding the last scale of the stage.

        The last is excluded because the pass that verifies the draft samples one more scale itself.
        """
        drafts, canvas = ScaleDrafts(), self.canvases[-1]
        for scale in range(self.scale, min(self.scale + stage.num_drafted, self.stage_end(stage) - 1)):
            logits = models.run("draft", [*self.inputs, *drafts.inputs], 1, [stage.guidance])[0]
            probs = self.compute_probs(logits, scale, canvas)
            at = self.token_slice(scale)
            decided = (self.length >= at.stop)[:, None]
            tokens = self.make_noise(scale).where(~decided).sample(probs, stage.rule.draft_noise)
            tokens = torch.where(decided, self.tokens[:, at], tokens)
            canvas, following = self.model.add(canvas, tokens, scale)
            drafts.tokens.append(tokens)
            drafts.probs.append(probs)
            drafts.inputs.append(following)
            drafts.canvases.append(canvas)
        return drafts

    def verify_scales(self, logits: Sequence[Tensor], drafts: ScaleDrafts) -> int:
        """Decide the scales that a pass fed, as far as each image's draft is accepted.

        Whether a scale counts as drafted depends on where the image's own draft starts, not on the position of the batch, so
        the image equals the one generated alone.

        Returns:
            Number of scales completed in all images by this pass.
        """
        self._charge_time()
        stage = self.stages[self.scale]
        last, canvas = self.stage_end(stage) - 1, self.canvases[-1]
        ongoing = torch.ones_like(self.length, dtype=torch.bool)
        for i, of_scale in enumerate(logits):
            scale, at = self.scale + i, self.token_slice(self.scale + i)
            noise = self.make_noise(scale)
            undecided = ongoing & (self.length < at.stop)
            drafted = (scale < self.draft_start + stage.num_drafted) & (scale < last)
            if i < len(drafts.tokens):
                draft, probs = drafts.tokens[i], self.compute_probs(of_scale, scale, canvas)
                verified = noise.where((undecided & drafted)[:, None])
                tokens, same = stage.rule(probs, drafts.probs[i], draft, verified)
                if not drafted.all():
                    sampled = noise.where((undecided & ~drafted)[:, None]).sample(probs, Purpose.TOKEN)
                    tokens = torch.where(drafted[:, None], tokens, sampled)
                    same = torch.where(drafted, same, (sampled == draft).all(1))
                canvas = drafts.canvases[i]
                self.by_scale[scale]["drafted"] += int((undecided & drafted).sum())
                self.by_scale[scale]["kept"] += int((undecided & drafted & same).sum())
            else:
                undecided = undecided & ~drafted  # not for images that draft this scale in the next pass
                tokens, same = self.sample_scale(of_scale, scale, canvas, noise.where(undecided[:, None])), ongoing
            self.by_scale[scale]["passes"] += 1
            self.tokens[:, at] = torch.where(undecided[:, None], tokens, self.tokens[:, at])
            self.length = torch.where(undecided, at.stop, self.length)
            self.draft_start = torch.where(undecided & ~(drafted & same), scale + 1, self.draft_start)
            ongoing = ongoing & (same | ~undecided)
        if not drafts.tokens:  # known without synchronization
            return 1
        return self.ends.index(int(self.length.amin())) + 1 - self.scale

    def _charge_time(self) -> None:
        now = time.perf_counter()
        self.by_scale[self.scale]["seconds"] += now - self._last_time
        self._last_time = now

    def summarize_pass(self, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the harness needs: values that are finite exactly if the logits are, their positions, and all tokens."""
        sums = torch.cat([sum_rows(each) for each in logits], dim=1)
        start = self.token_slice(self.scale).start
        position = torch.arange(start, start + sums.shape[1], device=sums.device).expand(len(sums), -1)
        return sums, position, self.tokens

    def commit_scales(self, scales: int) -> None:
        """Add the scales completed in every image to the canvas."""
        self.histogram[sum(self.sizes[self.scale : self.scale + scales])] += len(self.seeds)
        for scale in range(self.scale, self.scale + scales):
            self._append_scale(scale)

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
