"""Compiled steps beside a pass: the tokens of the torch reference, whatever the logits and the sampling options."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from int8_passes import compiled_passes
from table_methods import METHODS, table_model

from vargen.decoding import Sampling, decode
from vargen.decoding.engine import Engine
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import SlotSampling

pytest.importorskip("numba")

from vargen.kernels.int8 import sample as cpu_sample
from vargen.kernels.int8.load import CompiledCode

SEEDS = torch.tensor([3, 2**62, 7])
OPTIONS = {
    "none": [Sampling()],
    "top-k": [Sampling(top_k=5)],
    "top-p": [Sampling(top_p=0.9)],
    "both": [Sampling(0.8, top_k=30, top_p=0.6)],
    "small p": [Sampling(top_p=1e-6)],
    "greedy": [Sampling(0)],
    "by row": [Sampling(), Sampling(1.3, top_k=7, top_p=0.5), Sampling(top_p=0.99)],
}


@pytest.fixture(scope="module")
def compiled() -> Any:
    compiled_passes()
    return CompiledCode.steps


def in_slots(samplings: list[Sampling], vocab: int) -> SlotSampling:
    """Three slots, with one option for all or one for each."""
    made = SlotSampling(3, vocab, torch.device("cpu"))
    for slot in range(3):
        made.set([slot], samplings[slot % len(samplings)])
    return made


def logits_of(kind: str, vocab: int) -> torch.Tensor:
    made = torch.randn(3, 6, vocab, generator=torch.Generator().manual_seed(vocab))
    return {"peaked": made * 5, "flat": made * 0.01, "ties": (made * 2).round(), "equal": made * 0.0}[kind]


def test_images_with_min_p_are_left_to_torch(compiled: Any) -> None:
    noise, logits = Noise(SEEDS, torch.arange(6).expand(3, -1)), logits_of("peaked", 40)
    assert in_slots([Sampling(), Sampling(0.9)], 40).sample_tokens(logits, noise) is not None
    assert in_slots([Sampling(), Sampling(min_p=0.1)], 40).sample_tokens(logits, noise) is None


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "equal"])
def test_sampled_tokens_are_those_of_the_reference(kind: str, options: str, compiled: Any) -> None:
    for vocab in (40, 100, 4096):
        sampling = in_slots(OPTIONS[options], vocab)
        logits, noise = logits_of(kind, vocab), Noise(SEEDS, torch.arange(6) + torch.tensor([[0], [50], [9]]))
        found = sampling.sample_tokens(logits, noise)
        assert found is not None and torch.equal(found.tokens, noise.sample(sampling.probs(logits), Purpose.TOKEN))


def sample_row(compiled: Any, logits: torch.Tensor, top_p: float = 1.0, position: int = 0, temperature: float = 1.0) -> int:
    """Token of one row, -1 where the reference has to decide."""
    V, tokens = logits.shape[-1], np.zeros((1, 1), np.int64)
    options = np.full(1, temperature, np.float32), np.full(1, V), np.full(1, top_p)
    scratch = np.zeros((3, V + 32), np.float32), np.zeros(V + 32, np.int32)
    noise = int(Purpose.TOKEN), SEEDS[:1].numpy(), np.full((1, 1), position)
    draft, outcome = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
    compiled.sample_rows(logits.view(1, 1, V).numpy(), *options, *noise, *scratch, draft, tokens, outcome, outcome)
    return int(tokens[0, 0])


def test_rows_that_rounding_could_change_are_left_to_the_reference(compiled: Any) -> None:
    exponential = Noise(SEEDS[:1], torch.zeros(1, 1, dtype=torch.int64)).exponential(4, Purpose.TOKEN)[0, 0]
    tied = exponential.log()  # p / E is the same for all tokens
    assert sample_row(compiled, tied) == -1
    assert sample_row(compiled, tied + torch.tensor([0, 0, 3 * cpu_sample.MARGIN, 0])) == 2
    close = torch.tensor([0.0, -1e-6, -30, -30])  # whether the second passes depends on the last bit of the first
    assert {sample_row(compiled, close, 0.5, position) for position in range(20)} == {0, -1}
    for value in (float("nan"), float("inf"), float("-inf")):
        logits = torch.tensor([0.0, value, 1.0])
        assert sample_row(compiled, logits) == -1
        noise = Noise(SEEDS, torch.zeros(3, 1, dtype=torch.int64))
        found = in_slots([Sampling()], 3).sample_tokens(logits.expand(3, 1, 3), noise)
        assert found is not None and not found.sums.isfinite().any()
    assert sample_row(compiled, torch.tensor([0.0, 3e38, 1.0]), temperature=0.5) == -1  # finite, but not after division


@pytest.mark.parametrize("method", ["ar", "gumbel", "scd", "gumbel-tree"])
def test_images_and_statistics_are_those_without_compiled_steps(
    method: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition, seeds, sampling = torch.tensor([0, 1, 1]), torch.arange(3), Sampling(0.9, top_p=0.9)
    found = []
    for steps in (compiled, None):
        monkeypatch.setattr(CompiledCode, "steps", steps)
        out = decode(table_model(), condition, seeds, METHODS[method], sampling)
        engine = Engine(table_model(), METHODS[method], batch_size=2)
        engine.submit(condition, seeds, sampling)
        joined = {image.number: image.tokens.tolist() for image in engine.run()}
        stats = (out.stats.committed_histogram, out.stats.passes_by_width, out.stats.relaxation)
        found.append((out.tokens.tolist(), stats, joined))
    assert found[0] == found[1]
    for name in ("sample_rows", "draft_window", "commit_tokens"):
        assert len(getattr(compiled, name).signatures) == 1, f"{name} was compiled again, which takes seconds"


def test_no_probabilities_are_computed_where_nothing_uses_them(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    probs = SlotSampling.probs
    monkeypatch.setattr(SlotSampling, "probs", lambda *given: calls.append(given) or probs(*given))
    for method, uses in (("ar", False), ("gumbel", False), ("scd", True)):
        calls.clear()
        decode(table_model(), torch.tensor([0]), SEEDS[:1], METHODS[method])
        assert bool(calls) == uses


@pytest.mark.parametrize("method", ["ar", "scd", "speculative"])
def test_steps_beside_the_sampler_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, on any CPU: what is fed and committed is that of the torch reference."""
    steps = SimpleNamespace(feed_tokens=cpu_sample.feed_tokens.py_func, commit_tokens=cpu_sample.commit_tokens.py_func)
    arguments = (table_model(), torch.tensor([0, 1, 1]), torch.arange(3), METHODS[method], Sampling(0.9, top_p=0.9))
    expected = decode(*arguments)
    monkeypatch.setattr(SlotSampling, "sample_tokens", lambda *_: None)
    monkeypatch.setattr(CompiledCode, "steps", steps)
    found = decode(*arguments)
    assert torch.equal(found.tokens, expected.tokens)
    assert found.stats.committed_histogram == expected.stats.committed_histogram
