"""Continuous batching: an image is the same whatever is beside it and whenever it joined the batch."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from rejects import rejects
from table_methods import METHODS, PRESETS_OF_TOKENS, TOKENS, table_model

from vargen.decoding import Accelerator, Jacobi, NonFiniteLogitsError, Sampling, decode, shared_noise
from vargen.decoding.engine import Engine
from vargen.decoding.requests import FinishedImage

JOINING = [*PRESETS_OF_TOKENS, "jacobi, low-res", "local repair", "draft model, k-seq", "draft model, shared noise"]
OPTIONS = [Sampling(0.9, top_p=0.95), Sampling(0.0), Sampling(0.7, 4, min_p=0.1), Sampling(), Sampling(0.0, top_k=2)]
SEEDS, CONDITION = torch.arange(100, 105), torch.tensor([0, 1, 1, 0, 1])


def finish(engine: Engine) -> dict[int, FinishedImage]:
    return {image.number: image for image in engine.run()}


def run_with_random_arrivals(engine: Engine, samplings: list[Sampling], seed: str) -> dict[int, FinishedImage]:
    """Submit images at random passes, one or two at once."""
    choose, found, first = random.Random(seed), {}, 0
    while first < len(SEEDS) or engine.has_work:
        if first < len(SEEDS) and choose.random() < 0.3:
            last = min(first + choose.choice([1, 2]), len(SEEDS))
            for row in range(first, last):
                assert engine.submit(CONDITION[row : row + 1], SEEDS[row : row + 1], samplings[row]) == [row]
            first = last
        found |= {image.number: image for image in engine.step()}
    return found


@pytest.mark.parametrize("name", JOINING)
def test_an_image_is_the_same_whenever_it_joins_and_whatever_is_beside_it(name: str) -> None:
    """Images beside it have other options: none, greedy, filters."""
    found = run_with_random_arrivals(Engine(table_model(), METHODS[name], batch_size=3), OPTIONS, name)
    for row, sampling in enumerate(OPTIONS):
        alone = decode(table_model(), CONDITION[row, None], SEEDS[row, None], METHODS[name], sampling)
        assert torch.equal(found[row].tokens, alone.tokens[0]) and found[row].error is None
        assert math.isclose(found[row].stats.relaxation[0], alone.stats.relaxation[0], abs_tol=1e-4)


@pytest.mark.parametrize("name", ["gumbel", "scd", "eagle"])
def test_passes_are_those_of_the_list_schedule(name: str) -> None:
    """Each image takes the first free row, and the passes that it takes part in are those that it needs alone."""
    engine = Engine(table_model(), METHODS[name], batch_size=3)
    engine.submit(CONDITION, SEEDS)
    found = finish(engine)
    ends = [0, 0, 0]
    for row in range(len(SEEDS)):
        alone = decode(table_model(), CONDITION[row : row + 1], SEEDS[row : row + 1], METHODS[name])
        own, stats = found[row].stats, alone.stats
        for part in ("passes", "tokens", "passes_by_width", "seeds"):
            assert getattr(own, part) == getattr(stats, part)
        while stats.committed_histogram[-1] == 0:
            stats.committed_histogram.pop()
        assert own.committed_histogram == stats.committed_histogram and own.relaxation == stats.relaxation
        ends[ends.index(min(ends))] += alone.stats.passes - 1
    stats = engine.make_stats([image.stats for image in found.values()])
    assert sum(stats.passes_by_width.values()) == max(ends) and stats.tokens == len(SEEDS) * TOKENS
    assert stats.tokens == sum(number * count for number, count in enumerate(stats.committed_histogram))


@pytest.mark.parametrize("name", ["gumbel", "scd", "speculative", "eagle", "mulo"])
def test_a_request_whose_logits_are_not_finite_ends_alone(name: str) -> None:
    model = table_model()
    assert model.draft_model is not None  # shared by all drafters
    for table in (model, model.draft_model):
        table.table = torch.cat([table.table, table.table[:1]])
    expected = decode(model, CONDITION, SEEDS, METHODS[name]).tokens
    broken = CONDITION.clone()
    broken[[1, 4]] = 2
    model.table[2, 11:] = math.nan
    engine = Engine(model, METHODS[name], batch_size=3)
    engine.submit(broken, SEEDS)
    found = finish(engine)
    for row in range(len(SEEDS)):
        if row in (1, 4):
            assert isinstance(found[row].error, NonFiniteLogitsError)
        else:
            assert found[row].error is None and torch.equal(found[row].tokens, expected[row])


@pytest.mark.parametrize("name", ["gumbel", "eagle", "speculative", "recycle"])
def test_a_cancelled_request_frees_its_row_and_changes_no_other(name: str) -> None:
    engine = Engine(table_model(), METHODS[name], batch_size=2)
    engine.submit(CONDITION, SEEDS)
    found = engine.step() + engine.step()
    assert engine.num_active == 2 and engine.cancel(1) and engine.cancel(3) and engine.num_active == 1
    found += list(engine.run())
    expected = decode(table_model(), CONDITION, SEEDS, METHODS[name]).tokens
    assert sorted(image.number for image in found) == [0, 2, 4]
    assert all(torch.equal(image.tokens, expected[image.number]) for image in found)
    assert not engine.cancel(0) and not engine.cancel(3)
    rejects(lambda: engine.cancel(5), "number", ValueError)


def test_images_join_where_the_window_is_automatic() -> None:
    method = Accelerator(drafter=Jacobi("auto", "gumbel"), acceptance=shared_noise)
    engine = Engine(table_model(), method, batch_size=2)
    engine.submit(CONDITION, SEEDS)
    found, expected = finish(engine), decode(table_model(), CONDITION, SEEDS).tokens
    assert all(torch.equal(found[row].tokens, expected[row]) for row in range(len(SEEDS)))


BAD: dict[str, tuple[Any, ...]] = {
    "batch_size": (lambda: Engine(table_model(), "ar", batch_size=0), ValueError),
    "model": (lambda: Engine("emoji", "ar"), TypeError),  # type: ignore[arg-type]
    "condition": (lambda: Engine(table_model()).submit(CONDITION[:2], SEEDS), ValueError),
    "seeds": (lambda: Engine(table_model()).submit(CONDITION, SEEDS.float()), TypeError),
    "top_k": (lambda: Engine(table_model()).submit(CONDITION, SEEDS, Sampling(top_k=1000)), ValueError),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_refused_by_name(argument: str) -> None:
    make, error = BAD[argument]
    rejects(make, argument, error)


# -- decode of a list -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "scd", "eagle"])
def test_a_list_longer_than_the_batch_gives_the_same_images(name: str) -> None:
    whole = decode(table_model(), CONDITION, SEEDS, METHODS[name])
    parts = decode(table_model(), CONDITION, SEEDS, METHODS[name], batch_size=2)
    assert torch.equal(parts.tokens, whole.tokens) and torch.equal(parts.length, whole.length) and parts.finished
    assert parts.stats.seeds == whole.stats.seeds and parts.stats.images == whole.stats.images == len(SEEDS)
    assert parts.stats.tokens == whole.stats.tokens and parts.stats.passes > whole.stats.passes


def test_a_callback_sees_all_images_of_a_list_may_change_them_and_stops_it() -> None:
    seen: list[list[int]] = []

    def callback(progress: Any) -> bool:
        seen.append(progress.length.tolist())
        progress.tokens[0, 0] = 7
        return len(seen) < 25

    result = decode(table_model(), CONDITION, SEEDS, METHODS["scd"], batch_size=2, callback=callback)
    assert result.stats.stopped and not result.finished and result.length.tolist() == seen[-1] and result.tokens[0, 0] == 7
    assert result.stats.tokens == sum(seen[-1]) and seen[0][2:] == [0, 0, 0] and len(result.stats.relaxation) == len(SEEDS)
    assert all(old <= new for before, after in pairwise(seen) for old, new in zip(before, after, strict=True))


def test_a_list_with_logits_that_are_not_finite_is_an_error() -> None:
    model = table_model()
    model.table[1, 11:] = math.nan
    with pytest.raises(NonFiniteLogitsError, match=rf"token \d+ of {TOKENS}, pass \d+"):
        decode(model, CONDITION, SEEDS, METHODS["gumbel"], batch_size=2)
    rejects(lambda: decode(model, CONDITION, SEEDS, batch_size=0), "batch_size", ValueError)
    rejects(lambda: decode(model, CONDITION, SEEDS.float(), batch_size=2), "seeds", TypeError)  # type: ignore[arg-type]
