"""Sum the passes of a method exactly: over all drafts and all outcomes of the rule, without sampling.

Two statements are checked after each pass. (1) Committed tokens: continued by the target itself, they have the target's
distribution. (2) Draft tokens: each has the distribution q that is recorded for it, given what is committed and the draft
tokens before it. A pass only uses these two statements about the one before, so by induction whole images are exact.

Shape suffixes: B outcomes, T tokens fed in one pass, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.methods import Accelerator
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.scales import ScalePasses, ScaleSchedule
from vargen.decoding.token_pass import TokenPass
from vargen.decoding.tree import Draft
from vargen.kernels.dispatch import uses_triton
from vargen.kernels.host import Clock
from vargen.verify.enumerated_rule import EnumeratedRule
from vargen.verify.enumeration import Enumeration, NotEnumerableError, ReusedNoiseError, TooManyOutcomesError
from vargen.verify.tables import ScaleTable, TableModel, encode_sequences

MAX_DRAFTS = 20_000


@dataclass(frozen=True)
class PassSum:
    """A pass, summed.

    Attributes:
        distance: total variation distance between committed tokens, continued by the target, and the target's distribution.
        draft_distance: largest total variation distance between draft tokens of a slot and their recorded q; 0 for
            drafters that sample all draft tokens again in every pass, whose q statement (1) covers.
        relaxation: expected relaxation that the rule reported; None for next-scale methods, which report none.
        most_drafts: number of drafts summed in the pass that has most.
        outcomes: number of drafts times outcomes of the rule.
        passes: number of passes.
    """

    distance: float
    draft_distance: float
    relaxation: float | None
    most_drafts: int
    outcomes: int
    passes: int


class _Pass(NamedTuple):
    """A pass as it was run: tokens `[B, N + T]`, lengths `[B]`, draft, number committed `[B]`, relaxation `[B]`."""

    before: Tensor
    length_before: Tensor
    draft: Draft
    num_committed: Tensor
    tokens: Tensor
    length: Tensor
    relaxation: Tensor


def sum_pass(
    method: Accelerator,
    model: TableModel,
    prefix: Sequence[int] = (),
    sampling: Sampling | None = None,
    *,
    passes: int = 1,
    condition: int = 0,
    target: tuple[TableModel, Sampling] | None = None,
    max_drafts: int = MAX_DRAFTS,
) -> PassSum:
    """Sum the pass of a method after `prefix` over all drafts and all outcomes of its rule.

    Args:
        method: with drafts that fit the grid.
        model: a model that is small enough to enumerate.
        prefix: committed tokens. Empty: the first token is enumerated, too. Drafters whose drafts stay for the next pass allow
            at most one token, because their state depends on how the prefix was committed.
        sampling: temperature and filters. Default: the unfiltered softmax.
        passes: number of passes; several are enumerated jointly.
        condition: of the table.
        target: the model and its sampling settings whose distribution is the right one. Default: `model` and `sampling`.
        max_drafts: maximum number of drafts.

    Returns:
        The distances after the pass at which they are largest.

    Raises:
        NotEnumerableError: if the rule or the drafter does not use noise in a way that can be enumerated; says what it must do.
        TooManyOutcomesError: if there are more than `max_drafts` drafts, or ten times as many outcomes.
        ValueError: if the prefix is too long, or kernels are enabled.
    """
    sampling = Sampling() if sampling is None else sampling
    N, each = model.tokens, Enumeration(model.tokens, max_drafts, 10 * max_drafts)
    independent = "independent-per-pass" in method.drafter.provides or method.drafter.width == 1
    if not 0 <= len(prefix) < N or (len(prefix) > 1 and not independent):
        raise ValueError(f"prefix must hold at most {N - 1 if independent else 1} tokens for this drafter, got {len(prefix)}")
    if uses_triton(torch.zeros(1)):
        raise ValueError("VARGEN_KERNELS must not enable kernels on the CPU: their random numbers cannot be enumerated")

    def program() -> tuple[list[_Pass], EnumeratedRule]:
        return _run_passes(each, method, model, condition, prefix, sampling, passes)

    with torch.no_grad():
        records, rule = each.run(program)
    assert abs(float(each.weights.sum()) - 1) < 1e-9, "probabilities of all outcomes must sum to 1"
    expected = _Target(*(target or (model, sampling)), condition, prefix)
    weights, relaxation = each.weights, 0.0
    distances, drafts = [], []
    for number, record in enumerate(records):
        law = each.last_law if number == passes - 1 else None
        distances.append(expected.distance(weights, record, law, each.settled))
        drafts.append(_draft_distance(weights, record) if not independent else 0.0)
        relaxation = float((weights * record.relaxation).sum())
    return PassSum(max(distances), max(drafts), relaxation, rule.most_drafts, len(each), passes)


def _run_passes(
    each: Enumeration,
    method: Accelerator,
    model: TableModel,
    condition: int,
    prefix: Sequence[int],
    sampling: Sampling,
    passes: int,
) -> tuple[list[_Pass], EnumeratedRule]:
    """Run the passes after a prefix, with one row per outcome decided so far. Passes before them commit the prefix."""
    B = len(each)
    seeds, conditions = torch.zeros(B, dtype=torch.int64), torch.full((B,), condition)
    drafter, acceptance = method.bind(model, B)
    rule = EnumeratedRule(acceptance, each)
    token_pass = TokenPass(model, drafter, rule, B, Clock(torch.device("cpu"), False))
    token_pass.make_noise = lambda seeds, position, step, _: each.make_noise(seeds, position, _number(step))
    token_pass.allocate(conditions)
    state = token_pass.state
    if prefix:
        each.forced = torch.full((B,), prefix[0])
    token_pass.start(list(range(B)), conditions, seeds, sampling)
    if prefix:
        state.tokens[:, 0] = prefix[0]
    for token in prefix[1:]:
        each.forced = torch.full((B,), token)
        token_pass.run(drafter.width)
    each.forced, spent = None, state.relaxation.double().clone()
    records = []
    for number in range(passes):
        each.is_last_pass = number == passes - 1
        before, length = state.tokens.clone(), state.length.clone()
        token_pass.run(drafter.width)
        assert rule.draft is not None
        relaxation, committed = state.relaxation.double() - spent, state.length - length
        records.append(_Pass(before, length, rule.draft, committed, state.tokens.clone(), state.length.clone(), relaxation))
    return records, rule


def _number(step: int | Tensor) -> int:
    """The number of a pass, which is the same for all rows."""
    return int(step[0]) if isinstance(step, Tensor) else step


class _Target:
    """The target's distribution over all sequences that start with a prefix, float64 `[V^N]`."""

    def __init__(self, model: TableModel, sampling: Sampling, condition: int, prefix: Sequence[int]):
        self.vocab, self.tokens = model.vocab, model.tokens
        joint = model.joint(condition, lambda logits: to_probs(logits, sampling)).flatten()
        self.joint, self.probs = joint, joint.clone()
        if prefix:
            code = encode_sequences(torch.tensor([prefix]), self.vocab)
            keep = torch.zeros(self.vocab ** len(prefix), dtype=torch.float64)
            keep[code] = 1.0
            self.probs = (joint.view(len(keep), -1) * keep[:, None]).flatten()
            if not self.probs.any():
                raise ValueError(f"prefix must be possible under the model, got {tuple(prefix)}, which has probability 0")
            self.probs = self.probs / self.probs.sum()

    def distance(self, weights: Tensor, record: _Pass, law: Tensor | None, settled: Tensor) -> float:
        """Total variation distance between the committed tokens of all rows, continued by the target, and the target.

        With a `law` `[B, V]`, the token after the draft has this distribution; `settled` `[B]` is the position after it.
        """
        V, N = self.vocab, self.tokens
        tokens, length, count = record.tokens, record.length, record.num_committed
        mass = [torch.zeros(V**n, dtype=torch.float64) for n in range(N + 1)]
        spread = torch.zeros_like(length, dtype=torch.bool)
        if law is not None:
            spread = (count > 0) & (settled <= N)
        fixed = length - spread.long()
        for n in range(N + 1):
            rows = (fixed == n).nonzero()[:, 0]
            if not len(rows):
                continue
            code = encode_sequences(tokens[rows, :n], V)
            own = ~spread[rows]
            mass[n].index_add_(0, code[own], weights[rows[own]])
            rows, code = rows[~own], code[~own]
            if len(rows):
                assert law is not None
                index = code[:, None] * V + torch.arange(V)
                mass[n + 1].index_add_(0, index.flatten(), (weights[rows, None] * law[rows]).flatten())
        total, lost = torch.zeros_like(self.joint), 0.0
        for n, part in enumerate(mass):
            prefix = self.joint.view(V**n, -1).sum(1)
            lost += float(part[prefix == 0].sum())
            share = torch.where(prefix > 0, part / prefix.clamp_min(1e-300), 0.0)
            total += (share[:, None] * self.joint.view(V**n, -1)).flatten()
        return float((total - self.probs).abs().sum() + lost) / 2


def _draft_distance(weights: Tensor, record: _Pass) -> float:
    """Largest distance, over the slots, between draft tokens and the q recorded for them; statement (2).

    A draft token is compared given the committed tokens, the recorded q, and the tokens and q of its ancestors and of the
    earlier siblings of both.
    """
    draft, B = record.draft, len(weights)
    if draft.probs is None:
        return 0.0
    tree, worst = draft.tree, 0.0
    assert tree.parents.dim() == 1, "drafts that stay for the next pass have one tree for all images"
    rounded = (draft.probs.double() * 2**18 + 0.31).floor().long()
    filled = torch.where(torch.arange(record.before.shape[1]) < record.length_before[:, None], record.before, -1)
    siblings = tree.earlier_siblings
    for slot in range(1, len(tree.parents)):
        line = tree.ancestors[slot]
        seen = (line | (siblings & line[:, None]).any(0)).clone()
        seen[0] = seen[slot] = False
        others = seen.nonzero()[:, 0] - 1
        key = torch.cat([filled, rounded[:, slot - 1], draft.tokens[:, others], rounded[:, others].flatten(1)], 1)
        valid = torch.ones(B, dtype=torch.bool) if draft.valid is None else draft.valid[:, slot - 1]
        if not valid.any():
            continue
        group = key[valid].unique(dim=0, return_inverse=True)[1]
        V, w = draft.probs.shape[2], weights[valid]
        found = torch.zeros(int(group.max()) + 1, V, dtype=torch.float64)
        claimed = torch.zeros_like(found)
        found.index_put_((group, draft.tokens[valid, slot - 1]), w, accumulate=True)
        claimed.index_add_(0, group, w[:, None] * draft.probs[valid, slot - 1].double())
        worst = max(worst, float((found - claimed).abs().sum()) / 2)
    return worst


def sum_images(
    method: ScaleSchedule, model: ScaleTable, sampling: Sampling | None = None, *, max_drafts: int = MAX_DRAFTS
) -> PassSum:
    """Sum all passes of a next-scale method, from the first scale to the last, over all drafts and outcomes.

    Raises:
        NotEnumerableError, TooManyOutcomesError: as `sum_pass`.
    """
    sampling = Sampling() if sampling is None else sampling
    each, stages = Enumeration(sum(model.scale_tokens), max_drafts, 10 * max_drafts), method.bind(model)

    def program() -> Tensor:
        B = len(each)
        scales = ScalePasses(model, stages, torch.zeros(B, dtype=torch.int64), B, Clock(torch.device("cpu"), False))
        scales.make_noise = each.make_noise
        scales.start(torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.int64), sampling)
        while scales.scale < len(stages):
            scales.run()
            scales.add()
        return scales.tokens

    with torch.no_grad():
        tokens = each.run(program)
    V, L = model.vocab, tokens.shape[1]
    found = torch.zeros(V**L, dtype=torch.float64)
    found.index_add_(0, encode_sequences(tokens, V), each.weights)
    truth = model.joint(0, lambda logits: to_probs(logits, sampling))
    return PassSum(float((found - truth).abs().sum()) / 2, 0.0, None, len(each), len(each), len(stages))


__all__ = [
    "MAX_DRAFTS",
    "NotEnumerableError",
    "PassSum",
    "ReusedNoiseError",
    "TooManyOutcomesError",
    "sum_images",
    "sum_pass",
]
