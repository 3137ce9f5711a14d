"""Continuous batching: a batch of fixed size in which a finished image is replaced by the next one, while the others go on.

In a fixed batch, finished images wait for the slowest. Here each row of the batch is an image with its own number of passes:
when it is finished, the next request is prefilled alone and written into its row of all states. An image is the same whatever
is beside it and whenever it joined, because its noise depends on its seed, its positions, and its own passes.

All memory is allocated when the first requests are admitted: that of `batch_size` images, and while images join, that of at
most a quarter of them more.

Shape suffixes: B images of the batch, N tokens of the grid, T tokens fed in one pass, n new images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.harness import NonFiniteLogitsError, Run, describe_non_finite_logits, validate_call
from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.graphs import CUDAGraph
from vargen.decoding.next_token.loop import require_batch_size, validate_token_model
from vargen.decoding.next_token.rows import select_rows
from vargen.decoding.next_token.running_batch import ImageRequest, RunningBatch, take_same_condition
from vargen.decoding.presets import resolve_method
from vargen.decoding.sampling import Sampling
from vargen.decoding.stats import DecodeStats
from vargen.device import inference_mode_for, limit_threads, normal_tensors, read_graph_setting
from vargen.kernels.dispatch import read_kernel_setting
from vargen.values import parse_int, short_repr


@dataclass(frozen=True, eq=False)
class FinishedImage:
    """A finished image.

    Attributes:
        number: of the request.
        seed: of the image.
        tokens: int64 `[N]`; invalid if there is an error.
        stats: of this image alone, without seconds.
        error: why the image failed: a `NonFiniteLogitsError`, or a ValueError for a condition that does not fit beside those of
            the running batch. None if it did not fail.
    """

    number: int
    seed: int
    tokens: Tensor
    stats: DecodeStats
    error: Exception | None = None

    @property
    def passes(self) -> int:
        """Number of target passes that the image took part in, its prefill included."""
        return self.stats.passes

    @property
    def relaxation(self) -> float:
        """Acceptance probability spent beyond the exact rule."""
        return sum(self.stats.relaxation)


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
        graphs = CUDAGraph if graphs is None and read_graph_setting(self.device) else graphs
        self._run = Run(self.device, self.num_tokens, None, profile)
        self._batch = RunningBatch(model, self.method, size, self._run, graphs)
        self._max_joining = max(1, size // 4)
        self._waiting: deque[ImageRequest] = deque()
        self._rows: list[ImageRequest | None] = [None] * size
        self._rows_were_freed = False
        self._reports: deque[tuple[Tensor, list[tuple[int, ImageRequest | None]]]] = deque()  # that the host has not read yet
        self._num_delayed = 1 if self.device.type == "cuda" else 0  # read while the next pass runs
        self._submitted = 0

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
            ValueError: if `top_k` exceeds the vocabulary, there are no seeds, or the condition has fewer rows.
            TypeError: if seeds or sampling have the wrong type.
        """
        sampling = Sampling() if sampling is None else sampling
        validate_call(seeds, sampling, None)
        sampling.validate_top_k(self.model.vocab)
        try:
            select_rows(condition, [len(seeds) - 1])
        except IndexError as error:
            raise ValueError(f"condition must have a row for each of the {len(seeds)} seeds, got fewer") from error
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
        with inference_mode_for(self.device), limit_threads(self._batch.threads) if self._batch.is_open else nullcontext():
            self._refused: list[FinishedImage] = []
            self._admit()
            finished = self._refused + self._read_reports(self._num_delayed)
            if self.num_active:
                self._reports.append((self._batch.run_pass(), list(enumerate(self._rows))))
            return finished + self._read_reports(self._num_delayed if self.num_active else 0)

    def make_stats(self, finished: Sequence[FinishedImage]) -> DecodeStats:
        """Return statistics: of these images, and of all passes so far."""
        if not self._batch.is_open:
            return DecodeStats(self.method.name, 0)
        images, whole = self._batch.images, [image for image in finished if image.error is None]
        relaxation = torch.tensor([image.relaxation for image in whole], dtype=torch.float32)
        seeds = torch.tensor([image.seed for image in whole], dtype=torch.int64)
        length = torch.full((len(whole),), self.num_tokens, device=images.length.device)
        images = replace(images, seeds=seeds, length=length, relaxation=relaxation)
        stats = images.make_stats(self.method.name, self._batch.threads, dict(self._batch.widths), self.model.forced)
        self._run.finish(stats)
        return stats

    def copy_active(self) -> tuple[list[int], Tensor, Tensor]:
        """Copy the images that are being generated: the numbers of M requests, tokens int64 `[M, N]` and lengths int64 `[M]`.

        Tokens from the length on are not generated yet.
        """
        rows, numbers = self._active_rows()
        if not rows:
            empty = torch.zeros(0, self.num_tokens, dtype=torch.int64, device=self.device)
            return [], empty, empty[:, 0]
        with normal_tensors():
            return numbers, self._batch.images.tokens[rows, : self.num_tokens].clone(), self._batch.images.length[rows].clone()

    def list_counts(self) -> dict[int, list[int]]:
        """List, by request, the tokens that each pass of an image that is being generated has committed, prefill included.

        On a GPU, the last pass is missing.
        """
        return {request.number: list(request.counts) for request in self._rows if request is not None}

    def replace_tokens(self, tokens: Tensor) -> None:
        """Continue with changed tokens int64 `[M, N]`, whose row `number` is that of each request."""
        rows, numbers = self._active_rows()
        if not rows:
            return
        self._batch.images.tokens[rows, : self.num_tokens] = tokens[numbers]

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
        if chosen and not self._batch.is_open:
            first = take_same_condition(chosen)
            self._place(first, free[: len(first)], self._batch.open(first))
            chosen, free = chosen[len(first) :], free[len(first) :]
        while chosen:
            joining = take_same_condition(chosen)[: self._max_joining]
            rows = free[: len(joining)]
            try:
                self._place(joining, rows, self._batch.join(joining, rows))
            except ValueError as error:
                self._refused += [self._refuse(request, error) for request in joining]
            chosen, free = chosen[len(joining) :], free[len(joining) :]
        idle = [row for row, held in enumerate(self._rows) if held is None]
        if idle and self._batch.is_open and self._rows_were_freed:
            self._batch.empty_caches(idle)
        self._rows_were_freed = False

    def _place(self, requests: list[ImageRequest], rows: list[int], report: Tensor) -> None:
        """Record which images are in which rows, and the report of their prefill."""
        for row, request in zip(rows, requests, strict=True):
            self._rows[row] = request
        self._reports.append((report, list(zip(rows, requests, strict=True))))

    def _fits(self, request: ImageRequest, chosen: list[ImageRequest]) -> bool:
        """Whether a request can run together with the others."""
        beside = chosen or [held for held in self._rows if held is not None]
        if self._batch.rule.exact or not beside:
            return True
        return beside[0].sampling.is_greedy == request.sampling.is_greedy

    def _refuse(self, request: ImageRequest, error: Exception) -> FinishedImage:
        tokens = torch.zeros(self.num_tokens, dtype=torch.int64, device=self.device)
        return FinishedImage(request.number, request.seed, tokens, request.make_stats(self.method.name), error)

    def _free(self, rows: list[int]) -> None:
        self._batch.free(rows)
        for row in rows:
            self._rows[row] = None
        self._rows_were_freed = True

    # -- results ------------------------------------------------------------------------------------------------------------

    def _read_reports(self, num_delayed: int) -> list[FinishedImage]:
        """Free the rows of images that finished or failed, according to all reports except the last `num_delayed`."""
        found: list[FinishedImage] = []
        while len(self._reports) > num_delayed:
            report, held = self._reports.popleft()
            ended: list[tuple[int, FinishedImage]] = []
            for (row, request), position, length, step, width in zip(held, *report.tolist(), strict=True):
                if request is None or self._rows[row] is not request:
                    continue
                request.record(length, width)
                if position == self.num_tokens > length:
                    continue
                error: Exception | None = None
                if position < self.num_tokens:
                    error = NonFiniteLogitsError(describe_non_finite_logits(position, self.num_tokens, step - 1))
                with normal_tensors():
                    tokens = self._batch.images.tokens[row, : self.num_tokens].clone()
                relaxation = float(self._batch.images.relaxation[row])
                stats = request.make_stats(self.method.name, self._batch.threads, relaxation, self.model.forced)
                ended.append((row, FinishedImage(request.number, request.seed, tokens, stats, error)))
            if ended:
                self._free([row for row, _ in ended])
                found += [image for _, image in ended]
        return found
