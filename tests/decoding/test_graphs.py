"""Passes as a graph: the same pictures and the same statistics. What stands in for a graph on a CPU records the operations of a
pass and repeats them; the last test takes a real graph, where there is a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_reports import delay_reports
from recorded_graph import HostReadError, RecordedGraph
from tiny_models import tiny_transformer, tiny_vq

from vargen.adapters.drafters import EagleModel, LowResolutionDrafter, MedusaHeads
from vargen.adapters.llamagen import LlamaGenTokenModel
from vargen.decoding import Accelerator, DecodeOutput, Engine, Jacobi, Sampling, decode, resolve_method, speculative_sampling
from vargen.decoding.next_token.acceptance.pooled import PooledRule
from vargen.decoding.next_token.drafters.jacobi import JacobiState
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.window import AutoWindow
from vargen.device import explain_graphs, read_graph_setting
from vargen.models.condition import Condition
from vargen.models.heads.eagle import EagleDrafter
from vargen.models.heads.medusa import MedusaDrafter
from vargen.models.heads.upsampler import TokenUpsampler

METHODS = ["ar", "auto", "scd", "sjd", "gumbel", "gsd", "lantern-jacobi", "lantern", "eagle", "pac", "speculative", "wavefront"]
MORE = ["eagle-gumbel", "eagle-2", "gumbel-tree", "speculative-tree", "layer-skip", "lookup", "recycle", "medusa"]
GRID = 6  # so that windows of 16 reach beyond rows and, at the end, beyond the grid


def tiny(device: str = "cpu", low_res: LowResolutionDrafter | None = None) -> LlamaGenTokenModel:
    sizes = {"grid_size": GRID, "n_head": 2, "multiple_of": 32}
    codes = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)).to(device)
    draft = LlamaGenTokenModel(tiny_transformer("class", n_layer=1, grid_size=GRID).to(device))
    torch.manual_seed(2)
    eagle = EagleDrafter(dim=32, vocab_size=64, above=True, **sizes).eval().to(device)
    medusa = MedusaDrafter(32, 64, 4).eval().to(device)
    transformer = tiny_transformer("class", n_layer=3, grid_size=GRID).to(device)
    heads = {"eagle": partial(EagleModel, eagle), "medusa": partial(MedusaHeads, medusa)}
    return LlamaGenTokenModel(transformer, 2.0, codebook=codes, draft_model=draft, draft_heads=heads, low_res=low_res)


def tiny_low_res(upsampled: bool) -> LowResolutionDrafter:
    """Draws a grid of half the side, which an up-sampler makes probabilities of; or the tokenizer, tokens."""
    small = LlamaGenTokenModel(tiny_transformer("class", n_layer=1, grid_size=GRID // 2), 2.0)
    torch.manual_seed(3)
    upsampler = TokenUpsampler(64, GRID // 2, GRID, 16, blocks=1).eval() if upsampled else None
    return LowResolutionDrafter(small, (GRID, GRID), upsampler, tiny_vq())


def generated(
    method: str | Accelerator, images: int = 3, device: str = "cpu", model: LlamaGenTokenModel | None = None, **options: Any
) -> DecodeOutput:
    condition = Condition(class_labels=torch.arange(1, images + 1, device=device))
    model = tiny(device) if model is None else model
    return decode(model, condition, torch.arange(3, 3 + images), method, Sampling(0.9, top_k=20), **options)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs take the passes of a GPU: neither NumPy nor changing shapes, nor windows that are chosen in each pass."""
    chosen, elsewhere = AutoWindow.start, torch.device("cuda")
    monkeypatch.setattr(
        AutoWindow, "start", lambda self, model, *rest: chosen(self, SimpleNamespace(grid=model.grid, device=elsewhere), *rest)
    )
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(RecordedGraph, "made", 0)
    monkeypatch.setattr(RecordedGraph, "replays", 0)


def same(found: DecodeOutput, expected: DecodeOutput) -> bool:
    """Pictures and statistics, but for seconds."""
    untimed = [replace(each.stats, seconds=0.0, seconds_by_part={}) for each in (found, expected)]
    alike = torch.equal(found.tokens, expected.tokens) and torch.equal(found.length, expected.length)
    return alike and untimed[0] == untimed[1]


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
@pytest.mark.parametrize("images", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_captured_run_is_the_eager_one(method: str, images: int) -> None:
    method = resolve_method(method).fit_to_grid(GRID**2)
    expected = generated(method, images)
    found = generated(method, images, graphs=RecordedGraph)
    assert same(found, expected)
    assert RecordedGraph.made == 1 and RecordedGraph.replays == expected.stats.passes - 3, "but the prefill and two passes"


@pytest.mark.parametrize("method", ["ar", "scd", "gumbel", "eagle", "speculative"])
def test_images_join_a_captured_run(method: str) -> None:
    method = resolve_method(method).fit_to_grid(GRID**2)
    expected = generated(method, 5)
    engine = Engine(tiny(), method, batch_size=2, graphs=RecordedGraph)
    conditions, seeds = Condition(class_labels=torch.arange(1, 6)), torch.arange(3, 8)
    engine.submit(conditions, seeds, Sampling(0.9, top_k=20))
    found = {image.number: image.tokens for image in engine.run()}
    assert all(torch.equal(found[row], expected.tokens[row]) for row in range(5))
    assert RecordedGraph.made == 1 and RecordedGraph.replays > expected.stats.passes


@pytest.mark.parametrize("upsampled", [True, False])
@pytest.mark.parametrize("method", ["mulo-exact", "mulo"])
def test_drafts_from_a_low_resolution_are_captured(method: str, upsampled: bool) -> None:
    method = resolve_method(method).fit_to_grid(GRID**2)
    if isinstance(method.acceptance, PooledRule):  # with fewer neighbours, or so small a vocabulary stands in two passes
        method = replace(method, acceptance=PooledRule(size=2))
    model = tiny(low_res=tiny_low_res(upsampled))
    expected = generated(method, model=model)
    found = generated(method, model=model, graphs=RecordedGraph)
    assert same(found, expected) and RecordedGraph.replays == expected.stats.passes - 3


@pytest.mark.parametrize("method", ["ar", "gumbel", "gsd", "lantern", "speculative"])
def test_passes_that_a_device_runs_after_the_end_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither images nor statistics, but for the passes that were replayed."""
    method = resolve_method(method).fit_to_grid(GRID**2)
    expected = generated(method)
    delay_reports(monkeypatch, 100)
    assert same(generated(method, graphs=RecordedGraph), expected)
    assert RecordedGraph.replays == min(expected.stats.passes + 8, GRID**2) - 3


@pytest.mark.parametrize("method", ["ar", "scd"])
def test_a_captured_run_can_be_stopped(method: str) -> None:
    expected = generated(method, callback=lambda progress: progress.step < 7)
    found = generated(method, callback=lambda progress: progress.step < 7, graphs=RecordedGraph)
    assert not found.finished and same(found, expected)


# -- what cannot be captured --------------------------------------------------------------------------------------------


@register_state
@dataclass
class OddState:
    jacobi: JacobiState
    passes: int = 0
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class Odd(Jacobi):
    """A drafter that does one thing in each pass that a graph cannot repeat."""

    does: str = ""

    def start(self, *arguments: Any) -> Any:
        return OddState(super().start(*arguments), generator=torch.Generator() if self.does == "holds a generator" else None)

    def propose(self, state: Any, tokens: torch.Tensor, length: torch.Tensor, noise: Any) -> Any:
        if self.does == "counts on the host":
            state.passes += 1
        if self.does == "reads a value":
            length.amax().item()
        if self.does == "copies from the host":
            length = length + torch.tensor([0] * len(length), device=length.device)
        return super().propose(state.jacobi, tokens, length, noise)

    def observe(self, state: Any, step: Any) -> Any:
        return replace(state, jacobi=super().observe(state.jacobi, step))


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("holds a generator", "state.draft.generator is a Generator"),
        ("counts on the host", "state.draft.passes changes"),
        ("reads a value", "the host reads values in a pass, at item"),
        ("copies from the host", "the host reads values in a pass, at lift_fresh"),
    ],
)
def test_what_cannot_be_captured_is_run_one_by_one(does: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    method = Accelerator("odd", Odd(6, "maximal", does=does), speculative_sampling)
    expected = generated(method)
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated(method, graphs=RecordedGraph), expected)
    assert [reason in each.getMessage() for each in caplog.records] == [True] and RecordedGraph.made == 0


def test_what_fails_while_it_is_captured_is_run_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid the pass, where state has been changed already: it is as if it had not been tried."""
    expected = generated("eagle")
    seen: list[str] = []

    def refuse(name: str) -> None:
        seen.append(name)
        if len(seen) == 400:
            raise HostReadError("no such operation")

    monkeypatch.setattr(RecordedGraph, "before", staticmethod(refuse))
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated("eagle", graphs=RecordedGraph), expected)
    assert ["no such operation" in each.getMessage() for each in caplog.records] == [True]


def test_moved_weights_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    expected, model = generated("scd"), tiny()
    model.capture_blocker = "weights are offloaded"
    with caplog.at_level(logging.WARNING, "vargen"):
        assert same(generated("scd", model=model, graphs=RecordedGraph), expected)
    assert "weights are offloaded" in caplog.text and RecordedGraph.made == 0


# -- asking for it ------------------------------------------------------------------------------------------------------


def test_graphs_are_asked_for_by_a_variable_and_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_graph_setting(torch.device("cuda"))
    assert explain_graphs(torch.device("cuda")).startswith("not captured")
    monkeypatch.setenv("VARGEN_CUDA_GRAPHS", "1")
    assert read_graph_setting(torch.device("cuda")) and not read_graph_setting(torch.device("cpu"))
    assert explain_graphs(torch.device("cuda")).startswith("captured")
    assert explain_graphs(torch.device("cpu")).startswith("not captured")
    monkeypatch.setenv("VARGEN_CUDA_GRAPHS", "yes")
    with pytest.raises(ValueError, match="VARGEN_CUDA_GRAPHS"):
        generated("scd")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_real_graph_generates_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fitted = resolve_method(method).fit_to_grid(GRID**2)
    expected = generated(fitted, device="cuda")
    monkeypatch.setenv("VARGEN_CUDA_GRAPHS", "1")
    with caplog.at_level(logging.WARNING, "vargen"):
        found = generated(fitted, device="cuda")
    assert not caplog.records
    assert torch.equal(found.tokens, expected.tokens)
    assert same(found, expected)
