"""States of captured passes: what must not change is named by path, and replaced tensors keep their buffers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from recorded_graph import RecordedGraph
from torch import Tensor

from vargen.decoding.next_token.graphs import GraphedPass, find_leaves, find_replaced, register_state


@register_state
@dataclass
class Inner:
    first: Tensor
    second: Tensor


@dataclass
class Subclass(Inner): ...


@dataclass(frozen=True)
class Settings:
    width: int = 3


class Cache:
    in_place = True

    def __init__(self) -> None:
        self.total = torch.zeros(2)


@register_state
@dataclass
class State:
    inner: Inner
    cache: Cache = field(default_factory=Cache)
    settings: Settings = Settings()
    extra: Any = None


def make_state(extra: Any = None) -> State:
    return State(Inner(torch.ones(2), 2 * torch.ones(2)), extra=extra)


def exchange(state: State) -> tuple[State, tuple[Tensor, ...]]:
    """A pass after which two leaves have exchanged their places, one is a view, and the cache has changed in place."""
    first, second = state.inner.first, state.inner.second
    state.cache.total.add_(first)
    last = (first if state.extra is None else state.extra[:2] + 1)[:1].expand(4)
    return replace(state, inner=Inner(second, first), extra=last), (first + 0,)


def test_replays_equal_eager_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    eager, state = make_state(), make_state()
    graphed = GraphedPass(exchange, RecordedGraph)
    places = set()
    for _ in range(9):
        eager, (expected,) = exchange(eager)
        state, (found,) = graphed(state)
        places.add(state.inner.first.data_ptr())
        for name in ("first", "second"):
            assert torch.equal(getattr(state.inner, name), getattr(eager.inner, name))
        assert torch.equal(found, expected) and torch.equal(state.extra, eager.extra)
        assert torch.equal(state.cache.total, eager.cache.total)
    assert graphed.blocker is None and RecordedGraph.replays == 7 and len(places) <= 3


@pytest.mark.parametrize("what", [torch.Generator(), object(), Subclass(torch.ones(1), torch.ones(1)), lambda: None])
def test_what_may_change_unseen_is_refused_by_name(what: Any) -> None:
    leaves = find_leaves(make_state(what))
    with pytest.raises(RuntimeError, match=rf"state\.extra is a {type(what).__name__}"):
        find_replaced(leaves, leaves)


def test_capture_fails_if_a_leaf_is_replaced_only_later() -> None:
    passes = []

    def step(state: State) -> tuple[State, tuple[Tensor, ...]]:
        passes.append(1)
        return (state if len(passes) < 3 else replace(state, extra=torch.ones(1))), ()

    graphed, state = GraphedPass(step, RecordedGraph), make_state(torch.zeros(1))
    for _ in range(3):
        state, _ = graphed(state)
    assert "state.extra" in str(graphed.blocker) and state.extra.tolist() == [1]
