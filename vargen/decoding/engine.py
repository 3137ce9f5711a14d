"""The loop of next-token decoding: slots that images take and leave (continuous batching).

Each slot holds an image with its own number of passes. When it is finished, the next request is prefilled into its slot, while
the others go on. An image is the same whatever is beside it and whenever it joined, because its noise depends on its seed, its
positions, and its own passes. `vargen.decoding.decode` is an engine with as many slots as images.

Shape suffixes: B slots, M requests, N tokens of the grid, n images that start together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vargen.clock import Clock
from vargen.compat import without_autocast
from vargen.decoding.accelerator import Accelerator
from vargen.decoding.costs import token_threads
from vargen.decoding.graph import CUDAGraph
from vargen.decoding.interfaces import TokenModel
from vargen.decoding.methods import resolve_method
from vargen.decoding.requests import (
    FinishedImage,
    NonFiniteLogitsError,
    Request,
    select_rows,
    validate_call,
)
from vargen.decoding.sampling import Sampling
from vargen.decoding.stats import DecodeStats
from vargen.decoding.token_pass import TokenPass
from vargen.device import inference_mode_for, limit_threads, normal_tensors, read_graph_setting
from vargen.kernels.dispatch import read_kernel_setting
from vargen.late_reports import Reports
from vargen.values import parse_int, require_int, short_repr


class Engine:
    """Generates requested images in B slots; see the module.

    Example:
        >>> engine = Engine(pipe.decoding_model(7.5), "gumbel", batch_size=8)
        >>> numbers = engine.submit(pipe.encode_condition(["a red apple", "a dog"])[0], torch.tensor([1, 2]))
        >>> for image in engine.run():
        ...     print(image.number, image.stats.passes)

    Guidance belongs to the model: images of another guidance scale or interval need another engine. All memory is allocated
    when the first request starts, and later ones must not have longer conditions.

    It is not safe to call its methods from several threads at once.

    Widths of automatic methods (`auto`, `window="auto"`) are selected for the whole batch, and methods that depend on them are
    reproducible only with the rule `shared_noise`.

    Args:
        model: see `TokenModel`.
        accelerator: the name of a preset, or an `Accelerator`.
        batch_size: number of slots B, at least 1.
        profile: on CUDA, synchronize between the parts of a pass so that `seconds_by_part` is filled.
        graphs: class that captures passes as a graph. Default: `CUDAGraph` if VARGEN_CUDA_GRAPHS=1 and the model is on a GPU,
            otherwise None.

    Attributes:
        method: the resolved accelerator.
        num_tokens: number N of tokens of an image.
        passes: number of target passes so far: those of all slots, and the prefills.

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
        read_kernel_setting()  # fail on an invalid VARGEN_KERNELS before any work
        self.method: Accelerator = resolve_method(accelerator)
        if not isinstance(model, TokenModel):
            raise TypeError(f"model must be a TokenModel, such as pipe.decoding_model(1.0), got {short_repr(model)}")
        self.model, self.device = model, torch.device(model.device)
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.num_tokens = model.grid[0] * model.grid[1]
        if graphs is None and read_graph_setting(self.device):
            graphs = CUDAGraph
        self._clock = Clock(self.device, profile)
        with inference_mode_for(self.device):
            drafter, rule = self.method.bind(model, self.batch_size)
            self._pass = TokenPass(model, drafter, rule, self.batch_size, self._clock, graphs)
        self._waiting: deque[Request] = deque()
        self._held: list[Request | None] = [None] * self.batch_size
        self._refused: list[FinishedImage] = []  # that could not start, until the step returns
        self._submitted, self._threads = 0, 0
        # By n: how many of the first n tokens are the only possible ones.
        self._forced = [0] * (self.num_tokens + 1) if model.forced is None else [0, *(model.forced >= 0).cumsum(0).tolist()]
        self._reports = Reports(self.device)
        self._widths: Counter[int] = Counter()
        self.passes = 0

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
        if len(condition) < len(seeds):
            raise ValueError(f"condition must have a row for each of the {len(seeds)} seeds, got {len(condition)}")
        first, self._submitted = self._submitted, self._submitted + len(seeds)
        new = [Request(first + i, condition, i, seed, sampling) for i, seed in enumerate(seeds.tolist())]
        self._waiting.extend(new)
        return [request.number for request in new]

    def cancel(self, number: int) -> bool:
        """Cancel a request, whose slot is free before the next pass. Returns False if it has finished or was cancelled before.

        Raises:
            ValueError: if there was no such request.
        """
        if parse_int(number, 0, self._submitted - 1) is None:
            raise ValueError(f"number must be that of one of {self._submitted} requests, got {short_repr(number)}")
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                return True
        for slot, held in enumerate(self._held):
            if held is not None and held.number == number:
                with torch.no_grad(), inference_mode_for(self.device):
                    self._free([slot])
                return True
        return False

    @property
    def num_active(self) -> int:
        """Number of images that are being generated."""
        return sum(request is not None for request in self._held)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished, or was refused by a step that failed."""
        return bool(self._waiting or self._refused) or self.num_active > 0

    # -- the loop ---------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[FinishedImage]:
        """Yield images as they finish or fail (`FinishedImage.error`), until no request is left.

        More may be submitted or cancelled meanwhile.
        """
        while self.has_work:
            yield from self.step()

    @torch.no_grad()
    @without_autocast
    def step(self) -> list[FinishedImage]:
        """Start waiting requests in free slots, run one pass, and return the images that finished or failed.

        If no image was being generated before, the step ends with the prefill. On a GPU, the report of a pass is read while the
        next one runs, so an image is returned one step after its last pass.
        """
        with inference_mode_for(self.device), limit_threads(self._threads or None):
            was_active = self.num_active > 0
            self._start_waiting()
            if was_active:
                width = self._pass()
                self._report(self._held, width)
            refused, self._refused = self._refused, []
            return refused + self._read_reports()

    @torch.no_grad()
    def drain(self) -> list[FinishedImage]:
        """Wait for the pass that a GPU may still run, and return the images that it finished."""
        with inference_mode_for(self.device):
            return self._read_reports(waits=True)

    def _start_waiting(self) -> None:
        """Start requests in free slots. Running images wait for a prefill, so it takes at most a quarter of the B slots."""
        free = [slot for slot, held in enumerate(self._held) if held is None]
        if len(free) < self.batch_size:
            free = free[: max(1, self.batch_size // 4)]
        while free and self._waiting:
            group = self._take_group(len(free))
            slots = free[: len(group)]
            try:
                self._start(slots, group)
            except ValueError as error:
                self._refused += [self._finish(request, None, error) for request in group]
            except BaseException:  # such as a lack of memory: nothing is lost
                self._waiting.extendleft(reversed(group))
                raise
            else:
                free = free[len(group) :]

    def _take_group(self, most: int) -> list[Request]:
        """Take the first requests, as far as they can be prefilled together: rows of one condition, with equal options."""
        group = [self._waiting.popleft()]
        while self._waiting and len(group) < most and self._waiting[0].is_like(group[0]):
            group.append(self._waiting.popleft())
        return group

    def _start(self, slots: list[int], group: list[Request]) -> None:
        """Start requests in slots, which are held only if that succeeds."""
        rows = [each.row for each in group]
        condition = select_rows(group[0].condition, rows)
        if not self._threads:  # nothing is allocated yet
            self._allocate(select_rows(group[0].condition, rows + rows[:1] * (self.batch_size - len(rows))))
        seeds = torch.tensor([each.seed for each in group], dtype=torch.int64, device=self.device)
        try:
            with limit_threads(self._threads):
                self._pass.start(slots, condition, seeds, group[0].sampling)
        except BaseException:
            self._pass.free(slots)
            raise
        started: list[Request | None] = [None] * self.batch_size
        for slot, request in zip(slots, group, strict=True):
            self._held[slot] = started[slot] = request
        self._report(started, 0)

    def _allocate(self, condition: Any) -> None:
        """Allocate the state of all slots, given a condition of as many rows, and choose the number of CPU threads."""
        threads = token_threads(self.model, condition, self.batch_size, self._pass.drafter.width)
        with limit_threads(threads):
            self._pass.allocate(condition)
            self._threads = torch.get_num_threads()

    def _free(self, slots: list[int]) -> None:
        self._pass.free(slots)
        for slot in slots:
            self._held[slot] = None

    # -- results ----------------------------------------------------------------------------------------------------------

    def _report(self, images: list[Request | None], width: int) -> None:
        """Count a pass of some images over `width` tokens each, 0 for a prefill, and send what the host needs to know of it."""
        state = self._pass.state
        self.passes += 1
        report = torch.stack([state.nonfinite, state.length, state.relaxation])  # as float32: exact for any grid
        self._reports.send(report, (list(images), width))

    def _read_reports(self, waits: bool = False) -> list[FinishedImage]:
        """Read the reports of passes, and free the slots of images that finished or failed.

        Args:
            waits: also read the newest report of a GPU, which is otherwise left unread while images are being generated.
        """
        found: list[FinishedImage] = []
        while (report := self._reports.receive(not waits and self.num_active > 0)) is not None:
            numbers, (images, width) = report
            held = [request if self._held[slot] is request else None for slot, request in enumerate(images)]
            if all(request is None or request.is_done for request in images):
                self.passes -= 1  # a pass that a GPU ran after the end of all of them
                continue
            if width:
                self._widths[width] += 1
            ended: list[int] = []
            for slot, (request, position, length, spent) in enumerate(zip(held, *numbers, strict=True)):
                if request is None:
                    continue
                request.record(int(length), width, spent)
                if position < self.num_tokens:
                    error = NonFiniteLogitsError.at(int(position), self.num_tokens, len(request.counts))
                    found.append(self._finish(request, slot, error))
                elif length < self.num_tokens:
                    continue
                else:
                    found.append(self._finish(request, slot))
                request.is_done = True
                ended.append(slot)
            if ended:
                self._free(ended)
        return found

    def _finish(self, request: Request, slot: int | None, error: Exception | None = None) -> FinishedImage:
        """Return the result of a request in a slot; of none, if it did not start."""
        with normal_tensors():
            if slot is None:
                tokens = torch.zeros(self.num_tokens, dtype=torch.int64, device=self.device)
            else:
                tokens = self._pass.state.tokens[slot, : self.num_tokens].clone()
        return FinishedImage(request.number, request.seed, tokens, self._make_stats(request), error)

    def _make_stats(self, request: Request) -> DecodeStats:
        return request.make_stats(self.method.name, self._threads, self._forced)

    def make_stats(self, images: Sequence[DecodeStats]) -> DecodeStats:
        """Return the sum of the statistics of some images, with the passes, widths and seconds of the engine."""
        stats = DecodeStats.merge(images)
        stats.passes, stats.passes_by_width = self.passes, dict(sorted(self._widths.items()))
        stats.seconds, stats.seconds_by_part = self._clock.read() - self._clock.started, dict(self._clock.parts)
        return stats

    # -- images that are being generated -----------------------------------------------------------------------------------

    def copy_active(self) -> tuple[list[int], Tensor, Tensor]:
        """Copy the images that are being generated: the numbers of M requests, tokens int64 `[M, N]` and lengths int64 `[M]`.

        Tokens from the length on are not generated yet, and are 0.
        """
        slots, numbers = self._active()
        if not slots:
            empty = torch.zeros(0, self.num_tokens, dtype=torch.int64, device=self.device)
            return [], empty, empty[:, 0]
        state = self._pass.state
        with normal_tensors():
            tokens, length = state.tokens[slots, : self.num_tokens].clone(), state.length[slots].clone()
            return numbers, tokens * (torch.arange(self.num_tokens, device=self.device) < length[:, None]), length

    def list_counts(self) -> dict[int, list[int]]:
        """List, by request, the tokens that each pass of an image that is being generated has committed, prefill included.

        On a GPU, the last pass is missing.
        """
        return {request.number: list(request.counts) for request in self._held if request is not None}

    def replace_tokens(self, tokens: Tensor) -> None:
        """Continue with changed tokens int64 `[M, N]`: row i belongs to request i.

        Those that are not generated yet have no effect. What the model has processed stays as it was.
        """
        slots, numbers = self._active()
        if slots:
            self._pass.state.tokens[slots, : self.num_tokens] = tokens[numbers]

    def list_stats(self) -> dict[int, DecodeStats]:
        """Return, by request, the statistics of images that are not finished, so far."""
        requests = (request for request in (*self._held, *self._waiting) if request is not None)
        return {request.number: self._make_stats(request) for request in requests}

    def _active(self) -> tuple[list[int], list[int]]:
        held = [(slot, request.number) for slot, request in enumerate(self._held) if request is not None]
        return [slot for slot, _ in held], [number for _, number in held]
