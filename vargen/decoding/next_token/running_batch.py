"""The states of a batch whose images join and leave: all tensors of an `Engine`.

Shape suffixes: B images of the batch, N tokens of the grid, T tokens fed in one pass, n new images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.costs import use_best_threads
from vargen.decoding.harness import Run, sum_rows
from vargen.decoding.interfaces import Drafter, TokenModel
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.graphs import CUDAGraph, GraphedPass, Outputs
from vargen.decoding.next_token.loop import DecodePass, ImageState, LoopState, find_capture_blocker
from vargen.decoding.next_token.rows import select_rows
from vargen.decoding.noise import Noise, TokenNoise
from vargen.decoding.sampling import RowSampling, Sampling
from vargen.decoding.stats import DecodeStats
from vargen.decoding.tree import Output


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """A requested image: its number, the row `index` of its condition, its seed and its sampling options.

    Attributes:
        counts: tokens committed by each of its passes that the host has read, prefill included.
        widths: number of its passes by the number of tokens that they fed to it, prefill excluded.
    """

    number: int
    condition: Any
    index: int
    seed: int
    sampling: Sampling
    counts: list[int] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)

    def record(self, length: int, width: int) -> None:
        """Record a pass after which the image has `length` tokens; `width` is 0 for the prefill."""
        self.counts.append(length - sum(self.counts))
        if width:
            self.widths[width] += 1

    def make_stats(self, method: str, threads: int = 1, relaxation: float = 0.0, forced: Tensor | None = None) -> DecodeStats:
        """Return the statistics of this image alone; `forced`: see `TokenModel`."""
        return DecodeStats.from_counts(
            method,
            self.counts,
            self.seed,
            passes_by_width=dict(self.widths),
            relaxation=[relaxation],
            threads=threads,
            forced=0 if forced is None else int((forced[: sum(self.counts)] >= 0).sum()),
        )


def take_same_condition(requests: list[ImageRequest]) -> list[ImageRequest]:
    """Return the first requests, as far as their conditions are rows of the same one, which are prefilled together."""
    return list(takewhile(lambda request: request.condition is requests[0].condition, requests))


class RunningBatch:
    """The states of B rows, each of which holds an image or is free.

    What the host needs to know of a pass is a report, int64 `[4, B]` or, of images that join, `[4, n]`: the first position
    whose logits are not finite (N if there is none), the length, the number of the next pass, and the number of tokens fed.

    Args:
        model: see `TokenModel`.
        method: whose drafter images can join.
        size: number of rows B.
        run: the clock, and the number of passes.
        graphs: see `decode`.

    Attributes:
        threads: number of CPU threads of passes; 0 before the first images.
        widths: number of passes by the number of tokens they fed.
    """

    def __init__(self, model: TokenModel, method: Accelerator, size: int, run: Run, graphs: type[CUDAGraph] | None):
        self.model, self.size, self.device, self._run = model, size, torch.device(model.device), run
        self.num_tokens, self._graphs = run.total, graphs
        self._drafter, self.rule = method.bind(model)
        fixed = method.drafter.fix_length(max(self._drafter.max_width - 1, 1)).fit_to_grid(self.num_tokens)
        self._joining = fixed.bind(model)  # starts without measuring pass costs
        self.threads, self.widths = 0, dict[int, int]()
        self._state: LoopState  # from the first images on

    @property
    def is_open(self) -> bool:
        """Whether states are allocated."""
        return self.threads > 0

    @property
    def images(self) -> ImageState:
        """The images of all rows."""
        return self._state.images

    def open(self, requests: list[ImageRequest]) -> Tensor:
        """Allocate all states and start images in the first rows. The others hold copies of the first image, and are free.

        Returns the report `[4, n]`.
        """
        padded = requests + requests[:1] * (self.size - len(requests))
        condition = select_rows(padded[0].condition, [each.index for each in padded])
        with use_best_threads(self.model, condition, self.size, self._drafter.max_width) as threads:
            self.threads = threads
        seeds = self._make_seeds(padded)
        self._sampling = RowSampling([each.sampling for each in padded])
        cache, draft, out, images = self._start(self._drafter, condition, seeds, self._sampling)
        images.committed_histogram[1] = len(requests)
        self._token_noise = TokenNoise(seeds, self.num_tokens + self._drafter.max_width)
        make_noise = partial(Noise, token_noise=self._token_noise)
        self._pass = DecodePass(self._run, self.model, self._drafter, self.rule, self._sampling, make_noise)
        self._step: Callable[[LoopState], tuple[LoopState, Outputs]] = self._pass
        if self._graphs is not None:
            self._step = GraphedPass(self._pass, self._graphs, find_capture_blocker(self._run, self.model))
        self._state = LoopState(images, draft, cache)
        report = self._make_report(sum_rows(out.logits), torch.zeros_like(seeds)[:, None], images)[:, : len(requests)]
        self.free(list(range(len(requests), self.size)))
        return report

    def join(self, requests: list[ImageRequest], rows: list[int]) -> Tensor:
        """Prefill images and write them into free rows of all states. Returns the report `[4, n]`."""
        condition = select_rows(requests[0].condition, [each.index for each in requests])
        seeds, sampling = self._make_seeds(requests), RowSampling([each.sampling for each in requests])
        cache, draft, out, new = self._start(self._joining, condition, seeds, sampling)
        state, index = self._state, torch.tensor(rows, device=self.device)
        cache = self.model.join(state.cache, cache, index)  # first, because it may refuse the images
        self._token_noise.replace_rows(index, seeds)
        self._sampling.insert_rows(sampling, index)
        if self._sampling.is_mixed:
            self._step = self._pass  # a captured pass would keep the options of its rows
        images = state.images.insert_rows(new, index)
        draft = self._drafter.join(state.draft, draft, index, images.tokens, images.length)
        self._state = LoopState(images, draft, cache)
        return self._make_report(sum_rows(out.logits), torch.zeros_like(seeds)[:, None], new)

    def run_pass(self) -> Tensor:
        """Run a pass. Returns its report `[4, B]`."""
        self._state, (sums, position, _) = self._step(self._state)
        self._run.passes += 1
        width = sums.shape[1]
        self.widths[width] = self.widths.get(width, 0) + 1
        return self._make_report(sums, position, self.images, width)

    def free(self, rows: list[int]) -> None:
        """Make rows free. A free row is a finished image, which passes leave unchanged."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.images.length.index_fill_(0, index, self.num_tokens)
        self.images.tokens.index_fill_(0, index, 0)  # those of an image that failed may be invalid

    def empty_caches(self, rows: list[int]) -> None:
        """Empty the model's cache of free rows, so that attention reads only what the others need."""
        free = torch.zeros(self.size, dtype=torch.bool, device=self.device)
        free[rows] = True
        self.model.rollback(self._state.cache, torch.where(free, 0, self.images.length - 1))

    def _make_seeds(self, requests: list[ImageRequest]) -> Tensor:
        return torch.tensor([each.seed for each in requests], dtype=torch.int64, device=self.device)

    def _start(
        self, drafter: Drafter, condition: Any, seeds: Tensor, sampling: RowSampling
    ) -> tuple[Any, Any, Output, ImageState]:
        """Prefill images. Returns the model's cache, the drafter's state, the output, and the images with their first token."""
        with self._run.time_part("prefill"):
            cache, out = self.model.prefill(condition, self._drafter.max_width)
        if len(out.logits) != len(seeds):
            raise ValueError(f"condition must have a row for each seed, got {len(out.logits)} rows for {len(seeds)} seeds")
        with self._run.time_part("draft"):
            draft = drafter.start(self.model, condition, seeds, sampling, out)
        images = ImageState.start(seeds, self.num_tokens, self._drafter.max_width)
        images = replace(images, step=torch.full_like(seeds, 2))
        images.put_first_token(out, sampling, Noise(seeds, torch.zeros_like(seeds)[:, None], 0))
        self._run.passes += 1
        return cache, draft, out, images

    def _make_report(self, sums: Tensor, position: Tensor, images: ImageState, width: int = 0) -> Tensor:
        bad = ~sums.isfinite() & (position < self.num_tokens)
        first = torch.where(bad, position, self.num_tokens).amin(1)
        assert isinstance(images.step, Tensor)
        return torch.stack([first, images.length, images.step, torch.full_like(images.length, width)])
