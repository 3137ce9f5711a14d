"""The fused sampler against filters that sort, in float64, and against the library's own noise and filters."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vargen.decoding import Sampling
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import SlotSampling, to_probs
from vargen.kernels.ops import MIN_TEMPERATURE, filter_logits
from vargen.kernels.triton.sampler import probs_from_logits, sample_gumbel_max

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("canaries")


def generated_logits(*shape: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * spread


def filtered(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0,
    filters: bool | None = None,
) -> Tensor:  # fmt: skip
    """Probabilities of the kernel with equal options for all rows `[..., V]`, on the CPU."""
    V = logits.shape[-1]
    filters = (top_k is not None or top_p < 1 or min_p > 0) if filters is None else filters
    values = (temperature, torch.float32), (top_k or V, torch.int64), (top_p if top_p < 1 else 2, torch.float64)
    options = (torch.tensor([value], dtype=dtype, device=DEVICE) for value, dtype in values)
    least = torch.tensor([min_p], dtype=torch.float64, device=DEVICE) if min_p else None
    return probs_from_logits(logits.to(DEVICE).view(1, -1, V), *options, least, filters).view(logits.shape).cpu()


def by_torch(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities in float64 by the filters of the package, which sort; numbers that are none have probability 0."""
    scaled = torch.where(logits.isfinite(), logits, -torch.inf).double() / temperature
    return filter_logits(scaled, top_k, top_p, min_p).softmax(-1).nan_to_num(0.0)


FILTERS = [
    (None, 1.0, 0.0), (3, 1.0, 0.0), (100, 0.9, 0.0), (None, 0.9, 0.0), (1, 1.0, 0.0), (5, 0.01, 0.0), (None, 1.0, 0.1),
    (100, 0.9, 0.3), (None, 1.0, 1.0),
]  # fmt: skip
LARGE = [
    (4096, 100, 0.9, 0.0), (8192, 5, 0.01, 0.0), (8192, None, 1.0, 0.0), (16384, 100, 0.9, 0.0), (16384, None, 0.9, 0.01)
]  # fmt: skip


@pytest.mark.parametrize(("V", "top_k", "top_p", "min_p"), [*((V, *each) for V in (5, 1000) for each in FILTERS), *LARGE])
def test_probabilities_and_samples(V: int, top_k: int | None, top_p: float, min_p: float) -> None:
    top_k = None if top_k is None else min(top_k, V)
    logits = generated_logits(1, 2, V)
    seeds, position = torch.tensor([7]), torch.tensor([[3, 99]])
    probs = filtered(logits, 0.8, top_k, top_p, min_p)
    expected = by_torch(logits[0], 0.8, top_k, top_p, min_p)[None]
    assert torch.equal(probs > 0, expected > 0), "the support"
    torch.testing.assert_close(probs.double(), expected, atol=2e-6, rtol=0)
    own = to_probs(logits, Sampling(0.8, top_k, top_p, min_p))
    sampled = sample_gumbel_max(probs.to(DEVICE), seeds.to(DEVICE), position.to(DEVICE)).cpu()
    assert torch.equal(sampled, Noise(seeds, position).sample(own, Purpose.TOKEN))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_logits(dtype: torch.dtype) -> None:
    logits = generated_logits(3, 300).to(dtype)
    probs = filtered(logits, top_k=20)
    torch.testing.assert_close(probs.double(), by_torch(logits, top_k=20), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.5), (3, 0.5), (5, 0.99), (2, 0.3), (3, 0.65), (3, 0.52)])
def test_ties_stay(top_k: int | None, top_p: float) -> None:
    """Whatever equals the k-th largest, or the one that crosses p, is kept: 0 and -0 are equal."""
    rows = torch.tensor([
        [1.0, 3.0, 2.0, 2.0, 2.0, -1.0, 0.5],
        [0.0, -0.0, 0.0, -0.0, -1.0, -2.0, -3.0],
        [1.0] * 7,
        [-4.0, -4.0, -5.0, -5.0, -5.0, -5.0, -90.0],
    ])  # fmt: skip
    out = filtered(rows, top_k=top_k, top_p=top_p)
    own = to_probs(rows, Sampling(top_k=top_k, top_p=top_p))
    expected = by_torch(rows, top_k=top_k, top_p=top_p)
    assert torch.equal(own > 0, expected > 0)
    assert torch.equal(out > 0, expected > 0)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


def test_numbers_that_are_none_have_no_probability() -> None:
    logits = generated_logits(5, 40)
    logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[3, :39] = -torch.inf
    logits[4] = torch.nan
    noise = torch.tensor([1], device=DEVICE), torch.arange(5, device=DEVICE)[None]
    for options in ({}, {"top_k": 10}, {"top_p": 0.9}):
        probs = filtered(logits[None], **options)  # type: ignore[arg-type]
        tokens = sample_gumbel_max(probs.to(DEVICE), *noise)
        expected = by_torch(logits, **options)  # type: ignore[arg-type]
        assert torch.equal(probs[0] > 0, expected > 0)
        torch.testing.assert_close(probs[0].double(), expected, atol=1e-6, rtol=0)
        assert tokens[0, 1] != 3 and tokens[0, 2] != 4 and tokens[0, 3] == 39 and tokens[0, 4] == 0


MIXED = [
    Sampling(),
    Sampling(0.7),
    Sampling(0.8, top_k=5),
    Sampling(1.3, top_p=0.9),
    Sampling(0.9, top_k=100, top_p=0.5),
    Sampling(0.0),
    Sampling(2.0, top_k=1),
    Sampling(0.9, top_k=50, min_p=0.1),
]


@pytest.mark.parametrize(("T", "V"), [(3, 7), (2, 1000)])
def test_images_of_several_options_are_as_each_alone(T: int, V: int) -> None:
    """Bit by bit, and whether or not another image has filters."""
    images = [replace(each, top_k=each.top_k and min(each.top_k, V)) for each in MIXED]
    logits = generated_logits(len(images), T, V)
    logits[:, 0, 3] = torch.nan
    slots = SlotSampling(len(images), V, torch.device(DEVICE))
    for number, sampling in enumerate(images):
        slots.set([number], sampling)
    found = probs_from_logits(logits.to(DEVICE), slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.filters)
    found = found.cpu()
    for row, sampling in enumerate(images):
        temperature = max(sampling.temperature, MIN_TEMPERATURE)
        options = temperature, sampling.top_k, sampling.top_p, sampling.min_p
        assert torch.equal(found[row], filtered(logits[row], *options, filters=True))
        if sampling == Sampling(sampling.temperature):
            assert torch.equal(found[row], filtered(logits[row], *options, filters=False))
        expected = by_torch(logits[row], *options)
        assert torch.equal(found[row] > 0, expected > 0)
        torch.testing.assert_close(found[row].double(), expected, atol=2e-6, rtol=0)


def test_filters_are_not_read_if_no_image_has_any() -> None:
    logits, unread = generated_logits(2, 3, 40).to(DEVICE), torch.zeros(2, device=DEVICE)
    temperature = torch.tensor([1.0, 0.5], device=DEVICE)
    found = probs_from_logits(logits, temperature, unread.long(), unread.double(), None, False).cpu()
    assert torch.equal(found[0], filtered(logits[0].cpu())) and torch.equal(found[1], filtered(logits[1].cpu(), 0.5))


def test_the_first_of_equal_ones_is_generated() -> None:
    """Of a row that is read in several pieces."""
    noise = torch.tensor([1], device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    assert sample_gumbel_max(torch.zeros(1, 1, 3000, device=DEVICE), *noise).tolist() == [[0]]
