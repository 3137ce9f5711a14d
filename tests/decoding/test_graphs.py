"""Passes as a graph: the same images and the same statistics. What stands in for a graph on a CPU records the operations of a
pass and repeats them; the last test takes a real graph, where there is a GPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_reports import delay_reports
from recorded_graph import HostReadError, RecordedGraph, captured_passes
from tiny_targets import GRID, take_gpu_paths, tiny_low_res, tiny_target

from vargen import capture
from vargen.decoding import (
    Accelerator,
    DecodeOutput,
    Draft,
    Engine,
    Jacobi,
    Noise,
    Sampling,
    TokenState,
    decode,
    resolve_method,
    shared_noise,
    speculative_sampling,
)
from vargen.decoding.relaxed_rules import PooledRule
from vargen.decoding.window import MAX_AUTO_WIDTH
from vargen.kernels.graph import EAGER_PASSES
from vargen.kernels.host import captures_passes, explain_capture
from vargen.models.guidance import Condition
from vargen.models.llamagen.decoding import LlamaGenTokenModel

METHODS = ["ar", "auto", "scd", "sjd", "gumbel", "gsd", "lantern-jacobi", "lantern", "eagle", "pac", "speculative", "wavefront"]
MORE = ["eagle-gumbel", "eagle-2", "gumbel-tree", "speculative-tree", "layer-skip", "lookup", "recycle", "medusa"]
WITHOUT_FILTERS = [Sampling(), Sampling(0.7), Sampling(1.2)]
OPTIONS = [*WITHOUT_FILTERS, Sampling(0.9, top_k=20), Sampling(0.0), Sampling(1.1, top_p=0.8), Sampling(0.8, 5, 0.9)]
WITH_MIN_P = Sampling(0.9, 20, min_p=0.1)


def generated(
    method: str | Accelerator,
    images: int = 3,
    device: str = "cpu",
    model: LlamaGenTokenModel | None = None,
    captured: bool = False,
    **options: Any,
) -> DecodeOutput:
    condition = Condition(class_labels=torch.arange(1, images + 1, device=device))
    model = tiny_target(device) if model is None else model
    with captured_passes() if captured else nullcontext():
        return decode(model, condition, torch.arange(3, 3 + images), method, Sampling(0.9, top_k=20), **options)


def captured_engine(*args: Any, **options: Any) -> Engine:
    with captured_passes():
        return Engine(*args, **options)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs take the passes of a GPU: neither NumPy nor changing shapes, nor windows that are chosen in each pass."""
    take_gpu_paths(monkeypatch)
    monkeypatch.setattr(RecordedGraph, "made", 0)
    monkeypatch.setattr(RecordedGraph, "replays", 0)


def same(found: DecodeOutput, expected: DecodeOutput) -> bool:
    """Images and statistics, but for seconds."""
    untimed = [replace(each.stats, seconds=0.0, seconds_by_part={}) for each in (found, expected)]
    alike = torch.equal(found.tokens, expected.tokens) and torch.equal(found.length, expected.length)
    return alike and untimed[0] == untimed[1]


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
@pytest.mark.parametrize("images", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_captured_run_is_the_eager_one(method: str, images: int) -> None:
    method = resolve_method(method)
    expected = generated(method, images)
    found = generated(method, images, captured=True)
    assert same(found, expected)
    assert RecordedGraph.made == 1 and RecordedGraph.replays == expected.stats.passes - 3, "but the prefill and two passes"


@pytest.mark.parametrize("upsampled", [True, False])
@pytest.mark.parametrize("method", ["mulo-exact", "mulo"])
def test_drafts_from_a_low_resolution_are_captured(method: str, upsampled: bool) -> None:
    method = resolve_method(method)
    if isinstance(method.acceptance, PooledRule):  # with fewer neighbors, or so small a vocabulary stands in two passes
        method = replace(method, acceptance=PooledRule(size=2))
    model = tiny_target(low_res=tiny_low_res(upsampled))
    expected = generated(method, model=model)
    found = generated(method, model=model, captured=True)
    assert same(found, expected) and RecordedGraph.made == 2, "the low resolution has its own"
    assert RecordedGraph.replays > expected.stats.passes - 3


@pytest.mark.parametrize("method", ["ar", "gumbel", "gsd", "lantern", "speculative"])
def test_passes_that_a_device_runs_after_the_end_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither images nor statistics, but for the passes that were replayed."""
    method = resolve_method(method)
    expected = generated(method)
    delay_reports(monkeypatch)
    assert same(generated(method, captured=True), expected)
    assert RecordedGraph.replays == expected.stats.passes - 3 + 1


@pytest.mark.parametrize("method", ["ar", "scd"])
def test_a_captured_run_can_be_stopped(method: str) -> None:
    expected = generated(method, callback=lambda progress: progress.step < 7)
    found = generated(method, callback=lambda progress: progress.step < 7, captured=True)
    assert not found.finished and same(found, expected)


def test_a_callback_changes_tokens_of_a_captured_run() -> None:
    def change(progress: Any) -> None:
        progress.tokens[:, 3::4] = 5

    expected = generated("scd", callback=change)
    assert same(generated("scd", callback=change, captured=True), expected) and RecordedGraph.replays
    assert (expected.tokens[:, 3] == 5).all() and not same(expected, generated("scd"))


# -- kinds of passes ----------------------------------------------------------------------------------------------------


def watch_kinds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Count the passes of an engine by kind."""
    captured, kinds = engine._pass.captured, Counter[Any]()
    assert captured is not None
    run = captured.run

    def counted(kind: Any, step: Callable[[], object]) -> None:
        kinds[kind] += 1
        run(kind, step)

    monkeypatch.setattr(captured, "run", counted)
    return kinds


@pytest.mark.parametrize("method", ["ar", "scd", "gumbel", "gsd", "eagle", "lantern"])
def test_any_mixture_of_options_is_captured(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three graphs serve all: without filters, as for the first images, with them, and with min-p. Each image is as alone."""
    method, model = resolve_method(method), tiny_target()
    engine = captured_engine(model, method, batch_size=3)
    options = [*OPTIONS, WITH_MIN_P]
    kinds, conditions = watch_kinds(engine, monkeypatch), Condition(class_labels=torch.arange(len(options)))
    for number, sampling in enumerate(options):
        engine.submit(conditions.select_rows(torch.tensor([number])), torch.tensor([number]), sampling)
    found = {image.number: image for image in engine.run()}
    width = next(width for width, *_ in kinds)
    expected = {(width, False, False, True), (width, True, False, True), (width, True, True, True)}
    assert set(kinds) == expected and RecordedGraph.made == 3
    assert RecordedGraph.replays == kinds.total() - 3 * EAGER_PASSES > 0
    for number, sampling in enumerate(options):
        row, seeds = conditions.select_rows(torch.tensor([number])), torch.tensor([number])
        alone = decode(model, row, seeds, method, sampling)
        assert torch.equal(found[number].tokens, alone.tokens[0])
        own = [replace(each, seconds=0.0, seconds_by_part={}, relaxation=[]) for each in (found[number].stats, alone.stats)]
        assert own[0] == own[1]
        # Products of matrices of another size are rounded otherwise.
        assert found[number].stats.relaxation == pytest.approx(alone.stats.relaxation, abs=1e-5)


def test_passes_of_each_width_have_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (2, 5, 1)
    chosen = cycle(widths)
    expected = generated("ar")
    monkeypatch.setattr(Jacobi, "choose_widths", lambda *arguments: SimpleNamespace(choose=lambda: next(chosen)))
    found = generated(Accelerator("changing", Jacobi("auto", "gumbel"), shared_noise), captured=True)
    assert torch.equal(found.tokens, expected.tokens)
    counts = found.stats.passes_by_width
    assert set(counts) == set(widths) and RecordedGraph.made == 3
    assert RecordedGraph.replays == sum(counts.values()) - 3 * EAGER_PASSES > 0


def test_an_automatic_window_is_fixed_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("passes are measured")

    monkeypatch.setattr("vargen.decoding.jacobi.measure_pass_costs", refuse)
    found = generated(Accelerator("auto", Jacobi("auto", "gumbel"), shared_noise))
    assert set(found.stats.passes_by_width) == {min(MAX_AUTO_WIDTH, GRID**2)}


# -- what cannot be captured --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Odd(Jacobi):
    """A drafter that does one thing in each pass that a graph cannot repeat."""

    does: str = ""

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        if self.does == "reads a value":
            state.length.amax().item()
        if self.does == "reads a tensor":
            state.length.tolist()
        if self.does == "selects by a mask":
            _ = state.length[state.length > 0]
        if self.does == "copies from the host":
            _ = state.length + torch.tensor([0] * len(state.length), device=state.length.device)
        return super().propose(state, noise, width)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("reads a value", "item reads a value on the host"),
        ("reads a tensor", "resolve_conj reads a value on the host"),
        ("selects by a mask", "index reads a value on the host"),
        ("copies from the host", "lift_fresh reads a value on the host"),
    ],
)
def test_what_cannot_be_captured_is_run_one_by_one(does: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    method = Accelerator("odd", Odd(6, "maximal", does=does), speculative_sampling)
    expected = generated(method)
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated(method, captured=True), expected)
    assert [reason in each.getMessage() for each in caplog.records] == [True] and RecordedGraph.made == 0


def count_recorded(monkeypatch: pytest.MonkeyPatch, refuse_from: float = float("inf")) -> list[str]:
    """Write down the operations that are recorded, and refuse them from one on, numbered from 1."""
    recorded: list[str] = []

    def before(name: str) -> None:
        recorded.append(name)
        if len(recorded) >= refuse_from:
            raise HostReadError("no such operation")

    monkeypatch.setattr(RecordedGraph, "before", staticmethod(before))
    return recorded


@pytest.mark.parametrize("share", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["ar", "scd", "gumbel", "eagle", "speculative"])
def test_what_fails_while_it_is_captured_is_run_one_by_one(
    method: str, share: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last operation, or amid the pass, where state has been changed already: it is as if it had not been tried."""
    recorded = count_recorded(monkeypatch)
    expected = generated(method, captured=True)
    count_recorded(monkeypatch, refuse_from=len(recorded) * share)
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated(method, captured=True), expected)
    assert ["no such operation" in each.getMessage() for each in caplog.records] == [True]
    assert RecordedGraph.made == 1, "the one before"


HOOKS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "_hf_hook": lambda layer: setattr(layer, "_hf_hook", object()),
    "_diffusers_hook": lambda layer: setattr(layer, "_diffusers_hook", SimpleNamespace(get_hook=lambda name: None)),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda *arguments: None),
    "a hook after": lambda layer: layer.register_forward_hook(lambda *arguments: None),
    "peft": lambda layer: setattr(layer, "base_layer", torch.nn.Identity()),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_networks_with_hooks_or_adapters_are_not_captured(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    expected, model = generated("scd"), tiny_target()
    HOOKS[hook](model.transformer.layers[1].attention.wo)
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated("scd", model=model, captured=True), expected)
    assert RecordedGraph.made == 0 and len(caplog.records) == 1 and "one by one" in caplog.text


@pytest.mark.parametrize("part", ["draft model", "draft head"])
def test_drafters_with_hooks_are_not_captured(part: str, caplog: pytest.LogCaptureFixture) -> None:
    method, model = "speculative" if part == "draft model" else "eagle", tiny_target()
    expected = generated(method)
    drafter: Any = model.draft_model if part == "draft model" else model.draft_heads["eagle"]
    next(drafter.networks[0].children())._hf_hook = object()
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated(method, model=model, captured=True), expected)
    assert RecordedGraph.made == 0 and "hooks" in caplog.text


def replace_data(network: torch.nn.Module) -> None:
    """As a cast and `to` do: other memory in the same parameters."""
    for parameter in network.parameters():
        parameter.data = parameter.data.flip(0).clone()


def replace_parameters(network: torch.nn.Module) -> None:
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.data.flip(0).clone()))


def replace_buffers(network: torch.nn.Module) -> None:
    for module in network.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.flip(0).clone())


def write_in_place(network: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.flip(0).clone())


@pytest.mark.parametrize("when", ["between images", "in an image"])
@pytest.mark.parametrize("change", [replace_data, replace_parameters, replace_buffers, write_in_place])
@pytest.mark.parametrize("method", ["ar", "eagle", "speculative"])
def test_a_graph_never_reads_weights_that_were_there_before(method: str, change: Callable[[Any], None], when: str) -> None:
    if when == "in an image" and change in (replace_parameters, replace_buffers):
        pytest.skip("modules are listed when images start")
    found: list[list[torch.Tensor]] = []
    for make in (captured_engine, Engine):
        model = tiny_target()
        networks = [*model.networks, *model.draft_heads["eagle"].networks, *model.draft_model.networks]  # type: ignore[union-attr]
        engine, images = make(model, method, batch_size=2), Condition(class_labels=torch.arange(2))
        engine.submit(images, torch.arange(2), Sampling(0.9, top_k=20))
        tokens: list[torch.Tensor] = []
        for number in range(2):
            for _ in range(4 if when == "in an image" else 99):
                tokens += [image.tokens for image in engine.step()]
            if number == 0:
                for network in networks:
                    change(network)
            if when == "between images":
                engine.submit(images, torch.arange(2, 4), Sampling(0.9, top_k=20))
        tokens += [image.tokens for image in engine.run()]
        found.append(tokens)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert RecordedGraph.made == (1 if change is write_in_place else 2)


# -- the default ----------------------------------------------------------------------------------------------------------


def test_passes_are_captured_on_nvidia_gpus_unless_a_variable_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert captures_passes(gpu) and not captures_passes(cpu)
    assert explain_capture(gpu).startswith("captured") and "NVIDIA" in explain_capture(cpu)
    monkeypatch.setenv("VARGEN_EAGER", "1")
    assert not captures_passes(gpu) and explain_capture(gpu) == "run one by one: VARGEN_EAGER=1"
    monkeypatch.setenv("VARGEN_EAGER", "yes")
    with pytest.raises(ValueError, match="VARGEN_EAGER"):
        generated("scd")


def test_a_gpu_is_checked_before_its_first_capture(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(capture, "CUDAGraph", lambda device: RecordedGraph)
    assert capture.find_capture_failure.__wrapped__(cpu) is None
    assert RecordedGraph.made == 1 and RecordedGraph.replays == 2 * capture.PASSES - EAGER_PASSES >= 8

    class Forgetful(RecordedGraph):
        def replay(self) -> None:
            self.operations = self.operations[:-3]
            super().replay()

    monkeypatch.setattr(capture, "CUDAGraph", lambda device: Forgetful)
    with caplog.at_level(logging.WARNING, "vargen"):
        assert "other tokens" in str(capture.find_capture_failure.__wrapped__(cpu))
    assert "one by one" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_a_real_graph_generates_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fitted = resolve_method(method)
    monkeypatch.setenv("VARGEN_EAGER", "1")
    expected = generated(fitted, device="cuda")
    monkeypatch.delenv("VARGEN_EAGER")
    with caplog.at_level(logging.WARNING, "vargen"):
        found = generated(fitted, device="cuda")
    assert not caplog.records
    assert torch.equal(found.tokens, expected.tokens)
    assert same(found, expected)
