"""Running ahead changes when passes run, on which thread, and nothing else: not a bit, a count, a callback, or an error."""

from __future__ import annotations

import gc
import math
import threading
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_video import LEVELS, condition, models, preview, stream, transformer, varied, video

from vargen.adapters import Guidance
from vargen.adapters.causal_video import CausalVideoBlockModel
from vargen.decoding import Replay, Threshold, VideoMethod
from vargen.decoding.video import run_ahead
from vargen.decoding.video.denoising import shifted_levels

FREE = VideoMethod(policy=Threshold(), target_blocks=())
ROUTED = VideoMethod(policy=Replay(("target", "draft", "draft", "refined", "draft", "target", "target", "draft")), refine=2)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("vargen-run-ahead")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if workers():  # of a stream that was dropped: they end with it
        gc.collect()
    for thread in workers():
        thread.join(20)
    assert not workers()


def ladder(
    window: int | None = None, sinks: int = 0, guided: bool = False, draft: dict[str, Any] | None = None
) -> CausalVideoBlockModel:
    """One network with two tables of steps."""
    options = {"window": window, "sinks": sinks}
    if guided:
        options["guidance"] = Guidance(2.0, negative=condition(3))
    small = CausalVideoBlockModel(transformer(0), shifted_levels((1000, 500)), **{**options, **(draft or {})})
    return CausalVideoBlockModel(transformer(0), LEVELS, draft_model=small, **options)


def played(ahead: bool, method, blocks: int = 7, model=models, window=(None, 0), **options):
    """Latents, frames, records without seconds, and callbacks."""
    calls = []
    made = stream(method, blocks, model(*window), run_ahead=ahead, callback=calls.append, **options)
    latents, frames = video(made)
    records = [{k: v for k, v in block.to_dict().items() if not k.startswith("seconds")} for block in made.stats.blocks]
    return made, latents, frames, records, calls


@pytest.mark.parametrize("window", [(None, 0), (6, 2)], ids=["all", "window"])
@pytest.mark.parametrize("tau", [-math.inf, 0.4, math.inf])
@pytest.mark.parametrize(
    ("method", "model"),
    [
        (FREE, models),
        (FREE, ladder),
        (replace(FREE, exit_step=2), models),
        (replace(FREE, refine=2, max_accepted_in_row=2, pause_after_rejections=2, pause_blocks=2), models),
    ],
    ids=["pair", "ladder", "early exit", "limits"],
)
def test_nothing_changes_by_a_bit(method, model, tau: float, window) -> None:
    plain, ahead = (played(on, method.with_tau(tau), model=model, window=window) for on in (False, True))
    assert torch.equal(plain[1], ahead[1]) and torch.equal(plain[2], ahead[2])
    assert plain[3:] == ahead[3:]
    outcomes = {record["outcome"] for record in plain[3]}
    assert outcomes >= {-math.inf: {"accepted"}, 0.4: {"accepted", "rejected"}, math.inf: {"rejected"}}[tau]
    assert plain[0].stats.blocks_discarded == 0 and (ahead[0].stats.blocks_discarded > 0) == ("rejected" in outcomes)


@pytest.mark.parametrize("method", ["target", "draft", "stride", "early-exit", "sdvg-relative", "sdvg-quantile", ROUTED])
def test_methods_without_a_fixed_threshold_do_not_change_either(method) -> None:
    options = {"window": (6, 2), "preview": preview(), "given": [torch.ones(1, 1, 4, 2, 2)]}
    plain, ahead = (played(on, method, 8, **options) for on in (False, True))
    assert torch.equal(plain[1], ahead[1]) and torch.equal(plain[2], ahead[2]) and plain[3:] == ahead[3:]


def test_a_refused_draft_discards_the_block_after_it_and_is_counted() -> None:
    made = stream(FREE.with_tau(math.inf), 5, run_ahead=True)
    video(made)
    assert made.stats.blocks_discarded == 4, "none after the last block"
    assert made.stats.passes_discarded <= 4 * (1 + len(LEVELS)) and made.stats.passes["draft"] == 5 * len(LEVELS) + 4
    assert made.stats.to_dict()["blocks_discarded"] == 4


class Signalled(CausalVideoBlockModel):
    """Sets an event when it drafts a block, and fails in one."""

    def __init__(self, *arguments, fails: int | None = None, **options):
        super().__init__(*arguments, **options)
        self.fails, self.begun = fails, {number: threading.Event() for number in range(20)}
        self.threads: set[str] = set()

    def forward(self, state, clean, noisy=None, level=0.0):
        found = super().forward(state, clean, noisy, level)
        number = state.cache.frames // self.block_shape[0]
        self.threads.add(threading.current_thread().name)
        if noisy is not None:
            self.begun[number].set()
        if noisy is not None and number == self.fails:
            raise MemoryError("out of memory in the drafter")
        return found


def signalled(fails: int | None = None) -> tuple[Signalled, CausalVideoBlockModel]:
    small = Signalled(transformer(1, dim=12, num_heads=1, num_layers=1), LEVELS, fails=fails)
    return small, CausalVideoBlockModel(transformer(0), LEVELS, draft_model=small)


def test_the_next_block_is_drafted_while_one_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    small, model = signalled()
    ticks = count()  # of a clock that advances when it is read
    monkeypatch.setattr(run_ahead, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    def score(view):
        if view.number < 3:
            assert small.begun[view.number + 1].wait(60), "nothing ran beside the scorer"
            assert made._ahead._task.result.exception(60) is None
        return torch.ones(2)

    made = stream(FREE.with_tau(0.0), 4, model, score=score, run_ahead=True)
    video(made)
    assert made.stats.failures == [] and made.stats.acceptance == 1
    assert {name.startswith("vargen-run-ahead") for name in small.threads} == {False, True}
    assert [block.seconds_hidden for block in made.stats.blocks] == [0, 1, 1, 1], (
        "an update, the steps, and less one of waiting"
    )
    assert made.stats.seconds_hidden == 3


@pytest.mark.parametrize("on", [False, True])
def test_an_error_of_the_drafter_is_that_of_its_block(on: bool) -> None:
    model, calls = signalled(fails=2)[1], []
    made = stream(FREE.with_tau(-math.inf), 5, model, run_ahead=on, callback=calls.append)
    assert [next(made).number for _ in range(2)] == [0, 1]
    rejects(lambda: next(made), "out of memory in the drafter", MemoryError)
    assert list(made) == [] and made.target is None and len(calls) == 2 * len(LEVELS) + 2


def test_an_error_in_a_block_that_is_discarded_is_none() -> None:
    method = VideoMethod(policy=Threshold(math.inf), target_blocks=(0, 2, 3))
    made = stream(method, 4, signalled(fails=2)[1], run_ahead=True)
    assert torch.equal(video(made)[0], video(stream("target", 4))[0])


def test_a_run_that_is_stopped_ends_its_worker() -> None:
    steps = []

    def stops(progress):
        steps.append(progress)
        return progress.passes < 7

    for on in (False, True):
        steps.clear()
        made = stream(FREE.with_tau(-math.inf), 5, run_ahead=on, callback=stops)
        assert len(list(made)) == 1 and made.stats.stopped and made.target is None
        assert [step.passes for step in steps] == list(range(1, 8)) and steps[-1].block == 1
    made = stream(FREE.with_tau(-math.inf), 50, run_ahead=True)
    next(made)
    made.cancel()
    assert list(made) == [] and made.stats.stopped and len(made.stats.blocks) == 1

    def interrupted(view):
        if view.number == 2:
            raise KeyboardInterrupt
        return torch.ones(2)

    made = stream(FREE.with_tau(-math.inf), 5, score=interrupted, run_ahead=True)
    with pytest.raises(KeyboardInterrupt):
        list(made)
    assert made.target is None and not workers()


def test_a_video_that_is_dropped_ends_its_worker() -> None:
    made = stream(FREE.with_tau(-math.inf), 50, run_ahead=True)
    next(made)
    assert len(workers()) == 1
    made.close()
    assert not workers() and list(made) == []
    made = stream(FREE.with_tau(-math.inf), 50, run_ahead=True)
    next(made)
    del made  # the fixture sees that the thread ends


def test_a_prompt_and_a_threshold_change_what_had_been_started() -> None:
    found = []
    for on in (False, True):
        made = stream(FREE.with_tau(-math.inf), 7, models(6, 2), run_ahead=on)
        blocks = [next(made) for _ in range(3)]
        made.change_prompt(condition(1), lambda view: varied(view).flip(0))
        blocks.append(next(made))
        made.tau = math.inf
        blocks += list(made)
        found.append((torch.cat([block.latents for block in blocks]), [block.record.outcome for block in blocks]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == ["accepted"] * 4 + ["rejected"] * 3


def test_two_videos_run_side_by_side() -> None:
    made = [stream(FREE.with_tau(0.4), 4, seed=seed, run_ahead=True) for seed in (1, 2)]
    together = [list(blocks) for blocks in zip(*made, strict=True)]
    for seed, blocks in zip((1, 2), zip(*together, strict=True), strict=True):
        alone = video(stream(FREE.with_tau(0.4), 4, seed=seed, run_ahead=False))[0]
        assert torch.equal(torch.cat([block.latents for block in blocks]), alone)


def test_it_is_off_where_no_core_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ((2, 1, 0.9, True), (2, 1, 1.1, False), (2, 2, 0.0, False), (1, 1, None, False), (16, 8, 8.0, True))
    for cores, threads, load, expected in (*cases, (2, 1, None, True)):
        monkeypatch.setattr(run_ahead, "available_cores", lambda cores=cores: cores)
        monkeypatch.setattr(run_ahead, "load_average", lambda load=load: load)
        assert run_ahead.pays_off(torch.device("cpu"), threads) is expected
    assert not run_ahead.pays_off(torch.device("cuda"), 1)
    monkeypatch.setattr(run_ahead, "available_cores", lambda: 1)
    made = stream("draft", 2)
    next(made)
    assert made._ahead is None
    rejects(lambda: stream("draft", 2, run_ahead=1), "run_ahead", TypeError)


# -- one network with several tables of steps


@pytest.mark.parametrize("guided", [False, True])
def test_a_ladder_keeps_one_cache_with_the_bits_of_two(monkeypatch: pytest.MonkeyPatch, guided: bool) -> None:
    method = replace(FREE, lazy=False).with_tau(0.4)
    both = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(CausalVideoBlockModel, "shares_cache", False)
        made = stream(method, 6, ladder(6, 2, guided=guided), run_ahead=False)
        blocks = [next(made) for _ in range(5)]
        assert (made.drafter.context is made.target.context) == shared
        both.append((torch.cat([block.latents for block in [*blocks, *made]]), made.stats))
    (one, few), (two, many) = both
    assert torch.equal(one, two) and few.sources == many.sources and set(few.sources) == {"draft", "target"}
    fed = [sum(stats.passes.values()) for stats in (few, many)]
    assert fed[1] - fed[0] == 5, "each block but the last is fed once instead of twice"


def test_only_equal_caches_are_shared() -> None:
    assert ladder().shares_cache and ladder(6, 2, guided=True).shares_cache
    assert not models().shares_cache and not CausalVideoBlockModel(transformer(0), LEVELS).shares_cache
    for draft in (
        {"window": 8},
        {"sinks": 1},
        {"motion": 1},
        {"guidance": 1.0},
        {"guidance": Guidance(2.0, negative=condition(4))},
    ):
        assert not ladder(6, 2, guided=True, draft=draft).shares_cache, draft
