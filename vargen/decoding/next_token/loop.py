"""The next-token decoding loop: prefill, then repeat: draft, one target pass over the draft, verify, commit.

Each image of a batch has its own length.

Shape suffixes: B images, N tokens of the grid, T tokens fed in one pass, A slots on the longest path, V vocabulary.
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
    """Generate the tokens of B images.

    Args:
        model: see `TokenModel`.
        condition: passed to `model.prefill`; B rows.
        seeds: int64 `[B]`. Image i depends only on `seeds[i]` and its condition, not on the rest of the batch.
        accelerator: the name of a preset, or an `Accelerator`.
        sampling: temperature and filters. Default: sample from the unfiltered softmax.
        callback: called after every pass with a `Progress`. Returning False stops the run. Its exceptions propagate.
        profile: on CUDA, synchronize between the parts of a step so that `seconds_by_part` is filled.

    Returns:
        Tokens `[B, N]`, lengths `[B]` and `DecodeStats`.

    Raises:
        ValueError: if the accelerator is unknown or cannot run on this model, `top_k` exceeds the vocabulary, or `seeds` is
            empty.
        TypeError: if the accelerator, seeds, sampling or callback has the wrong type.
        NonFiniteLogitsError: if logits are not finite; names the pass and position of the first.
    """
    asked_for()  # fail on an invalid VARGEN_KERNELS or VARGEN_CUDA_GRAPHS before any work
    captured.asked_for(torch.device("cpu"))
    method: Accelerator = resolve_method(accelerator)
    sampling = Sampling() if sampling is None else sampling
    if isinstance(model, type) or not isinstance(model, TokenModel):
        raise TypeError(f"model must be a TokenModel, such as pipe.decoding_model(1.0), got {short_repr(model)}")
    validate_call(seeds, sampling, callback)
    sampling.check_vocabulary(model.vocab)
    max_fed = 1 if method.drafter is None else method.drafter.max_fed
    with use_best_threads(model, condition, len(seeds), max_fed) as threads, inference_mode_for(torch.device(model.device)):
        run = Run(model.device, model.grid[0] * model.grid[1], callback, profile)
        image = _loop(run, model, condition, seeds.to(model.device), method, sampling)
        stats = image.stats(method.name, threads)
        run.close(stats)
    # Clone outside inference mode, so that callers can train on the result.
    return DecodeOutput(image.tokens[:, : run.total].clone(), image.length.clone(), stats, finished=not run.stopped)


def _loop(run: Run, model: TokenModel, condition: Any, seeds: Tensor, accelerator: Accelerator, sampling: Sampling) -> _Images:
    """Run the algorithm. Every pass commits at least one token to every unfinished image, whatever was drafted."""
    passes, out = prefill(run, model, condition, seeds, accelerator, sampling)
    images = passes.images
    images.begin(run, out.logits, to_probs(out.logits, sampling))
    replayed = passes.captured(_refused(run, model)) if captured.asked_for(seeds.device) else None
    widths: Counter[int] = Counter()
    while not run.finished:
        logits, position, count = replayed() if replayed else passes(run.passes + 1)
        widths[logits.shape[1]] += 1
        run.record(logits, position, images.tokens[:, : run.total], images.length, count)
    images.widths = dict(widths)  # set only now: values of the host must not change between captured passes
    return images


def prefill(
    run: Run, model: TokenModel, condition: Any, seeds: Tensor, accelerator: Accelerator, sampling: Sampling
) -> tuple[Passes, Output]:
    """Run the prefill. Returns the `Passes` that continue from it, and its output, from which token 0 is sampled."""
    drafter, rule = (accelerator.drafter or Sequential()).bind(model), accelerator.acceptance.bind(model)
    with run.part("prefill"):
        cache, out = model.prefill(condition, drafter.max_fed)
        state = drafter.start(model, condition, seeds, sampling, out)
    images = _Images(seeds, run.total, drafter.max_fed, model)
    return Passes(run, model, cache, drafter, state, rule, sampling, images), out


@dataclass
class Passes:
    """The passes after the prefill: the parts that make one up, and the objects that carry state from each to the next."""

    run: Run
    model: TokenModel
    cache: Any
    drafter: Drafter[Any]
    state: Any
    rule: AcceptanceRule
    sampling: Sampling
    images: _Images

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run pass number `step`.

        Returns:
            Logits `[B, T, V]`, the positions `[B, T]` of the tokens they predict, and the number of tokens committed `[B]`.
        """
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
        """The same passes, replayed as a CUDA graph where they can be captured. The pass number is counted on the device.

        Args:
            refused: the reason capture is ruled out, if already known.
            graph: see `Replayed`.
        """
        step = torch.full((), self.run.passes + 1, dtype=torch.int64, device=self.images.seeds.device)

        def counting() -> tuple[Tensor, Tensor, Tensor]:
            made = self(step)
            step.add_(1)
            return made

        return Replayed(counting, {"images": self.images, "state": self.state, "cache": self.cache}, graph, refused)


def _refused(run: Run, model: TokenModel) -> str | None:
    """Return the reason not to capture passes, if one is known before the first pass."""
    if run.timed_by_part:
        return "their parts are timed"
    for each in (model, model.draft_model):
        if isinstance(each, MovingModel) and each.moving:
            return each.moving
    return None


def add_unfiltered_probs(draft: Draft, rule: AcceptanceRule, logits: Tensor, sampling: Sampling) -> Draft:
    """Add `Draft.soft` to the draft if the rule is relaxed and sampling is greedy; otherwise return it unchanged."""
    if rule.exact or not sampling.greedy:
        return draft
    return replace(draft, soft=to_probs(logits, replace(sampling, temperature=1.0)))


class _Images:
    """The tokens of B images during generation.

    Attributes:
        tokens: int64 `[B, N + max_fed]`. The columns past the grid absorb what passes near its end write there.
        length: int64 `[B]`, number of tokens committed so far.
        relaxation: float32 `[B]`, relaxation spent so far.
        histogram: int64 `[max_fed + 1]`; entry k counts the (pass, image) pairs that committed k tokens.
        siblings: int64 `[ranks, 2]`, see `DecodeStats`.
        widths: number of passes by the number of tokens they fed.
    """

    def __init__(self, seeds: Tensor, total: int, max_fed: int, model: TokenModel):
        B, device = len(seeds), seeds.device
        self.seeds, self.total, self.model = seeds, total, model
        with normal_tensors():  # callbacks may write to this tensor
            self.tokens = torch.zeros(B, total + max_fed, dtype=torch.int64, device=device)
        self.own = TokenNoise(seeds, total + max_fed)
        self.length = torch.ones(B, dtype=torch.int64, device=device)
        self.relaxation = torch.zeros(B, device=device)
        self.histogram = torch.zeros(max_fed + 1, dtype=torch.int64, device=device)
        self.siblings = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self.widths: dict[int, int] = {}

    def begin(self, run: Run, logits: Tensor, probs: Tensor) -> None:
        """Sample token 0 from the logits and probabilities of the prefill, both `[B, 1, V]`."""
        B = len(self.seeds)
        if len(logits) != B:
            raise ValueError(f"condition must have a row for each of the {B} seeds, got {len(logits)}")
        position = torch.zeros(B, 1, dtype=torch.int64, device=self.seeds.device)
        empty = Draft.empty(B, self.model.vocab, self.seeds.device)
        self.tokens[:, 0] = shared_noise(probs, empty, Noise(self.seeds, position, own=self.own), self.relaxation).next_token
        self.histogram[1] += B
        run.record(logits, position, self.tokens[:, : self.total], self.length, torch.ones_like(self.length))

    def fed(self, draft: Draft) -> Tensor:
        """Return the tokens to feed, int64 `[B, T]`: the root, then the draft."""
        return torch.cat([self.tokens.gather(1, self.length[:, None] - 1), draft.tokens], dim=1)

    def noise(self, draft: Draft, step: int | Tensor) -> Noise:
        """Return the noise for the token after each fed slot."""
        return Noise(self.seeds, self.length[:, None] + draft.tree.depth, step, self.own)

    def commit(self, fed: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """Commit the accepted tokens of `fed` `[B, T]` (root and draft) and the next token.

        Returns:
            The number of tokens committed, `[B]`; 0 for a finished image.
        """
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
        self.histogram[0] = 0  # passes run after an image was finished
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
    """Pad the table with rows of zeros to at least `rows` rows."""
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, rows - len(table))))
