"""What passes leave to each other stays in one place, whatever it is held by; what cannot is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vargen.decoding.next_token.carried import CannotCarryError, Carried, Snapshot


@dataclass(frozen=True)
class Frozen:
    value: Tensor


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor):
        self.value = value


@dataclass
class State:
    """`numbers` are set by each test."""

    numbers: Any
    fixed: Any = None
    named: dict[str, Any] = field(default_factory=dict)


def carried(state: State, change: Callable[[], None]) -> Carried:
    before = Snapshot({"state": state})
    change()
    after = Snapshot({"state": state})
    assert before.difference(after) is None
    return Carried(before, after)


def ones() -> Tensor:
    return torch.ones(2)


def values(state: State) -> list[list[float]]:
    return [tensor.tolist() for tensor in Snapshot({"state": state}).tensors.values()]


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "attribute": (lambda t: t, lambda held: held),
    "list": (lambda t: [t], lambda held: held[0]),
    "dict": (lambda t: {"a": t}, lambda held: held["a"]),
    "tuple in a list": (lambda t: [(1, t)], lambda held: held[0][1]),
    "named tuple": (lambda t: Pair(t, t + 1), lambda held: held.one),
    "frozen": (Frozen, lambda held: held.value),
    "frozen in a tuple": (lambda t: (Frozen(t),), lambda held: held[0].value),
    "slots": (Slotted, lambda held: held.value),
    "expanded": (lambda t: t[:1].expand(5), lambda held: held),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_stay_where_they_are(name: str) -> None:
    """Three passes, each of which replaces the holder and what it holds; the place is that of the first."""
    hold, held = HOLDERS[name]
    state = State(hold(ones()))

    def step() -> None:
        state.numbers = hold(held(state.numbers) * 2 if name != "expanded" else held(state.numbers)[:2] * 2)

    kept = carried(state, step)
    place = held(state.numbers)
    for expected in (4.0, 8.0, 16.0):
        step()
        assert held(state.numbers) is not place
        kept.settle()
        assert held(state.numbers) is place and place[0] == expected


def test_what_changes_in_place_is_left_alone() -> None:
    state = State(ones())
    cache = state.named["cache"] = ones()

    def step() -> None:
        state.numbers = state.numbers + 1
        cache.add_(1)

    kept = carried(state, step)
    step()
    kept.settle()
    assert state.named["cache"] is cache and cache.tolist() == [3, 3] and state.numbers.tolist() == [3, 3]


def test_places_are_exchanged_and_handed_on() -> None:
    """What a pass hands from one place to another is read before it is written; two names of one tensor part."""
    state = State([ones(), 2 * ones(), 3 * ones()])

    def step() -> None:
        one, two, three = state.numbers
        state.numbers = [two, one, two + three]

    def plain(numbers: list[float]) -> list[float]:
        return [numbers[1], numbers[0], numbers[1] + numbers[2]]

    kept, expected = carried(state, step), plain([1.0, 2.0, 3.0])
    for _ in range(4):
        step()
        kept.settle()
        expected = plain(expected)
        assert [each[0].item() for each in state.numbers] == expected

    state = State(Pair(ones(), ones()))

    def twins() -> None:
        state.numbers = Pair(*[state.numbers.one + 1] * 2)

    kept = carried(state, twins)
    assert state.numbers.one is not state.numbers.other
    twins()
    kept.settle()
    assert values(state) == [[3, 3], [3, 3]]


def test_a_variable_of_a_function_is_carried() -> None:
    held = ones()

    def step() -> None:
        nonlocal held
        held = held + 1

    kept = carried(State(step), step)
    place = held
    step()
    kept.settle()
    assert held is place and held.tolist() == [3, 3]


def test_objects_that_hold_each_other_are_gone_through_once() -> None:
    state = State(ones())
    state.named["itself"] = state
    kept = carried(state, lambda: setattr(state, "numbers", state.numbers + 1))
    state.numbers = state.numbers + 1
    kept.settle()
    assert state.numbers.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (1, 2, "state.fixed, a value of the host, changes"),
        (None, torch.ones(1), "state.fixed, a value of the host, changes"),
        (torch.ones(1), torch.ones(2), "state.fixed changes its shape"),
        (torch.ones(1), torch.ones(1).double(), "state.fixed changes its shape"),
        ([1], [1, 2], r"state.fixed\[1\] is there after some passes only"),
        (torch.ones(2).numpy(), torch.zeros(2).numpy(), "state.fixed, a value of the host, changes"),
        (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), "state.fixed, a value of the host, changes"),
    ],
)
def test_differences_are_named(one: Any, other: Any, reason: str) -> None:
    """Before the capture, and amid it; then all is as it was."""
    state = State(ones(), one)
    before = Snapshot({"state": state})
    state.fixed = other
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(before.difference(Snapshot({"state": state})))
    state.fixed = one
    kept = carried(state, lambda: setattr(state, "numbers", state.numbers + 1))
    state.fixed, state.named["more"], place = other, 1, state.numbers
    state.numbers = ones()
    with pytest.raises(CannotCarryError):
        kept.settle()
    kept.restore()
    assert state.fixed is one and not state.named and state.numbers is place


def test_a_tensor_that_only_later_passes_replace_is_refused() -> None:
    state = State(ones(), ones())
    kept = carried(state, lambda: setattr(state, "numbers", state.numbers + 1))
    state.fixed = ones()
    with pytest.raises(CannotCarryError, match=r"state\.fixed is replaced by some passes only"):
        kept.settle()


@pytest.mark.parametrize("what", [random.Random(1), torch.Generator(), iter([1]), (each for each in ())])
def test_what_cannot_be_seen_to_change_is_refused(what: Any) -> None:
    with pytest.raises(CannotCarryError, match=r"state\.fixed is a .*, whose changes a graph would not repeat"):
        Snapshot({"state": State(ones(), what)})
