"""The one decoding loop: prefill; draft; one target pass over the draft; judge; commit; repeat.

Each image of a batch keeps its own length. On a GPU the loop does not wait for the device: whether images are finished, and
whether logits were finite, is read through an event one or more passes later (`_Watch`).

Shape suffixes: B images, N tokens of the grid, T fed tokens of one pass, A slots of the longest path, V vocabulary.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vargen.compat import outside_autocast
from vargen.decoding.accelerator import Accelerator, resolve_accelerator
from vargen.decoding.acceptance import same_noise
from vargen.decoding.cost import suitable_threads
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import law
from vargen.decoding.stats import DecodeStats
from vargen.decoding.types import Decoded, Draft, Progress, Sampling, TokenModel
from vargen.values import shown


class NonFiniteLogitsError(RuntimeError):
    """The model returned NaN or infinite logits; no picture is made of them."""


@torch.no_grad()
@outside_autocast
def decode(
    model: TokenModel,
    condition: Any,
    seeds: Tensor,
    accelerator: str | Accelerator = "ar",
    sampling: Sampling | None = None,
    *,
    callback: Callable[[Progress], bool | None] | None = None,
    profile: bool = False,
) -> Decoded:
    """Draw the tokens of B images.

    Args:
        model: see `TokenModel`.
        condition: passed to `model.prefill`; B rows.
        seeds: int64 `[B]`; image i depends on `seeds[i]` and its condition alone, not on the batch around it.
        accelerator: a preset's name or an `Accelerator`.
        sampling: temperature and filters; default: the plain softmax.
        callback: called after every pass with a `Progress`; returning False stops the run. What it raises passes through.
        profile: on CUDA, wait for the device between parts so that `seconds_by_part` is filled.

    Returns:
        Tokens `[B, N]`, lengths `[B]` and `DecodeStats`.

    Raises:
        ValueError: for an unknown accelerator, one that this model cannot run, a `top_k` over the vocabulary, or no seeds.
        TypeError: for an accelerator, seeds, a sampling or a callback of another type.
        NonFiniteLogitsError: with the pass and position of the first non-finite logits.
    """
    accelerator = resolve_accelerator(accelerator)
    sampling = Sampling() if sampling is None else sampling
    _check(model, seeds, sampling, callback)
    sampling.check_vocabulary(model.vocab)
    fed = 1 if accelerator.drafter is None else accelerator.drafter.widest
    with suitable_threads(model, condition, len(seeds), fed) as threads:
        result = _decode(model, condition, seeds, accelerator, sampling, callback, profile)
    result.stats.threads = threads
    return result


def _decode(
    model: TokenModel,
    condition: Any,
    seeds: Tensor,
    accelerator: Accelerator,
    sampling: Sampling,
    callback: Callable[[Progress], bool | None] | None,
    profile: bool,
) -> Decoded:
    device = model.device
    seeds = seeds.to(device)
    clock = _Clock(device, profile)
    drafter = accelerator.drafter
    rule = accelerator.acceptance
    rule = rule.for_model(model) if hasattr(rule, "for_model") else rule
    widest = 1 if drafter is None else drafter.widest
    B, N = len(seeds), model.grid[0] * model.grid[1]
    stats = DecodeStats(accelerator.name, images=B, seeds=seeds.tolist())
    watch = _Watch(device)
    with clock.part("prefill"):
        memory = drafter.start(model, condition, seeds, sampling) if drafter else None  # refuses a draft wider than the grid
        state, logits = model.prefill(condition, widest)
    tokens = torch.zeros(B, N + widest, dtype=torch.int64, device=device)  # the tail takes writes past the grid
    histogram = torch.zeros(widest + 1, dtype=torch.int64, device=device)
    spent = torch.zeros(B, device=device)
    if len(logits) != B:
        raise ValueError(f"condition must have a row for each of the {B} seeds, got {len(logits)}")
    root_position = torch.zeros(B, 1, dtype=torch.int64, device=device)
    empty = Draft.empty(B, model.vocab, device)
    first = same_noise(law(logits[:, None], sampling), empty, Noise(seeds, root_position), spent)
    tokens[:, 0] = first.next_token
    length = torch.ones(B, dtype=torch.int64, device=device)
    histogram[1] += B
    watch.see(logits[:, None], root_position, length, N, step=1)
    stats.passes = 1
    if callback and callback(Progress(1, tokens[:, :N], length, N, torch.ones_like(length))) is False:
        stats.stopped = True

    # Every pass commits at least one token to every unfinished image, so N - 1 passes suffice whatever was drafted.
    while stats.passes < N and not stats.stopped:
        step = stats.passes + 1
        with clock.part("draft"):
            draft = drafter.propose(memory, tokens, length, step) if drafter else empty
            tree = draft.tree
            fed = torch.cat([tokens.gather(1, length[:, None] - 1), draft.tokens], dim=1)
        with clock.part("target"):
            logits = model.forward(fed, state, tree)
        with clock.part("accept"):
            position = length[:, None] + tree.depth
            noise = Noise(seeds, position, step)
            target_law = law(logits, sampling)
            verdict = rule(target_law, draft, noise, spent)
        with clock.part("commit"):
            count = torch.minimum(verdict.count, N - length)  # 0 for a finished image
            steps = torch.arange(tree.longest, device=device)
            following = fed.gather(1, verdict.path.roll(-1, dims=1))
            following = torch.where(steps == verdict.count[:, None] - 1, verdict.next_token[:, None], following)
            tokens.scatter_(1, length[:, None] + steps, following)
            model.commit(state, verdict.path, count, tree)
            histogram.scatter_add_(0, count, torch.ones_like(count))
            if verdict.spent is not None:
                spent += verdict.spent * (count > 0)
            if drafter:
                drafter.learn(memory, draft, target_law, verdict, noise)
            length = length + count
        stats.passes += 1
        stats.fed[fed.shape[1]] = stats.fed.get(fed.shape[1], 0) + 1
        finished = watch.see(logits, position, length, N, step=stats.passes)
        if callback and callback(Progress(stats.passes, tokens[:, :N], length, N, count)) is False:
            stats.stopped = not finished
        if finished:
            break

    watch.settle()
    histogram[0] = 0  # passes that an image sat out, finished
    stats.accepted_histogram = histogram.tolist()
    stats.tokens = int(length.sum())
    stats.relaxation_spent = spent.tolist()
    stats.seconds, stats.seconds_by_part = clock.read()
    return Decoded(tokens[:, :N].contiguous(), length, stats, finished=not stats.stopped)


def _check(model: Any, seeds: Any, sampling: Any, callback: Any) -> None:
    if isinstance(model, type) or not hasattr(model, "prefill"):
        raise TypeError(f"model must be a TokenModel, such as pipe.token_model(1.0), got {shown(model)}")
    if not isinstance(seeds, Tensor) or seeds.dtype != torch.int64 or seeds.dim() != 1:
        given = f"{seeds.dtype} {list(seeds.shape)}" if isinstance(seeds, Tensor) else shown(seeds)
        raise TypeError(f"seeds must be an int64 tensor [B], one per image, got {given}")
    if not len(seeds):
        raise ValueError("seeds must hold one number per image, got none")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, or None for the plain softmax, got {shown(sampling)}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of a Progress, or None, got {shown(callback)}")


_AHEAD = 8  # most passes that are queued on a GPU before the host waits for the oldest: finished images get no more


class _Watch:
    """Reads two device values late enough not to wait for them: are all images finished, were all logits finite."""

    def __init__(self, device: torch.device):
        self.immediate = device.type != "cuda"
        self.pending: list[tuple[Any, Tensor, int]] = []

    def see(self, logits: Tensor, position: Tensor, length: Tensor, N: int, step: int) -> bool:
        """True when a pass that has completed left every image finished. One reduction over the logits."""
        bad = ~logits.sum(-1).isfinite() & (position < N)
        where = torch.where(bad, position, N).amin()
        report = torch.stack([where, length.amin()])
        if self.immediate:
            return self._read(report, step, N)
        host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        host.copy_(report, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(report.device))  # which is not that of the current device, if another one draws
        self.pending.append((event, host, step))
        self.total = N
        finished = False
        while self.pending and (len(self.pending) > _AHEAD or self.pending[0][0].query()):
            event, host, seen = self.pending.pop(0)
            event.synchronize()
            finished |= self._read(host, seen, N)
        return finished

    def settle(self) -> None:
        """Wait for what is outstanding, so that no picture is made of non-finite logits."""
        for event, host, step in self.pending:
            event.synchronize()
            self._read(host, step, self.total)
        self.pending.clear()

    @staticmethod
    def _read(report: Tensor, step: int, N: int) -> bool:
        position, shortest = report.tolist()
        if position < N:
            raise NonFiniteLogitsError(
                f"the model returned NaN or infinite logits at token {position} of {N}, pass {step}; nothing is kept. "
                "Check the checkpoint, or run with torch_dtype=torch.float32"
            )
        return shortest >= N


class _Clock:
    """Wall-clock by part; parts are measured where the host waits for the device anyway, or when asked to."""

    def __init__(self, device: torch.device, profile: bool):
        self.device = device
        self.detailed = profile or device.type != "cuda"
        self.parts: dict[str, float] = defaultdict(float)
        self.started = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def part(self, name: str) -> _Part:
        return _Part(self, name)

    def read(self) -> tuple[float, dict[str, float]]:
        return self._now() - self.started, dict(self.parts)


class _Part:
    def __init__(self, clock: _Clock, name: str):
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        if self.clock.detailed:
            self.start = self.clock._now()

    def __exit__(self, *_: object) -> None:
        if self.clock.detailed:
            self.clock.parts[self.name] += self.clock._now() - self.start
