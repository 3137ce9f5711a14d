"""A video chooses its CPU threads by what its passes take with them, as images do; blocks are shown in one line."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_transformer
from tiny_video import models, stream

from vargen.decoding import costs
from vargen.decoding import costs as cost
from vargen.models.heads.network import MedusaDrafter


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


def test_a_block_is_shown_in_one_line() -> None:
    text = repr(next(stream("target", blocks=1)))
    assert "tensor" not in text and len(text) < 200 and "number=0" in text


def test_casting_a_network_logs_no_empty_list(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("diffusers.models.modeling_utils")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)  # the command line, in other tests, asks it for errors alone
    try:
        for network in (tiny_transformer("class"), MedusaDrafter(32, 64, 4)):
            network.to(torch.float16)
        logger.warning("modules [] are kept in float32: []")  # as some releases of diffusers log
        logger.warning("something else")
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"something else"}
