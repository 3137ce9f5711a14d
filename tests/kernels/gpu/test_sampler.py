"""The fused sampler against filters that sort, in float64, and against the library's own noise and filters."""

import pytest
import torch
from torch import Tensor

from vargen.decoding import Sampling
from vargen.decoding.noise import Purpose
from vargen.decoding.noise import sample_gumbel_max as reference_race
from vargen.decoding.sampling import to_probs
from vargen.kernels import reference
from vargen.kernels.dispatch import MAX_VOCAB
from vargen.kernels.sampler import NoiseStream, probs_from_logits, sample_gumbel_max

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("canaries")


def generated_logits(*shape: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * spread


FILTERS = [(None, 1.0), (3, 1.0), (100, 0.9), (None, 0.9), (1, 1.0), (5, 0.01)]
LARGE = [(4096, 100, 0.9), (8192, 5, 0.01), (8192, None, 1.0), (16384, 100, 0.9), (16384, None, 0.9)]


@pytest.mark.parametrize(("V", "top_k", "top_p"), [*((V, *each) for V in (5, 1000) for each in FILTERS), *LARGE])
def test_probabilities_and_samples(V: int, top_k: int | None, top_p: float) -> None:
    top_k = None if top_k is None else min(top_k, V)
    logits = generated_logits(1, 2, V)
    seeds, position = torch.tensor([7]), torch.tensor([[3, 99]])
    options = {"temperature": 0.8, "top_k": top_k, "top_p": top_p}
    noise = NoiseStream(seeds.to(DEVICE), position.to(DEVICE), int(Purpose.TOKEN))
    probs = probs_from_logits(logits.to(DEVICE), **options)  # type: ignore[arg-type]
    expected = reference.probabilities(logits[0], 0.8, top_k, top_p)[None]
    assert torch.equal(probs.cpu() > 0, expected > 0), "the support"
    torch.testing.assert_close(probs.cpu().double(), expected, atol=2e-6, rtol=0)
    own = to_probs(logits, Sampling(**options))  # type: ignore[arg-type]
    assert torch.equal(sample_gumbel_max(probs, noise).cpu(), reference_race(own, seeds, position))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_logits(dtype: torch.dtype) -> None:
    logits = generated_logits(3, 300).to(dtype)
    probs = probs_from_logits(logits.to(DEVICE), top_k=20)
    torch.testing.assert_close(probs.cpu().double(), reference.probabilities(logits, top_k=20), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.5), (3, 0.5), (5, 0.99), (2, 0.3), (3, 0.65), (3, 0.52)])
def test_ties_stay(top_k: int | None, top_p: float) -> None:
    """Whatever equals the k-th largest, or the one that crosses p, is kept: 0 and -0 are equal."""
    rows = torch.tensor([
        [1.0, 3.0, 2.0, 2.0, 2.0, -1.0, 0.5],
        [0.0, -0.0, 0.0, -0.0, -1.0, -2.0, -3.0],
        [1.0] * 7,
        [-4.0, -4.0, -5.0, -5.0, -5.0, -5.0, -90.0],
    ])  # fmt: skip
    out = probs_from_logits(rows.to(DEVICE), top_k=top_k, top_p=top_p)
    own = to_probs(rows, Sampling(top_k=top_k, top_p=top_p))
    expected = reference.probabilities(rows, top_k=top_k, top_p=top_p)
    assert torch.equal(own > 0, expected > 0)
    assert torch.equal(out.cpu() > 0, expected > 0)
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-6, rtol=0)


def test_numbers_that_are_none_have_no_probability() -> None:
    logits = generated_logits(5, 40)
    logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[3, :39] = -torch.inf
    logits[4] = torch.nan
    noise = NoiseStream(torch.tensor([1], device=DEVICE), torch.arange(5, device=DEVICE)[None], 0)
    for options in ({}, {"top_k": 10}, {"top_p": 0.9}):
        probs = probs_from_logits(logits[None].to(DEVICE), **options)  # type: ignore[arg-type]
        tokens = sample_gumbel_max(probs, noise)
        expected = reference.probabilities(logits, **options)  # type: ignore[arg-type]
        assert torch.equal(probs[0].cpu() > 0, expected > 0)
        torch.testing.assert_close(probs[0].cpu().double(), expected, atol=1e-6, rtol=0)
        assert tokens[0, 1] != 3 and tokens[0, 2] != 4 and tokens[0, 3] == 39 and tokens[0, 4] == 0


def test_the_first_of_equal_ones_is_generated() -> None:
    """Of a row that is read in several pieces."""
    noise = NoiseStream(torch.tensor([1], device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), 0)
    assert sample_gumbel_max(torch.zeros(1, 1, 3000, device=DEVICE), noise).tolist() == [[0]]


def test_samples_follow_the_probabilities() -> None:
    """200 draws of 5 tokens: each share within 5 standard deviations."""
    count = 200
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    probs = logits.softmax(0)
    rows = probs.expand(1, count, 5).contiguous().to(DEVICE)
    noise = NoiseStream(torch.tensor([0], device=DEVICE), torch.arange(count, device=DEVICE)[None], 5, step=3)
    found = sample_gumbel_max(rows, noise)[0].cpu().bincount(minlength=5)
    assert ((found / count - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt()).all()


def test_rows_that_no_program_holds_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_VOCAB} tokens, got {MAX_VOCAB + 1}"):
        probs_from_logits(torch.zeros(1, MAX_VOCAB + 1))
