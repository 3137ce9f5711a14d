"""The token loop: prefill; draft; one target pass over the draft; judge; commit; repeat.

Each image of a batch keeps its own length.

Shape suffixes: B images, N tokens of the grid, T fed tokens of one pass, A slots of the longest path, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.harness import Callback, DecodeOutput, Run, validate_call
from vargen.decoding.next_token import captured
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import shared_noise
from vargen.decoding.next_token.acceptance.siblings import count_sibling_acceptance
from vargen.decoding.next_token.captured import CUDAGraph, Graph, Replayed
from vargen.decoding.next_token.draft import Draft, Output, Step, Verdict
from vargen.decoding.next_token.drafters import Sequential
from vargen.decoding.next_token.protocols import AcceptanceRule, Drafter, MovingModel, TokenModel
from vargen.decoding.noise import Noise, TokenNoise
from vargen.decoding.pass_costs import use_best_threads
from vargen.decoding.presets import resolve_method
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.stats import DecodeStats
from vargen.kernels.dispatch import asked_for
from vargen.modes import inference_mode_for, normal_tensors
from vargen.values import short_repr


@torch.no_grad()
@without_autocast
def decode(
    model: TokenModel,
    condition: Any,
    seeds: Tensor,
    accelerator: str | Accelerator = "ar",
    sampling: Sampling | None = None,
    *,
    callback: Callback | None = None,
    profile: bool = False,
) -> DecodeOutput:
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
    asked_for()  # an unknown VARGEN_KERNELS, or VARGEN_CUDA_GRAPHS, is an error before any work
    captured.asked_for(torch.device("cpu"))
    method: Accelerator = resolve_method(accelerator)
    sampling = Sampling() if sampling is None else sampling
    if isinstance(model, type) or not isinstance(model, TokenModel):
        raise TypeError(f"model must be a TokenModel, such as pipe.token_model(1.0), got {short_repr(model)}")
    validate_call(seeds, sampling, callback)
    sampling.check_vocabulary(model.vocab)
    max_fed = 1 if method.drafter is None else method.drafter.max_fed
    with use_best_threads(model, condition, len(seeds), max_fed) as threads, inference_mode_for(torch.device(model.device)):
        run = Run(model.device, model.grid[0] * model.grid[1], callback, profile)
        image = _loop(run, model, condition, seeds.to(model.device), method, sampling)
        stats = image.stats(method.name, threads)
        run.close(stats)
    # Cloned outside of inference mode, so that callers can train on them.
    return DecodeOutput(image.tokens[:, : run.total].clone(), image.length.clone(), stats, finished=not run.stopped)


def _loop(run: Run, model: TokenModel, condition: Any, seeds: Tensor, accelerator: Accelerator, sampling: Sampling) -> _Images:
    """The algorithm. Every pass commits at least one token to every unfinished image, whatever was drafted."""
    passes, out = prefill(run, model, condition, seeds, accelerator, sampling)
    images = passes.images
    images.begin(run, out.logits, to_probs(out.logits, sampling))
    replayed = passes.captured(_refused(run, model)) if captured.asked_for(seeds.device) else None
    widths: Counter[int] = Counter()
    while not run.finished:
        logits, position, count = replayed() if replayed else passes(run.passes + 1)
        widths[logits.shape[1]] += 1
        run.record(logits, position, images.tokens[:, : run.total], images.length, count)
    images.widths = dict(widths)  # only now: what passes find in their objects, a replay finds too
    return images


def prefill(
    run: Run, model: TokenModel, condition: Any, seeds: Tensor, accelerator: Accelerator, sampling: Sampling
) -> tuple[Passes, Output]:
    """What makes the passes, and the output of the prefill, by which token 0 is drawn."""
    drafter, rule = (accelerator.drafter or Sequential()).bind(model), accelerator.acceptance.bind(model)
    with run.part("prefill"):
        cache, out = model.prefill(condition, drafter.max_fed)
        state = drafter.start(model, condition, seeds, sampling, out)
    images = _Images(seeds, run.total, drafter.max_fed, model)
    return Passes(run, model, cache, drafter, state, rule, sampling, images), out


@dataclass
class Passes:
    """The passes behind the prefill: their parts, and by which objects each leaves something to the next."""

    run: Run
    model: TokenModel
    cache: Any
    drafter: Drafter[Any]
    state: Any
    rule: AcceptanceRule
    sampling: Sampling
    images: _Images

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do pass number `step`: its logits `[B, T, V]`, positions `[B, T]` of what they say, committed tokens `[B]`."""
        run, model, cache, drafter, state = self.run, self.model, self.cache, self.drafter, self.state
        rule, sampling, images = self.rule, self.sampling, self.images
        with run.part("draft"):
            draft = drafter.propose(state, images.tokens, images.length, step)
            fed = images.fed(draft)
        with run.part("target"):
            out = model.forward(fed, cache, draft.tree)
        with run.part("accept"):
            noise = images.noise(draft, step)
            probs = to_probs(out.logits, sampling)
            verdict = rule(probs, add_unfiltered_probs(draft, rule, out.logits, sampling), noise, images.relaxation)
        with run.part("commit"):
            count = images.commit(fed, draft, verdict)
            model.commit(cache, verdict.path, count, draft.tree)
            drafter.observe(state, Step(draft, probs, out.features, verdict, noise, count))
        return out.logits, noise.position, count

    def captured(self, refused: str | None = None, graph: type[Graph] = CUDAGraph) -> Replayed:
        """The same passes, as a graph where they can be captured; the device counts them.

        Args:
            refused: why they cannot, if that is known. graph: see `Replayed`.
        """
        step = torch.full((), self.run.passes + 1, dtype=torch.int64, device=self.images.seeds.device)

        def counting() -> tuple[Tensor, Tensor, Tensor]:
            made = self(step)
            step.add_(1)
            return made

        return Replayed(counting, {"images": self.images, "state": self.state, "cache": self.cache}, graph, refused)


def _refused(run: Run, model: TokenModel) -> str | None:
    """Why passes are not to be captured, as far as that is known before the first."""
    if run.timed_by_part:
        return "their parts are timed"
    for each in (model, model.draft_model):
        if isinstance(each, MovingModel) and each.moving:
            return each.moving
    return None


def add_unfiltered_probs(draft: Draft, rule: AcceptanceRule, logits: Tensor, sampling: Sampling) -> Draft:
    """The draft, with what relaxed rules need of it where drawing is greedy; see `Draft.soft`."""
    if rule.exact or not sampling.greedy:
        return draft
    return replace(draft, soft=to_probs(logits, replace(sampling, temperature=1.0)))


class _Images:
    """The tokens of B images while they are drawn.

    Attributes:
        tokens: int64 `[B, N + max_fed]`; behind the grid lies what passes near its end write past it.
        length: int64 `[B]`, tokens drawn.
        relaxation: float32 `[B]`, granted so far.
        histogram: int64 `[max_fed + 1]`, at k the number of (pass, image) pairs that committed k tokens.
        siblings: int64 `[ranks, 2]`, see `DecodeStats`.
        widths: passes by the tokens they fed.
    """

    def __init__(self, seeds: Tensor, total: int, max_fed: int, model: TokenModel):
        B, device = len(seeds), seeds.device
        self.seeds, self.total, self.model = seeds, total, model
        with normal_tensors():  # callbacks write to them
            self.tokens = torch.zeros(B, total + max_fed, dtype=torch.int64, device=device)
        self.own = TokenNoise(seeds, total + max_fed)
        self.length = torch.ones(B, dtype=torch.int64, device=device)
        self.relaxation = torch.zeros(B, device=device)
        self.histogram = torch.zeros(max_fed + 1, dtype=torch.int64, device=device)
        self.siblings = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self.widths: dict[int, int] = {}

    def begin(self, run: Run, logits: Tensor, probs: Tensor) -> None:
        """Token 0, from the prefill's row of logits and probabilities `[B, 1, V]`."""
        B = len(self.seeds)
        if len(logits) != B:
            raise ValueError(f"condition must have a row for each of the {B} seeds, got {len(logits)}")
        position = torch.zeros(B, 1, dtype=torch.int64, device=self.seeds.device)
        empty = Draft.empty(B, self.model.vocab, self.seeds.device)
        self.tokens[:, 0] = shared_noise(probs, empty, Noise(self.seeds, position, own=self.own), self.relaxation).next_token
        self.histogram[1] += B
        run.record(logits, position, self.tokens[:, : self.total], self.length, torch.ones_like(self.length))

    def fed(self, draft: Draft) -> Tensor:
        """int64 `[B, T]`: the root, then the draft."""
        return torch.cat([self.tokens.gather(1, self.length[:, None] - 1), draft.tokens], dim=1)

    def noise(self, draft: Draft, step: int | Tensor) -> Noise:
        """Noise for the token after each fed slot."""
        return Noise(self.seeds, self.length[:, None] + draft.tree.depth, step, self.own)

    def commit(self, fed: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """Keep what was accepted of `fed` `[B, T]`, the root and the draft; returns how many tokens `[B]` that were, 0 for a
        finished image."""
        count = torch.minimum(verdict.count, self.total - self.length)
        committed = verdict.committed(fed)
        self.tokens.scatter_(1, self.length[:, None] + torch.arange(committed.shape[1], device=fed.device), committed)
        self.histogram.scatter_add_(0, count, torch.ones_like(count))
        if verdict.relaxation is not None:
            self.relaxation += verdict.relaxation * (count > 0)
        if not draft.tree.chain:
            ranks = draft.tree.widest
            self.siblings = _longer(self.siblings, ranks)
            self.siblings[:ranks] += count_sibling_acceptance(draft, verdict, count > 0).sum(0)
        self.length = self.length + count
        return count

    def stats(self, name: str, threads: int) -> DecodeStats:
        self.histogram[0] = 0  # passes that an image sat out, finished
        return DecodeStats(
            accelerator=name,
            images=len(self.seeds),
            tokens=int(self.length.sum()),
            accepted_histogram=self.histogram.tolist(),
            fed=self.widths,
            relaxation=self.relaxation.tolist(),
            seeds=self.seeds.tolist(),
            threads=threads,
            siblings=self.siblings.tolist(),
        )


def _longer(table: Tensor, rows: int) -> Tensor:
    """The table with at least so many rows, new ones of zeros."""
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, rows - len(table))))
