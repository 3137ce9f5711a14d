"""A video chooses its CPU threads by what its passes take with them, as images do; blocks are shown in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_video import models, stream

from vargen.decoding import costs
from vargen.decoding import costs as cost


@pytest.fixture(autouse=True)
def kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "_costs_by_key", {})
    monkeypatch.setattr(cost, "available_cores", lambda: 4)


@pytest.mark.parametrize(("seconds", "chosen"), [({1: 1.0, 2: 0.9}, 1), ({1: 1.0, 2: 0.6, 4: 0.5}, 2), ({1: 1.0, 2: 40.0}, 1)])
def test_threads_have_to_pay(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int) -> None:
    timed: list[int] = []

    def slow(run: Any) -> float:
        timed.append(torch.get_num_threads())
        run()
        return seconds[torch.get_num_threads()]

    monkeypatch.setattr(cost, "time_call", slow)
    monkeypatch.setattr(cost, "user_thread_count", lambda: None)
    before, seen = torch.get_num_threads(), []
    made = stream("target", blocks=3, callback=lambda _: seen.append(torch.get_num_threads()))
    for _ in made:
        assert torch.get_num_threads() == before, "of the caller's own work"
    assert set(seen) == {chosen} and made.stats.threads == chosen
    measured = len(timed)
    list(stream("target", blocks=1))
    assert len(timed) == measured, "remembered"


def test_a_number_that_a_person_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "user_thread_count", lambda: (3, "--threads"))
    monkeypatch.setattr(cost, "time_call", None)  # nothing is measured
    made = stream("target", blocks=1)
    list(made)
    assert made.stats.threads == torch.get_num_threads()


def test_measuring_leaves_the_video_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "user_thread_count", lambda: (1, "--threads"))
    alone = torch.cat([block.latents for block in stream("sdvg", blocks=3, model=models(window=4))])
    monkeypatch.setattr(cost, "user_thread_count", lambda: None)
    again = torch.cat([block.latents for block in stream("sdvg", blocks=3, model=models(window=4))])
    torch.testing.assert_close(again, alone)
