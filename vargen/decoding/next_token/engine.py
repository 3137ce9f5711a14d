"""Continuous batching: a batch of fixed size in which a finished image is replaced by the next one, while the others go on.

In a fixed batch, finished images wait for the slowest. Here each row of the batch is an image with its own number of passes:
when it is finished, the next request is prefilled alone and written into its row of all states. An image is the same whatever
is beside it and whenever it joined, because its noise depends on its seed, its positions, and its own passes.

All memory is allocated when the first requests are admitted: that of `batch_size` images, and while images join, that of at
most a quarter of them more.

Shape suffixes: B images of the batch, N tokens of the grid, T tokens fed in one pass, n new images.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.harness import NonFiniteLogitsError, Run, describe_non_finite_logits, validate_call
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.draft import Output
from vargen.decoding.next_token.graphs import CUDAGraph, GraphedPass, Outputs
from vargen.decoding.next_token.loop import (
    DecodePass,
    ImageState,
    LoopState,
    find_capture_blocker,
    require_batch_size,
    validate_token_model,
)
from vargen.decoding.next_token.protocols import Drafter, TokenModel
from vargen.decoding.next_token.rows import select_rows
from vargen.decoding.noise import Noise, TokenNoise
from vargen.decoding.pass_costs import use_best_threads
from vargen.decoding.presets import resolve_method
from vargen.decoding.sampling import RowSampling, Sampling
from vargen.decoding.stats import DecodeStats
from vargen.device import inference_mode_for, limit_threads, normal_tensors, read_graph_setting
from vargen.kernels.dispatch import read_kernel_setting
from vargen.values import parse_int, short_repr


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """A requested image: its number, the row `index` of its condition, its seed and its sampling options."""

    number: int
    condition: Any
    index: int
    seed: int
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class FinishedImage:
    """A finished image.

    Attributes:
        number: of the request.
        seed: of the image.
        tokens: int64 `[N]`; invalid if there is an error.
        passes: number of target passes that the image took part in, its prefill included.
        relaxation: acceptance probability spent beyond the exact rule.
        error: why the image failed: a `NonFiniteLogitsError`, or a ValueError for a condition that does not fit beside those of
            the running batch. None if it did not fail.
    """

    number: int
    seed: int
    tokens: Tensor
    passes: int
    relaxation: float
    error: Exception | None = None


class Engine:
    """Generates requested images in a batch of fixed size; see the module.

    Example:
        >>> engine = Engine(pipe.decoding_model(7.5), "gumbel", batch_size=8)
        >>> numbers = engine.submit(pipe.encode_condition(["a red apple", "a dog"])[0], torch.tensor([1, 2]))
        >>> for image in engine.run():
        ...     print(image.number, image.passes)

    Guidance belongs to the model: images of another guidance scale or interval need another engine. Relaxed rules treat greedy
    sampling differently: greedy requests wait until all others have finished, and vice versa. Images that join later must not
    have a longer prefix of conditioning rows than the first ones; conditions of one `encode_condition` have equal ones.

    It is not safe to call its methods from several threads at once.

    Widths of automatic methods (`auto`, `window="auto"`) are selected for the whole batch, and methods that depend on them are
    reproducible only with the rule `shared_noise`, as in `decode`.

    Args:
        model: see `TokenModel`.
        accelerator: the name of a preset, or an `Accelerator`.
        batch_size: number of rows B, at least 1.
        profile: on CUDA, synchronize between the parts of a pass so that `seconds_by_part` is filled.
        graphs: see `decode`.

    Raises:
        ValueError: if the accelerator is unknown or cannot run on this model, or the batch size is below 1.
        TypeError: if the model or the accelerator has the wrong type.
    """

    def __init__(
        self,
        model: TokenModel,
        accelerator: str | Accelerator = "ar",
        *,
        batch_size: int = 8,
        profile: bool = False,
        graphs: type[CUDAGraph] | None = None,
    ):
        read_kernel_setting()
        self.method: Accelerator = resolve_method(accelerator)
        validate_token_model(model)
        if self.method.drafter.join_blocker is not None:
            raise ValueError(self.method.drafter.join_blocker)
        size = require_batch_size(batch_size)
        self.model, self.batch_size, self.device = model, size, torch.device(model.device)
        self.num_tokens = model.grid[0] * model.grid[1]
        self._drafter, self._rule = self.method.bind(model)
        fixed = self.method.drafter.fix_length(max(self._drafter.max_width - 1, 1)).fit_to_grid(self.num_tokens)
        self._joining = fixed.bind(model)  # starts without measuring pass costs
        self._graphs = CUDAGraph if graphs is None and read_graph_setting(self.device) else graphs
        self._run = Run(self.device, self.num_tokens, None, profile)
        self._max_joining = max(1, size // 4)
        self._waiting: deque[ImageRequest] = deque()
        self._rows: list[ImageRequest | None] = [None] * size
        self._is_open, self._rows_were_freed = False, False
        self._reports: deque[tuple[Tensor, list[tuple[int, ImageRequest | None]]]] = deque()  # that the host has not read yet
        self._num_delayed = 1 if self.device.type == "cuda" else 0  # read while the next pass runs
        self._submitted, self._threads = 0, 0
        self._state: LoopState  # from the first requests on
        self._widths: Counter[int] = Counter()

    # -- requests ---------------------------------------------------------------------------------------------------------

    def submit(self, condition: Any, seeds: Tensor, sampling: Sampling | None = None) -> list[int]:
        """Request images; they are generated by later calls of `step`, in the order of their requests.

        Args:
            condition: as for `decode`; M rows.
            seeds: int64 `[M]`.
            sampling: of these images. Default: sample from the unfiltered softmax.

        Returns:
            Numbers of the M requests, which count from 0.

        Raises:
            ValueError: if `top_k` exceeds the vocabulary, or there are no seeds.
            TypeError: if seeds or sampling have the wrong type.
        """
        sampling = Sampling() if sampling is None else sampling
        validate_call(seeds, sampling, None)
        sampling.validate_top_k(self.model.vocab)
        first, self._submitted = self._submitted, self._submitted + len(seeds)
        new = [ImageRequest(first + i, condition, i, seed, sampling) for i, seed in enumerate(seeds.tolist())]
        self._waiting.extend(new)
        return [request.number for request in new]

    def cancel(self, number: int) -> bool:
        """Cancel a request, whose row is free before the next pass. Returns False if it has already finished.

        Raises:
            ValueError: if there was no such request.
        """
        if parse_int(number, 0, self._submitted - 1) is None:
            raise ValueError(f"number must be that of one of {self._submitted} requests, got {short_repr(number)}")
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                return True
        for row, held in enumerate(self._rows):
            if held is not None and held.number == number:
                with torch.no_grad(), inference_mode_for(self.device):
                    self._free([row])
                return True
        return False

    @property
    def passes(self) -> int:
        """Number of target passes so far: those of the batch, and the prefills."""
        return self._run.passes

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Number of images that are being generated."""
        return sum(request is not None for request in self._rows)

    def run(self) -> Iterator[FinishedImage]:
        """Yield images as they finish, until no request is left. More may be submitted or cancelled meanwhile."""
        while self._waiting or self.num_active:
            yield from self.step()

    @torch.no_grad()
    @without_autocast
    def step(self) -> list[FinishedImage]:
        """Admit requests to free rows, run one pass, and return the images that finished; [] if there is nothing to do."""
        with inference_mode_for(self.device), limit_threads(self._threads) if self._threads else nullcontext():
            self._refused: list[FinishedImage] = []
            self._admit()
            finished = self._refused + self._read_reports(self._num_delayed)
            if self.num_active:
                self._state, (logits, position, _) = self._step(self._state)
                self._run.passes += 1
                self._widths[logits.shape[1]] += 1
                self._add_report(logits, position, self._state.images)
            return finished + self._read_reports(self._num_delayed if self.num_active else 0)

    def make_stats(self, finished: Sequence[FinishedImage]) -> DecodeStats:
        """Return statistics: of these images, and of all passes so far."""
        if not self._is_open:
            return DecodeStats(self.method.name, 0)
        images, whole = self._state.images, [image for image in finished if image.error is None]
        relaxation = torch.tensor([image.relaxation for image in whole])
        seeds = torch.tensor([image.seed for image in whole], dtype=torch.int64)
        length = torch.full((len(whole),), self.num_tokens, device=images.length.device)
        images = replace(images, seeds=seeds, length=length, relaxation=relaxation)
        stats = images.make_stats(self.method.name, self._threads, dict(self._widths), self.model.forced)
        self._run.finish(stats)
        return stats

    def copy_progress(self, tokens: Tensor, length: Tensor) -> None:
        """Copy the images that are being generated to rows `number` of tokens int64 `[M, N]` and length int64 `[M]`."""
        rows, numbers = self._active_rows()
        if not rows:
            return
        tokens[numbers] = self._state.images.tokens[rows, : self.num_tokens]
        length[numbers] = self._state.images.length[rows]

    def replace_tokens(self, tokens: Tensor) -> None:
        """Continue with changed tokens `[M, N]`; see `copy_progress`."""
        rows, numbers = self._active_rows()
        if not rows:
            return
        self._state.images.tokens[rows, : self.num_tokens] = tokens[numbers]

    def _active_rows(self) -> tuple[list[int], list[int]]:
        held = [(row, request.number) for row, request in enumerate(self._rows) if request is not None]
        return [row for row, _ in held], [number for _, number in held]

    # -- joining and leaving ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Move requests to free rows."""
        free = [row for row, held in enumerate(self._rows) if held is None]
        chosen: list[ImageRequest] = []
        while self._waiting and len(chosen) < len(free) and self._fits(self._waiting[0], chosen):
            chosen.append(self._waiting.popleft())
        if chosen and not self._is_open:
            first = _take_same_condition(chosen)
            self._open(first)
            chosen, free = chosen[len(first) :], free[len(first) :]
        while chosen:
            joining = _take_same_condition(chosen)[: self._max_joining]
            self._join(joining, free[: len(joining)])
            chosen, free = chosen[len(joining) :], free[len(joining) :]
        if self._rows_were_freed and self._is_open:
            self._reset_idle_rows()

    def _fits(self, request: ImageRequest, chosen: list[ImageRequest]) -> bool:
        """Whether a request can run together with the others."""
        beside = chosen or [held for held in self._rows if held is not None]
        if self._rule.exact or not beside:
            return True
        return beside[0].sampling.is_greedy == request.sampling.is_greedy

    def _open(self, requests: list[ImageRequest]) -> None:
        """Allocate all states. Rows without a request start with a copy of the first one, and are free."""
        padded = requests + requests[:1] * (self.batch_size - len(requests))
        condition = select_rows(padded[0].condition, [each.index for each in padded])
        with use_best_threads(self.model, condition, self.batch_size, self._drafter.max_width) as threads:
            self._threads = threads
        seeds = self._make_seeds(padded)
        self._sampling = RowSampling([each.sampling for each in padded])
        cache, draft, out, images = self._start(self._drafter, condition, seeds, self._sampling)
        images.committed_histogram[1] = len(requests)
        self._token_noise = TokenNoise(seeds, self.num_tokens + self._drafter.max_width)
        make_noise = partial(Noise, token_noise=self._token_noise)
        self._pass = DecodePass(self._run, self.model, self._drafter, self._rule, self._sampling, make_noise)
        self._step: Callable[[LoopState], tuple[LoopState, Outputs]] = self._pass
        if self._graphs is not None:
            self._step = GraphedPass(self._pass, self._graphs, find_capture_blocker(self._run, self.model))
        self._state, self._is_open = LoopState(images, draft, cache), True
        self._rows[: len(requests)] = requests
        if idle := list(range(len(requests), self.batch_size)):
            self._free(idle)
        self._add_report(out.logits, torch.zeros_like(seeds)[:, None], images)

    def _join(self, requests: list[ImageRequest], rows: list[int]) -> None:
        """Prefill requests and write them into free rows of all states."""
        condition = select_rows(requests[0].condition, [each.index for each in requests])
        seeds, sampling = self._make_seeds(requests), RowSampling([each.sampling for each in requests])
        cache, draft, out, new = self._start(self._joining, condition, seeds, sampling)
        state, index = self._state, torch.tensor(rows, device=self.device)
        try:
            cache = self.model.join(state.cache, cache, index)
        except ValueError as error:  # the requests do not fit beside the others; nothing was written
            self._refused += [self._fail(request, error) for request in requests]
            return
        self._token_noise.replace_rows(index, seeds)
        self._sampling.insert_rows(sampling, index)
        if self._sampling.is_mixed:
            self._step = self._pass  # a captured pass would keep the options of its rows
        images = state.images.insert_rows(new, index)
        draft = self._drafter.join(state.draft, draft, index, images.tokens, images.length)
        self._state = LoopState(images, draft, cache)
        for row, request in zip(rows, requests, strict=True):
            self._rows[row] = request
        self._add_report(out.logits, torch.zeros_like(seeds)[:, None], new, rows)

    def _fail(self, request: ImageRequest, error: Exception) -> FinishedImage:
        tokens = torch.zeros(self.num_tokens, dtype=torch.int64, device=self.device)
        return FinishedImage(request.number, request.seed, tokens, 0, 0.0, error)

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

    def _free(self, rows: list[int]) -> None:
        """Make rows free. A free row is a finished image, which passes leave unchanged."""
        index = torch.tensor(rows, device=self.device)
        self._state.images.length.index_fill_(0, index, self.num_tokens)
        self._state.images.tokens.index_fill_(0, index, 0)  # those of an image that failed may be invalid
        for row in rows:
            self._rows[row] = None
        self._rows_were_freed = True

    def _reset_idle_rows(self) -> None:
        """Empty the model's cache of rows that stay free, so that attention reads only what the others need."""
        idle = torch.tensor([held is None for held in self._rows], device=self.device)
        if idle.any():
            self.model.rollback(self._state.cache, torch.where(idle, 0, self._state.images.length - 1))
        self._rows_were_freed = False

    # -- results ------------------------------------------------------------------------------------------------------------

    def _add_report(self, logits: Tensor, position: Tensor, images: ImageState, rows: list[int] | None = None) -> None:
        """Compute what the host needs to know of a pass: for each row, the first position whose logits are not finite (N if
        all are), the length, and the number of the next pass."""
        bad = ~logits.sum(-1).isfinite() & (position < self.num_tokens)
        first = torch.where(bad, position, self.num_tokens).amin(1)
        assert isinstance(images.step, Tensor)
        held = enumerate(self._rows) if rows is None else [(row, self._rows[row]) for row in rows]
        self._reports.append((torch.stack([first, images.length, images.step]), list(held)))

    def _read_reports(self, num_delayed: int) -> list[FinishedImage]:
        """Free the rows of images that finished or failed, according to all reports except the last `num_delayed`."""
        found: list[FinishedImage] = []
        while len(self._reports) > num_delayed:
            report, held = self._reports.popleft()
            ended: list[tuple[int, FinishedImage]] = []
            for (row, request), position, length, step in zip(held, *report.tolist(), strict=True):
                if request is None or self._rows[row] is not request or (position == self.num_tokens > length):
                    continue
                error: Exception | None = None
                if position < self.num_tokens:
                    error = NonFiniteLogitsError(describe_non_finite_logits(position, self.num_tokens, step - 1))
                with normal_tensors():
                    tokens = self._state.images.tokens[row, : self.num_tokens].clone()
                relaxation = float(self._state.images.relaxation[row])
                ended.append((row, FinishedImage(request.number, request.seed, tokens, step - 1, relaxation, error)))
            if ended:
                self._free([row for row, _ in ended])
                found += [image for _, image in ended]
        return found


def _take_same_condition(requests: list[ImageRequest]) -> list[ImageRequest]:
    """Return the first requests, as far as their conditions are rows of the same one, which are prefilled together."""
    return list(takewhile(lambda request: request.condition is requests[0].condition, requests))
