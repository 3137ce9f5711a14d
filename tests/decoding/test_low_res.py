"""Drafts from a low resolution, pooled acceptance, local repair: exact where they say so, else as far from it as reported."""

import dataclasses

import pytest
import torch

from vargen.decoding import (
    Accelerator,
    Draft,
    Jacobi,
    Noise,
    PooledRule,
    Tree,
    decode,
    speculative_sampling,
)
from vargen.decoding.experimental import Wavefront, WavefrontRule
from vargen.decoding.noise import Purpose
from vargen.kernels import ops
from vargen.verify.exact_sum import sum_pass
from vargen.verify.exactness import DETECTED, TOLERANCE, Case
from vargen.verify.tables import TableLowRes, TableModel

GRID = Case("three rows of two", tokens=6, rows=3)
SUMMED = Case("three rows of two, 2 codes", tokens=6, rows=3, vocab=2)


def drafts(window: int = 4, coupling: str = "maximal", initial: str = "low-res") -> Jacobi:
    return Jacobi(window, coupling, initial)


@pytest.mark.parametrize("coupling", ["maximal", "from-verdict"])
def test_initial_drafts_are_made_where_they_are_used(coupling, monkeypatch):
    """The host skips those of which it knows that no image takes them; the drafts are the same."""
    method = Accelerator(
        drafter=drafts(16, coupling), acceptance=speculative_sampling if coupling == "maximal" else PooledRule(0, 0.3)
    )
    asked = []

    def run():
        asked.clear()
        model = large()
        model.codebook = torch.randn(9, 4, generator=torch.Generator().manual_seed(5))
        probs = model.low_res.probs
        model.low_res.probs = lambda *given: asked.append(given[3].shape[1]) or probs(*given)
        return decode(model, torch.zeros(3, dtype=torch.int64), torch.arange(3), method).tokens

    few, made = run(), sum(asked)
    monkeypatch.setattr(ops, "host_values", lambda values: None)
    assert torch.equal(few, run()) and made < sum(asked) / 2


@dataclasses.dataclass(frozen=True)
class Everywhere(PooledRule):
    """Draws anew what lies before a refused draft, too, as MuLo's squares do."""

    def _is_near_rejected(self, rejected, position):
        row, column = position // self.columns, position % self.columns
        near = ((row[:, :, None] - row[:, None, :]).abs() <= self.radius) & (
            (column[:, :, None] - column[:, None, :]).abs() <= self.radius
        )
        return (near & rejected[:, None, :] & (position[:, :, None] != position[:, None, :])).any(2)


@pytest.mark.parametrize(("rule", "right"), [(PooledRule, True), (Everywhere, False)])
def test_to_repair_what_lies_before_a_refused_draft_would_bias_it(rule, right):
    """Four drafts of two tokens: the first is always refused; the third should come out even, and the fourth is refused in half
    of all cases if the third is token 0, never if it is token 1."""
    B = 40_000
    model = TableModel(vocab=2, tokens=6)
    bound = rule(size=0, threshold=2.0, radius=1).bind(model)
    noise = Noise(torch.arange(B), torch.arange(1, 6).expand(B, -1), 1)
    q = torch.full((B, 4, 2), 0.5)
    tokens = noise.sample(torch.cat([q, q[:, :1]], 1), Purpose.DRAFT)[:, :4]
    probs = torch.full((B, 5, 2), 0.5)
    probs[:, 0] = torch.nn.functional.one_hot(1 - tokens[:, 0], 2)
    probs[:, 3] = torch.where(tokens[:, 2:3] == 0, torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    verdict = bound(probs, Draft(tokens, Tree.make_chain(4), q), noise, torch.zeros(B))
    assert (verdict.count == 1).all() and not verdict.relaxation.any()
    assert (abs(verdict.sampled[:, 2].float().mean() - 0.5) < 0.01) == right


@pytest.mark.parametrize("radius", [0, 1])
@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_images_are_no_further_from_the_target_than_was_reported(radius, threshold):
    """What the rule keeps past the first refusal is counted, too."""
    method = Accelerator(drafter=drafts(6, "from-verdict"), acceptance=PooledRule(1, threshold, radius))
    found = sum_pass(method, SUMMED.model(), passes=2)
    assert DETECTED <= found.distance <= found.relaxation + TOLERANCE


def test_nothing_allowed_is_a_maximal_coupling():
    rule = PooledRule(size=0, threshold=2.0)
    verified = Accelerator(drafter=drafts(6, "from-verdict"), acceptance=rule)
    arguments = (torch.zeros(64, dtype=torch.int64), torch.arange(64))
    plain = decode(GRID.model(), *arguments, Accelerator(drafter=drafts(6), acceptance=speculative_sampling))
    found = decode(GRID.model(), *arguments, verified)
    assert torch.equal(plain.tokens, found.tokens) and not any(found.stats.relaxation)


# -- wavefronts -------------------------------------------------------------------------------------------------------


def front(reach: int, window: int = 6, budget: float | None = None, initial: str = "uniform") -> Accelerator:
    return Accelerator(drafter=Wavefront(window, initial=initial, reach=reach), acceptance=WavefrontRule(budget=budget))


def large() -> TableModel:
    model = TableModel(vocab=9, tokens=64, seed=6, rows=8)
    model.low_res = TableLowRes(TableModel(vocab=9, tokens=64, seed=8, rows=8))
    return model


def test_a_wavefront_is_no_further_from_the_target_than_was_reported():
    found = sum_pass(front(0), SUMMED.model(), passes=3)
    assert DETECTED <= found.distance <= found.relaxation + TOLERANCE


def test_a_front_of_a_whole_row_is_the_exact_window():
    arguments = (torch.zeros(8, dtype=torch.int64), torch.arange(8))
    plain = Accelerator(drafter=Jacobi(32, "maximal"), acceptance=speculative_sampling)
    assert torch.equal(decode(large(), *arguments, front(8, 32)).tokens, decode(large(), *arguments, plain).tokens)


# -- budgets and bad input --------------------------------------------------------------------------------------------


def test_a_low_resolution_of_other_tokens_is_refused():
    model = TableModel(3, 5)
    model.low_res = TableLowRes(TableModel(4, 5))
    with pytest.raises(ValueError, match=r"share the target's vocabulary and grid, 3 tokens on \(1, 5\), got 4 on \(1, 5\)"):
        drafts().bind(model, 1)
