"""Relaxed rules on trees: what they grant is counted, capped by the budget, and nothing at a budget of none."""

import pytest
import torch

from vargen.decoding import (
    Accelerator,
    DynamicTree,
    Eagle,
    NeighborhoodRule,
    RatioRule,
    Sampling,
    TypicalRule,
    decode,
    recursive_rejection,
)
from vargen.evaluation.exactness import MOST_SPREADS, measure
from vargen.evaluation.table_models import TableEagle, TableModel

SHAPES = [(-1, 0, 0, 1, 1, 2), DynamicTree(nodes=5, depth=3, children=2)]


def table() -> TableModel:
    model = TableModel(vocab=3, tokens=5, seed=4)
    model.draft_heads = {"eagle": TableEagle(TableModel(vocab=3, tokens=5, seed=77))}
    model.codebook = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0]])
    return model


MAKERS = [lambda **o: NeighborhoodRule(2, 3.0, **o), lambda **o: RatioRule(2.0, **o), lambda **o: TypicalRule(**o)]


def run(rule, shape):
    return decode(table(), torch.zeros(512, dtype=torch.int64), torch.arange(512), Accelerator("x", Eagle(shape), rule))


@pytest.mark.parametrize("shape", SHAPES, ids=["static", "dynamic"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_budget_bounds_what_a_tree_is_granted(make, shape) -> None:
    exact = run(recursive_rejection, shape)
    free, capped, none = (run(make(**options), shape) for options in ({}, {"budget": 0.05}, {"budget": 0.0}))
    assert torch.equal(none.tokens, exact.tokens) and max(none.stats.relaxation) == 0
    assert 0 < sum(capped.stats.relaxation) < sum(free.stats.relaxation) and max(capped.stats.relaxation) <= 0.05 + 1e-5
    assert free.stats.tokens_per_pass >= exact.stats.tokens_per_pass
    tight = run(make(tightening=50.0), shape)
    assert 0 < sum(tight.stats.relaxation) < sum(free.stats.relaxation)


def test_what_is_granted_is_how_far_one_step_is_from_the_target() -> None:
    """With one position left to draft, the total variation is the mean relaxation."""
    model = TableModel(vocab=4, tokens=2, seed=1)
    model.draft_heads = {"eagle": TableEagle(TableModel(vocab=4, tokens=2, seed=9))}
    method = Accelerator("x", Eagle(DynamicTree(nodes=1, depth=1, children=1)), RatioRule(2.0))
    chains = 40_000
    stats = decode(model, torch.zeros(chains, dtype=torch.int64), torch.arange(chains), method).stats
    granted = sum(stats.relaxation) / chains
    finding = measure(method, model, Sampling(), chains)
    assert granted > 0.02 and not finding.exact
    assert abs(finding.distance - granted) < finding.floor + MOST_SPREADS * finding.spread
