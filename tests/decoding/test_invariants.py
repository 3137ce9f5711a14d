"""The invariants of docs/design.md for every preset and every rule, on table models.

Exact rules reach the joint distribution: `test_exactness`. Nothing in a pass is read on the host: `test_graphs`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rejects import rejects
from table_methods import METHODS, RELAXED, TOKENS, VOCAB, generate, table_model

from vargen.decoding import (
    NonFiniteLogitsError,
    PooledRule,
    Sampling,
    ScaleSchedule,
    Stage,
    decode,
    decode_scales,
    list_methods,
    shared_noise,
    speculative_sampling,
)
from vargen.decoding.experimental import recursive_rejection
from vargen.decoding.interfaces import AcceptanceRule
from vargen.decoding.sampling import to_probs
from vargen.verify.tables import ScaleTable

every_method = pytest.mark.parametrize("name", METHODS)


class WatchedRule(AcceptanceRule):
    """A rule that keeps what it was given."""

    def __init__(self, rule: AcceptanceRule, seen: list[Any]):
        self.rule, self.seen = rule, seen
        self.exact, self.topologies, self.requires = rule.exact, rule.topologies, rule.requires

    def bind(self, model: Any) -> WatchedRule:
        return WatchedRule(self.rule.bind(model), self.seen)

    def __call__(self, probs, draft, noise, relaxation):
        self.seen.append((probs.clone(), draft, noise.position.clone()))
        return self.rule(probs, draft, noise, relaxation)


@every_method
def test_p_and_q_are_distributions_after_the_filters_in_float32(name: str) -> None:
    """p after each slot is that of its own path of tokens, and q of each valid draft token of an exact method is positive."""
    seen: list[Any] = []
    model, sampling = table_model(), Sampling(0.8, top_k=4)
    model.table = model.table.bfloat16()
    method = METHODS[name]
    result = generate(replace(method, acceptance=WatchedRule(method.acceptance, seen)), model=model, sampling=sampling)
    assert result.finished and seen
    condition = torch.arange(3)[:, None] % 2
    for probs, draft, position in seen:
        parents = draft.tree.parents.expand(3, -1)[:, 1:]
        before = draft.tokens.gather(1, (parents - 1).clamp(min=0))
        expected = to_probs(model.logits(condition, position[:, 1:], before, draft.tokens), sampling)
        known = (parents > 0) & (position[:, 1:] < TOKENS)
        assert probs.dtype == torch.float32 and torch.equal(probs[:, 1:][known], expected[known])
        if draft.probs is not None:
            q, valid = draft.probs.expand(3, -1, -1), position.gather(1, parents) < TOKENS
            valid = valid if draft.valid is None else valid & draft.valid
            assert q.dtype == torch.float32 and torch.allclose(q.sum(2)[valid], torch.ones(()), atol=1e-5)
            assert method.kind == "relaxed" or (q.gather(2, draft.tokens[..., None])[..., 0][valid] > 0).all()


@every_method
def test_an_image_does_not_depend_on_its_batch(name: str) -> None:
    model, condition, seeds = table_model(), torch.tensor([0, 1, 1]), torch.tensor([50, 51, 50])
    together = decode(model, condition, seeds, METHODS[name])
    for row in range(3):
        alone = decode(model, condition[row : row + 1], seeds[row : row + 1], METHODS[name])
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert math.isclose(alone.stats.relaxation[0], together.stats.relaxation[row], abs_tol=1e-4)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.acceptance is shared_noise])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.95)], ids=["unfiltered", "filtered"])
def test_shared_noise_generates_the_image_of_ar(name: str, sampling: Sampling) -> None:
    expected = generate(METHODS["ar"], sampling=sampling)
    assert torch.equal(generate(METHODS[name], sampling=sampling).tokens, expected.tokens)


@every_method
def test_a_finished_image_never_writes_past_its_grid(name: str) -> None:
    lengths, tokens = [], []

    def callback(progress: Any) -> None:
        lengths.append(progress.length.clone())
        tokens.append(progress.tokens[:, :TOKENS].clone())
        assert (progress.length <= TOKENS).all() and (progress.num_committed >= 0).all()

    result = generate(METHODS[name], callback=callback)
    for length, held in zip(lengths, tokens, strict=True):
        committed = torch.arange(TOKENS) < length[:, None]
        assert torch.equal(held[committed], result.tokens[committed])
    assert result.length.tolist() == [TOKENS] * 3 and result.tokens.max() < VOCAB
    stats = result.stats
    assert stats.tokens == sum(number * count for number, count in enumerate(stats.committed_histogram)) == 3 * TOKENS
    assert stats.passes == len(lengths) and (stats.passes < TOKENS or name in ("ar", "auto"))


@every_method
def test_the_model_can_be_used_after_an_error(name: str) -> None:
    model, whole = table_model(), generate(METHODS[name])

    def callback(progress: Any) -> None:
        raise KeyError("mine")

    rejects(lambda: generate(METHODS[name], model=model, callback=callback), "mine", KeyError)
    again = generate(METHODS[name], model=model)
    assert again.finished and (name == "auto" or torch.equal(again.tokens, whole.tokens))
    model.table[:, 11] = math.nan
    with pytest.raises(NonFiniteLogitsError, match=rf"token \d+ of {TOKENS}, pass \d+"):
        generate(METHODS[name], model=model)


@pytest.mark.parametrize("name", RELAXED)
def test_no_image_spends_more_than_its_budget_and_without_one_the_rule_is_exact(name: str) -> None:
    def run(acceptance: AcceptanceRule) -> Any:
        return generate(replace(method, acceptance=acceptance), 16)

    method, rule = RELAXED[name], RELAXED[name].acceptance
    free, capped, none = (run(replace(rule, budget=budget)) for budget in (None, 0.4, 0.0))
    assert max(capped.stats.relaxation) <= 0.4 + 1e-4 and sum(free.stats.relaxation) > sum(capped.stats.relaxation) > 0
    assert max(none.stats.relaxation) == 0
    if name != "wavefront":  # which keeps draft tokens without the rule
        assert 0 < sum(run(replace(rule, tightening=50.0)).stats.relaxation) < sum(free.stats.relaxation)
    if method.drafter.provides and name not in ("local repair", "wavefront"):  # these keep draft tokens after a rejection
        exact = recursive_rejection if method.drafter.topology == "tree" else speculative_sampling
        assert torch.equal(none.tokens, run(exact).tokens)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not isinstance(method.acceptance, PooledRule)])
def test_certain_tokens_are_never_replaced(name: str) -> None:
    """Also where a relaxed rule would accept another one."""
    model = table_model()
    for position, token in {3: 2, 10: 0, 29: 5}.items():
        model.table[:, position] = -1e4
        model.table[:, position, :, :, token] = 0.0
    assert (generate(METHODS[name], 16, model).tokens[:, [3, 10, 29]] == torch.tensor([2, 0, 5])).all()


SCHEDULES = (
    *list_methods("next-scale"),
    ScaleSchedule("there and back", (Stage(until=2), Stage(until=4, model="draft"), Stage())),
    ScaleSchedule("all by the small model", (Stage(model="draft"),)),
)


@pytest.mark.parametrize("scales", [(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 2)], ids=len)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.name)
def test_an_image_of_scales_does_not_depend_on_its_batch(schedule: ScaleSchedule, scales: tuple[int, ...]) -> None:
    model, N = ScaleTable(2, scales, seed=4), 16
    model.draft_model = ScaleTable(2, scales, seed=77)
    model.draft_model.tables = [a + b / 2 for a, b in zip(model.tables, model.draft_model.tables, strict=True)]

    def run(size: int) -> list[Any]:
        batches = torch.arange(N).split(size)
        return [decode_scales(model, numbers % 2, numbers + 200, schedule) for numbers in batches]

    alone = run(1)
    for together in (run(2), run(5), run(N)):
        for value in ("tokens", "canvas"):
            assert torch.equal(*(torch.cat([getattr(each, value) for each in runs]) for runs in (alone, together)))
