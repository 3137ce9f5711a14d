"""The next-token decoding loop: prefill, then repeat: draft, one target pass over the draft, verify, commit.

Each image of a batch has its own length.

Shape suffixes: B images, N tokens of the grid, T tokens fed in one pass, A slots on the longest path, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.costs import use_best_threads
from vargen.decoding.harness import Callback, DecodeOutput, Run, sum_rows, validate_call
from vargen.decoding.interfaces import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import shared_noise
from vargen.decoding.next_token.compiled_steps import commit_tokens, feed_tokens
from vargen.decoding.next_token.graphs import CUDAGraph, GraphedPass, Outputs, register_state
from vargen.decoding.next_token.rows import insert_rows
from vargen.decoding.next_token.verification import verify_draft
from vargen.decoding.noise import Noise, TokenNoise
from vargen.decoding.presets import resolve_method
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.stats import DecodeStats
from vargen.decoding.tree import Draft, Output, Step, Verdict
from vargen.device import inference_mode_for, normal_tensors, read_graph_setting
from vargen.kernels.dispatch import read_kernel_setting
from vargen.values import parse_int, short_repr


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
    graphs: type[CUDAGraph] | None = None,
    batch_size: int | None = None,
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
        graphs: class that captures passes as a graph. Default: `CUDAGraph` if VARGEN_CUDA_GRAPHS=1 and the model is on a GPU,
            otherwise None.
        batch_size: maximum number of images at a time. If there are more, each finished image makes room for the next one, as
            in `vargen.decoding.next_token.engine`. None: all at once.

    Returns:
        Tokens `[B, N]`, lengths `[B]` and `DecodeStats`.

    Raises:
        ValueError: if the accelerator is unknown or cannot run on this model, `top_k` exceeds the vocabulary, or `seeds` is
            empty.
        TypeError: if the accelerator, seeds, sampling or callback has the wrong type.
        NonFiniteLogitsError: if logits are not finite; names the pass and position of the first.
    """
    read_kernel_setting()  # fail on an invalid VARGEN_KERNELS or VARGEN_CUDA_GRAPHS before any work
    method: Accelerator = resolve_method(accelerator)
    sampling = Sampling() if sampling is None else sampling
    validate_token_model(model)
    if batch_size is not None and not (isinstance(seeds, Tensor) and 0 < len(seeds) <= require_batch_size(batch_size)):
        from vargen.decoding.next_token.batching import decode_list  # which runs passes of this loop

        options: Any = {"callback": callback, "profile": profile, "graphs": graphs, "batch_size": batch_size}
        return decode_list(model, condition, seeds, method, sampling, **options)
    device = torch.device(model.device)
    if read_graph_setting(device) and graphs is None:
        graphs = CUDAGraph
    validate_call(seeds, sampling, callback)
    sampling.validate_top_k(model.vocab)
    max_width = method.fit_preset(*model.grid).drafter.max_width
    with use_best_threads(model, condition, len(seeds), max_width) as threads, inference_mode_for(device):
        run = Run(device, model.grid[0] * model.grid[1], callback, profile)
        images, widths = run_loop(run, model, condition, seeds.to(device), method, sampling, graphs)
        stats = images.make_stats(method.name, threads, widths, model.forced)
        run.finish(stats)
    # Clone outside inference mode, so that callers can train on the result.
    return DecodeOutput(images.tokens[:, : run.total].clone(), images.length.clone(), stats, finished=not run.stopped)


def require_batch_size(batch_size: Any) -> int:
    """Return the batch size. Raises ValueError unless it is a whole number of at least 1."""
    size = parse_int(batch_size, 1)
    if size is None:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {short_repr(batch_size)}")
    return size


def validate_token_model(model: Any) -> None:
    """Raise TypeError unless it is a `TokenModel`."""
    if isinstance(model, type) or not isinstance(model, TokenModel):
        raise TypeError(f"model must be a TokenModel, such as pipe.decoding_model(1.0), got {short_repr(model)}")


def run_loop(
    run: Run,
    model: TokenModel,
    condition: Any,
    seeds: Tensor,
    accelerator: Accelerator,
    sampling: Sampling,
    graphs: type[CUDAGraph] | None = None,
) -> tuple[ImageState, dict[int, int]]:
    """Run the algorithm. Every pass commits at least one token to every unfinished image, whatever was drafted.

    Returns the images, and the number of passes by the number of tokens they fed.
    """
    decode_pass, state, out = prefill(run, model, condition, seeds, accelerator, sampling)
    decode_pass.sample_first_token(state.images, out)
    step: Callable[[LoopState], tuple[LoopState, Outputs]] = decode_pass
    if graphs is not None:
        state = count_on_device(state)
        step = GraphedPass(decode_pass, graphs, find_capture_blocker(run, model))
    widths: list[int] = []
    while not run.finished:
        state, (sums, position, count) = step(state)
        widths.append(sums.shape[1])
        run.end_pass(sums, position, state.images.tokens, state.images.length, count)
    run.wait()
    return state.images, dict(Counter(widths[: run.passes - 1]))  # the first pass is the prefill


def prefill(
    run: Run, model: TokenModel, condition: Any, seeds: Tensor, accelerator: Accelerator, sampling: Sampling
) -> tuple[DecodePass, LoopState, Output]:
    """Run the prefill. Returns the pass that continues from it, its first state, and the output that predicts token 0."""
    drafter, rule = accelerator.bind(model)
    with run.time_part("prefill"):
        cache, out = model.prefill(condition, drafter.max_width)
    with run.time_part("draft"):
        draft_state = drafter.start(model, condition, seeds, sampling, out)
    if len(out.logits) != len(seeds):
        raise ValueError(f"condition must have a row for each of the {len(seeds)} seeds, got {len(out.logits)}")
    images = ImageState.start(seeds, run.total, drafter.max_width)
    make_noise = partial(Noise, token_noise=TokenNoise(seeds, run.total + drafter.max_width))
    return DecodePass(run, model, drafter, rule, sampling, make_noise), LoopState(images, draft_state, cache), out


@register_state
@dataclass
class LoopState:
    """What a pass hands to the next one: the images, the drafter's state, and the model's cache."""

    images: ImageState
    draft: Any
    cache: Any


MakeNoise = Callable[[Tensor, Tensor, int | Tensor], Noise]  # (seeds [B], position [B, T], number of the pass)


@dataclass(frozen=True)
class DecodePass:
    """The pass after the prefill, as a function from state to state.

    Attributes:
        make_noise: the source of all random numbers. Another one enumerates them; see `vargen.evaluation.enumeration`.
    """

    run: Run
    model: TokenModel
    drafter: Drafter
    rule: AcceptanceRule
    sampling: Sampling
    make_noise: MakeNoise

    def sample_first_token(self, images: ImageState, out: Output) -> None:
        """Sample token 0 from the output of the prefill, and finish that pass."""
        run, position = self.run, torch.zeros_like(images.seeds)[:, None]
        images.put_first_token(out, self.sampling, self.make_noise(images.seeds, position, 0))
        run.end_pass(sum_rows(out.logits), position, images.tokens, images.length, torch.ones_like(images.length))

    def __call__(self, state: LoopState) -> tuple[LoopState, Outputs]:
        """Run a pass.

        Returns:
            The next state, and three tensors: the sum of each row of logits `[B, T]`, the positions `[B, T]` of the tokens they
            predict, and the number of tokens committed `[B]`.
        """
        run, model, drafter = self.run, self.model, self.drafter
        images, cache = state.images, state.cache
        with run.time_part("draft"):
            noise = self.make_noise(images.seeds, images.length.unsqueeze(1), images.step)
            draft = drafter.propose(state.draft, images.tokens, images.length, noise).put_forced(model.forced, images.length)
            inputs, position = images.build_inputs(draft)
        with run.time_part("target"):
            out = model.forward(inputs, cache, draft.tree)
        with run.time_part("accept"):
            noise = self.make_noise(images.seeds, position, images.step)
            given = draft, noise, images.relaxation, self.sampling
            probs, verdict, sums = verify_draft(self.rule, drafter, out.logits, *given)
        with run.time_part("commit"):
            images, count = images.commit(inputs, draft, verdict)
            model.commit(cache, verdict.path, count, draft.tree)
            step = Step(draft, probs, out.features, verdict, noise, count, images.tokens, images.length)
            state = LoopState(images, drafter.observe(state.draft, step), cache)
        return state, (sums, position, count)


def count_on_device(state: LoopState) -> LoopState:
    """Return the state with the pass number as a tensor, which a captured pass can increase."""
    assert isinstance(state.images.step, int)
    step = torch.full((), state.images.step, dtype=torch.int64, device=state.images.seeds.device)
    return replace(state, images=replace(state.images, step=step))


def find_capture_blocker(run: Run, model: TokenModel) -> str | None:
    """Return the reason not to capture passes, if one is known before the first pass."""
    if run.synchronizes_parts:
        return "their parts are timed"
    for each in (model, model.draft_model):
        if each is not None and each.capture_blocker:
            return each.capture_blocker
    return None


@register_state
@dataclass
class ImageState:
    """The tokens of B images during generation.

    Attributes:
        seeds: int64 `[B]`.
        tokens: int64 `[B, N + max_width]`. The columns past the grid absorb what passes near its end write there.
        length: int64 `[B]`, number of tokens committed so far.
        relaxation: float32 `[B]`, relaxation spent so far.
        committed_histogram: int64 `[max_width + 1]`; entry k counts the (pass, image) pairs that committed k tokens.
        num_tokens: N.
        step: number of the next pass; the prefill is pass 1. A tensor `[]` if the device counts passes, and `[B]` if images did
            not start together.
    """

    seeds: Tensor
    tokens: Tensor
    length: Tensor
    relaxation: Tensor
    committed_histogram: Tensor
    num_tokens: int
    step: int | Tensor = 2

    @classmethod
    def start(cls, seeds: Tensor, num_tokens: int, max_width: int) -> ImageState:
        """Return the state in which token 0 has a place but no value yet."""
        B, device = len(seeds), seeds.device
        with normal_tensors():  # callbacks may write to this tensor
            tokens = torch.zeros(B, num_tokens + max_width, dtype=torch.int64, device=device)
        return cls(
            seeds=seeds,
            tokens=tokens,
            length=torch.ones(B, dtype=torch.int64, device=device),
            relaxation=torch.zeros(B, dtype=torch.float32, device=device),
            committed_histogram=torch.zeros(max_width + 1, dtype=torch.int64, device=device),
            num_tokens=num_tokens,
        )

    def insert_rows(self, new: ImageState, rows: Tensor) -> ImageState:
        """Replace images in rows int64 `[n]` of the batch, in place. Statistics of passes are those of all images."""
        names = ("seeds", "tokens", "length", "relaxation", "step")
        parts = {name: insert_rows(getattr(self, name), getattr(new, name), rows) for name in names}
        self.committed_histogram += new.committed_histogram
        return replace(self, **parts)

    def put_first_token(self, out: Output, sampling: Sampling, noise: Noise) -> None:
        """Sample token 0 from the output of the prefill, given the noise at position 0."""
        empty = Draft.make_empty(len(self.seeds), out.logits.shape[-1], self.seeds.device)
        probs = to_probs(out.logits, sampling)
        self.tokens[:, 0] = shared_noise(probs, empty, noise, self.relaxation).next_token
        self.committed_histogram[1] += len(self.seeds)

    def build_inputs(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Return the tokens to feed, int64 `[B, T]`: the root, then the draft; and the positions `[B, T]` after these."""
        if draft.tree.is_chain:
            made = feed_tokens(self.tokens, self.length, draft.tokens)
            if made is not None:
                return made
        length = self.length[:, None]
        inputs = torch.cat([self.tokens.gather(1, length - 1), draft.tokens], dim=1)
        return inputs, length + draft.tree.depth

    def commit(self, inputs: Tensor, draft: Draft, verdict: Verdict) -> tuple[ImageState, Tensor]:
        """Commit the accepted tokens of `inputs` `[B, T]` (root and draft) and the next token.

        Returns:
            The next state, and the number of tokens committed, `[B]`; 0 for a finished image.
        """
        done = commit_tokens(inputs, verdict, self.length, self.num_tokens, self.tokens, self.committed_histogram)
        if done is None:
            count = torch.minimum(verdict.count, self.num_tokens - self.length)
            committed = verdict.gather_committed(inputs)
            slots = torch.arange(committed.shape[1], device=inputs.device)
            self.tokens.scatter_(1, self.length[:, None] + slots, committed)
            self.committed_histogram.scatter_add_(0, count, torch.ones_like(count))
            done = count, self.length + count
        count, length = done
        if verdict.relaxation is not None:
            self.relaxation.add_(verdict.relaxation * (count > 0))
        return replace(self, length=length, step=self.step + 1), count

    def make_stats(self, name: str, threads: int, widths: dict[int, int], forced: Tensor | None = None) -> DecodeStats:
        """Return the statistics of a finished run.

        Args:
            widths: its passes by the number of tokens they fed.
            forced: see `TokenModel`.
        """
        histogram = self.committed_histogram.tolist()
        histogram[0] = 0  # passes run after an image was finished
        only = None if forced is None else (forced >= 0).cumsum(0)  # forced tokens up to each position
        return DecodeStats(
            accelerator=name,
            images=len(self.seeds),
            tokens=int(self.length.sum()),
            committed_histogram=histogram,
            passes_by_width=widths,
            relaxation=self.relaxation.tolist(),
            seeds=self.seeds.tolist(),
            threads=threads,
            forced=0 if only is None else int(only[self.length - 1].sum()),
        )
