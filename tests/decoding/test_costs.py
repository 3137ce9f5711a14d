"""Measured costs: what they are kept for, when they are measured, and how many threads they choose."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import text_pipeline
from tiny_video import models, stream

from vargen import device
from vargen.decoding import costs


@pytest.fixture(autouse=True)
def kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VARGEN_CACHE", str(tmp_path))
    forget()
    return tmp_path / "pass-costs.json"


@pytest.fixture
def generation() -> tuple[Any, Any, Any]:
    """A pipeline, its model as decoding sees it, and a condition."""
    pipe = text_pipeline(grid_size=4)
    return pipe, pipe.decoding_model(2.0), pipe.encode_condition("a cat")[0]


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens fed by each pass that is timed from now on."""
    timed: list[int] = []
    measure = costs._time_pass

    def count(model: Any, state: Any, images: int, width: int) -> float:
        timed.append(width)
        return measure(model, state, images, width)

    monkeypatch.setattr(costs, "_time_pass", count)
    return timed


def forget() -> None:
    """As another process: what is remembered in this one goes."""
    costs._costs_by_key.clear()


def test_costs_are_measured_once_and_kept_for_other_processes(generation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, condition = generation
    timed = passes(monkeypatch)
    first = costs.measure_pass_costs(model, condition, 1, (1, 4))
    assert set(timed) == {1, 4}
    timed.clear()
    assert costs.measure_pass_costs(model, condition, 1, (1, 4)) == first
    forget()
    assert costs.measure_pass_costs(model, condition, 1, (1, 4)) == first
    assert not timed
    costs.measure_pass_costs(model, condition, 1, (1, 2))
    assert set(timed) == {2}


@pytest.mark.parametrize("change", ["dtype", "guidance", "batch", "threads", "size"])
def test_costs_of_one_thing_are_not_taken_for_another(generation: Any, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    pipe, model, condition = generation
    costs.measure_pass_costs(model, condition, 1, (1,))
    timed, images, before = passes(monkeypatch), 1, torch.get_num_threads()
    if change == "dtype":
        pipe.to(torch.float64)
        model = pipe.decoding_model(2.0)
    elif change == "guidance":
        model = pipe.decoding_model(1.0)
    elif change == "batch":
        images, condition = 2, pipe.encode_condition(["a cat", "a dog"])[0]
    elif change == "threads":
        torch.set_num_threads(before + 1)
    else:
        other = text_pipeline(grid_size=8)
        model, condition = other.decoding_model(2.0), other.encode_condition("a cat")[0]
    try:
        costs.measure_pass_costs(model, condition, images, (1,))
    finally:
        torch.set_num_threads(before)
    assert timed


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"x": 1}', "\x00\xff", "FITTING"])
def test_a_damaged_file_costs_a_measurement_and_nothing_else(generation: Any, kept_here: Path, content: str) -> None:
    _, model, condition = generation
    costs.measure_pass_costs(model, condition, 1, (1,))
    if content == "FITTING":  # the right name, and nothing of use behind it
        (name,) = json.loads(kept_here.read_text())
        content = json.dumps({name: {"measured": time.time(), "seconds": {"one": "fast", "1": -3}}})
    kept_here.write_text(content, encoding="latin-1")
    forget()
    assert costs.measure_pass_costs(model, condition, 1, (1,))[1] > 0


def choice(generation: Any, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], width: int = 1) -> int:
    """Threads chosen on four cores where a pass takes so long by threads."""
    _, model, condition = generation
    monkeypatch.setattr(costs, "available_cores", lambda: 4)
    monkeypatch.setattr(costs, "_time_pass", lambda *_: seconds[torch.get_num_threads()])
    monkeypatch.setattr(costs, "user_thread_count", lambda: None)
    count = costs.token_threads(model, condition, 1, width)
    assert count is not None
    return count


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.9, 4: 0.1}, 1),  # the second thread brings a tenth: other programs have more of it
        ({1: 1.0, 2: 0.6, 4: 0.5}, 2),
        ({1: 1.0, 2: 0.6, 4: 0.3}, 4),
        ({1: 1.0, 2: 40.0, 4: 90.0}, 1),  # beside other programs
    ],
)
def test_threads_have_to_pay(generation: Any, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int) -> None:
    before = torch.get_num_threads()
    assert choice(generation, monkeypatch, seconds) == chosen
    assert torch.get_num_threads() == before


def test_a_number_that_a_person_chose_stays(generation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, condition = generation
    timed = passes(monkeypatch)
    with device.limit_threads(2):
        assert costs.token_threads(model, condition, 1, 1) is None
    assert not timed


def test_one_thread_is_timed_by_its_processor_time(generation: Any) -> None:
    """What other programs take from the clock is no cost of a pass."""
    _, model, condition = generation
    state, _ = model.start(condition, 1)
    forward = model.forward

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return forward(*arguments)

    model.forward = slow
    with device.limit_threads(1):
        assert costs._time_pass(model, state, 1, 1) < 0.25
    with device.limit_threads(2):
        assert costs._time_pass(model, state, 1, 1) > 0.25


# -- videos --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "chosen"), [({1: 1.0, 2: 0.9}, 1), ({1: 1.0, 2: 0.6, 4: 0.5}, 2), ({1: 1.0, 2: 40.0}, 1)])
def test_threads_of_a_video_have_to_pay(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int) -> None:
    timed: list[int] = []
    monkeypatch.setattr(costs, "available_cores", lambda: 4)

    def slow(run: Any) -> float:
        timed.append(torch.get_num_threads())
        run()
        return seconds[torch.get_num_threads()]

    monkeypatch.setattr(costs, "time_call", slow)
    monkeypatch.setattr(costs, "user_thread_count", lambda: None)
    before, seen = torch.get_num_threads(), []
    made = stream("target", blocks=3, callback=lambda _: seen.append(torch.get_num_threads()))
    for _ in made:
        assert torch.get_num_threads() == before, "of the caller's own work"
    assert set(seen) == {chosen} and made.stats.threads == chosen
    measured = len(timed)
    list(stream("target", blocks=1))
    assert len(timed) == measured, "remembered"


def test_a_number_that_a_person_chose_stays_for_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "user_thread_count", lambda: (3, "--threads"))
    monkeypatch.setattr(costs, "time_call", None)  # nothing is measured
    made = stream("target", blocks=1)
    list(made)
    assert made.stats.threads == torch.get_num_threads()


def test_measuring_leaves_the_video_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "available_cores", lambda: 4)
    monkeypatch.setattr(costs, "user_thread_count", lambda: (1, "--threads"))
    alone = torch.cat([block.latents for block in stream("sdvg", blocks=3, model=models(window=4))])
    monkeypatch.setattr(costs, "user_thread_count", lambda: None)
    again = torch.cat([block.latents for block in stream("sdvg", blocks=3, model=models(window=4))])
    torch.testing.assert_close(again, alone)
