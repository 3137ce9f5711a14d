"""One pass of next-token decoding over B slots, in place: draft, forward, verify, commit.

A slot holds an image or is free. All tensors of the state are allocated once; a pass changes nothing but their contents. On a
GPU the host never reads them during a pass, so that it can be captured as it is (`vargen.kernels.graph`).

Shape suffixes: B slots, N tokens of the grid, T tokens fed in one pass, W largest T, A nodes on the longest path of a tree, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vargen.decoding.interfaces import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.noise import Noise, Purpose, TokenNoise
from vargen.decoding.rules import verify_shared_tokens
from vargen.decoding.sampling import Sampling, SlotSampling, to_probs
from vargen.decoding.tree import Draft, PassResult, Verdict
from vargen.decoding.window import WidthController
from vargen.kernels import ops
from vargen.kernels.graph import CUDAGraph, capture_passes
from vargen.kernels.host import Clock, normal_tensors
from vargen.kernels.token_steps import commit_tokens, feed_tokens

# Noise of a pass: seeds [B], positions [B, T], number of the pass, and the shared noise of all positions, if it is kept.
MakeNoise = Callable[[Tensor, Tensor, int | Tensor, TokenNoise | None], Noise]


class TokenPass:
    """The passes of a method over B slots.

    Args:
        model: see `TokenModel`.
        drafter, rule: of the method, bound to the model and B slots.
        slots: number of slots B.
        clock: measures the parts of a pass.
        graph: captures passes; None runs them one by one.

    Attributes:
        make_noise: the source of all random numbers. `vargen.verify.exact_sum` replaces it to enumerate all outcomes.
        state: from `allocate` on.
        captured: runs passes as graphs; None if they run one by one.
    """

    def __init__(
        self,
        model: TokenModel,
        drafter: Drafter,
        rule: AcceptanceRule,
        slots: int,
        clock: Clock,
        graph: CUDAGraph | None = None,
    ):
        self.model, self.drafter, self.rule, self.slots, self.clock = model, drafter, rule, slots, clock
        self.make_noise: MakeNoise = Noise
        self.state: TokenState
        self._controller: WidthController | None = None
        self.captured = capture_passes(graph, list_networks(model, drafter), clock.synchronizes)

    def allocate(self, condition: Any) -> None:
        """Allocate the state, with room for conditions as long as this one."""
        self.state = TokenState(self.model, condition, self.slots, self.drafter.width)
        self._controller = self.drafter.choose_widths(self.model, condition, self.slots)

    def start(self, slots: list[int], condition: Any, seeds: Tensor, sampling: Sampling) -> None:
        """Start n images in slots: run the prefill, and sample token 0.

        Raises:
            ValueError: if the condition is longer than the state has room for.
        """
        state, rows = self.state, torch.tensor(slots, device=self.model.device)
        if self.captured is not None:
            self.captured.check_networks()
        with self.clock.measure("prefill"):
            out = self.model.prefill(condition, state.cache, rows)
        if len(out.logits) != len(slots):
            raise ValueError(f"condition must have a row for each of the {len(slots)} seeds, got {len(out.logits)}")
        state.reset(slots, rows, seeds, sampling)
        with self.clock.measure("draft"):
            self.drafter.reset(state, rows, condition, out)
        position = torch.zeros_like(seeds)[:, None]
        noise = self.make_noise(seeds, position, 0, None)  # shared noise does not depend on the pass: 0 is not used
        state.tokens[rows, 0] = noise.sample(to_probs(out.logits, sampling), Purpose.TOKEN)[:, 0]
        bad = ~ops.sum_rows(out.logits).isfinite()[:, 0]
        state.nonfinite[rows] = torch.where(bad, 0, state.num_tokens)

    def __call__(self, length: int = 0) -> int:
        """Run a pass over images of at least `length` tokens. Returns the number of tokens T that it fed to each."""
        cache = self.model.narrow(self.state.cache, length)
        width = self.drafter.width if self._controller is None else self._controller.choose()
        if self.captured is not None:  # on a GPU, where no controller chooses widths
            key = width, *self.state.sampling.kind, cache is self.state.cache
            self.captured.run(key, partial(self.run, width, cache))
            return width
        result = self.run(width, cache)
        if self._controller is not None:
            self._controller.observe(result.verdict.count, result.count > 0)
        return result.noise.position.shape[1]

    def run(self, width: int, cache: Any = None) -> PassResult:
        """Run a pass that feeds at most `width` tokens, with what `TokenModel.narrow` returns of the cache; None: with all."""
        cache = self.state.cache if cache is None else cache
        state, model, measure = self.state, self.model, self.clock.measure
        with measure("draft"):
            state.token_noise.start_pass(state.seeds, state.pass_number)
            noise = self._noise(state.length[:, None])
            draft = self.drafter.propose(state, noise, width).put_forced(model.forced, state.length)
            inputs, position = state.feed(draft)
        with measure("target"):
            out = model.forward(inputs, cache, draft.tree)
        with measure("accept"):
            noise = self._noise(position)
            probs, verdict, sums = verify_draft(self.rule, self.drafter, out.logits, draft, noise, state)
        with measure("commit"):
            count = state.write(inputs, verdict)
            model.commit(state.cache, verdict.path, count, draft.tree)
            result = PassResult(draft, probs, out.features, verdict, noise, count)
            self.drafter.observe(state, result)
            state.advance(count, verdict)
            state.check_finite(sums, position)
        return result

    def _noise(self, position: Tensor) -> Noise:
        return self.make_noise(self.state.seeds, position, self.state.pass_number, self.state.token_noise)

    def free(self, slots: list[int]) -> None:
        """Make slots free, and their caches empty: attention on a CPU reads as much as the longest row needs."""
        state = self.state
        state.free(slots)
        cached = torch.where(state.length < state.num_tokens, state.length - 1, 0)
        self.model.rollback(state.cache, cached)


def verify_draft(
    rule: AcceptanceRule, drafter: Drafter, logits: Tensor, draft: Draft, noise: Noise, state: TokenState
) -> tuple[Tensor | None, Verdict, Tensor]:
    """Sample from the logits `[B, T, V]` of a pass, and verify its draft.

    Returns:
        The target's probabilities float32 `[B, T, V]`, None if nothing uses them, the verdict, and the sum of each row of
        logits, float32 `[B, T]` (`ops.sum_rows`).
    """
    sampling = state.sampling
    if rule.verify_tokens is not None and not drafter.uses_probs:
        is_shared_chain = rule.verify_tokens is verify_shared_tokens and draft.tree.is_chain
        found = sampling.sample_tokens(logits, noise, draft.tokens if is_shared_chain else None)
        if found is not None and is_shared_chain and not found.undecided:
            path = torch.arange(logits.shape[1]).expand(len(logits), -1)
            return None, Verdict(path, found.count, found.next_token, sampled=found.tokens), found.sums
        if found is not None:
            return None, rule.verify_tokens(found.tokens, draft), found.sums
    probs = sampling.probs(logits)
    if not rule.exact and sampling.may_be_greedy():
        draft = replace(draft, unfiltered_probs=sampling.probs_at_one(logits), is_greedy=sampling.is_greedy)
    return probs, rule(probs, draft, noise, state.relaxation), ops.sum_rows(logits)


class TokenState:
    """B slots, all free at first. A free slot is an image of N tokens, to which no pass adds.

    Args:
        model: see `TokenModel`.
        condition: the cache has room for conditions as long as this one.
        slots: number of slots B.
        width: maximum number W of tokens that a pass feeds to each image.

    Attributes:
        num_tokens, columns: N, and columns of the grid.
        vocab: V.
        seeds: int64 `[B]`.
        tokens: int64 `[B, N + W]`, valid up to `length`. The columns past the grid absorb what passes near its end write there.
        length: int64 `[B]`, number of tokens committed so far.
        pass_number: int64 `[B]`, number of the image's next pass; its prefill is pass 1.
        relaxation: float32 `[B]`, relaxation spent so far.
        nonfinite: int64 `[B]`, the first position whose logits were not finite; N if there is none.
        sampling: the sampling options.
        token_noise: the shared noise.
        cache: the model's state.
    """

    def __init__(self, model: TokenModel, condition: Any, slots: int, width: int):
        (rows, columns), device = model.grid, torch.device(model.device)
        N = rows * columns

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.num_tokens, self.columns, self.vocab = N, columns, model.vocab
        self.seeds, self.length, self.pass_number, self.nonfinite = (full(value, slots) for value in (0, N, 0, N))
        with normal_tensors():  # callbacks write to it
            self.tokens = full(0, slots, N + width)
        self.relaxation = torch.zeros(slots, dtype=torch.float32, device=device)
        self.sampling = SlotSampling(slots, model.vocab, device)
        self.token_noise = TokenNoise(self.seeds, N + width)
        self.cache: Any = model.allocate(condition, width, slots)

    def reset(self, slots: list[int], rows: Tensor, seeds: Tensor, sampling: Sampling) -> None:
        """Start images in slots, which `rows` int64 `[n]` holds, too. Token 0 has a place, but no value yet."""
        self.seeds[rows], self.length[rows], self.pass_number[rows] = seeds, 1, 2
        self.tokens[rows], self.relaxation[rows], self.nonfinite[rows] = 0, 0.0, self.num_tokens
        self.token_noise.replace_rows(rows, seeds)
        self.sampling.set(slots, sampling)

    def free(self, slots: list[int]) -> None:
        """Make slots free. Tokens of an image that failed may be invalid, and are cleared."""
        self.length[slots] = self.num_tokens
        self.nonfinite[slots] = self.num_tokens
        self.tokens[slots] = 0
        self.sampling.set(slots, None)

    def feed(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Return the tokens to feed, int64 `[B, T]`, the root before the draft, and the position that each predicts."""
        return feed_tokens(self.tokens, self.length, draft.tokens, None if draft.tree.is_chain else draft.tree.depth)

    def write(self, inputs: Tensor, verdict: Verdict) -> Tensor:
        """Write the accepted draft tokens of `inputs` `[B, T]`, and the token after the last of them, to their places.

        Returns the number of tokens that the pass commits, int64 `[B]`.
        """
        accepted = verdict.path, verdict.count, verdict.next_token
        return commit_tokens(inputs, *accepted, self.length, self.num_tokens, self.tokens)

    def advance(self, count: Tensor, verdict: Verdict) -> None:
        """Commit `count` `[B]` of the tokens that `write` wrote."""
        if verdict.relaxation is not None:
            self.relaxation.add_(torch.where(count > 0, verdict.relaxation, 0.0))  # a product of NaN and 0 is NaN
        self.length.add_(count)
        self.pass_number.add_(1)

    def check_finite(self, sums: Tensor, position: Tensor) -> None:
        """Remember the first position with logits that are not finite.

        Args:
            sums: float32 `[B, T]`, finite where all logits of a row are.
            position: int64 `[B, T]`, the position that each row predicts.
        """
        if ops.are_finite(sums):
            return
        is_bad = ~sums.isfinite() & (position < self.num_tokens)
        bad = torch.where(is_bad, position, self.num_tokens).amin(1)
        self.nonfinite.copy_(torch.minimum(self.nonfinite, bad))


def list_networks(model: TokenModel, drafter: Drafter | None = None) -> list[nn.Module]:
    """List the networks that passes read: those of the model and of all that may draft for it."""
    parts: list[Any] = [model, model.draft_model, getattr(drafter, "model", None), model.low_res, *model.draft_heads.values()]
    return [network for part in parts if part is not None for network in part.networks]
