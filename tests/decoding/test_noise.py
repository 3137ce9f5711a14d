"""The noise is uniform, independent across its keys, and a function of them alone."""

import math

import pytest
import torch

from vargen.decoding.noise import Noise, Purpose
from vargen.kernels.noise_bits import TokenNoise, make_keys, sample_exponential, uniform64_of_keys, uniform_of_keys

SEEDS = torch.tensor([0, 1, 7, 2**62, -5])


def sample_uniform(seeds, position, purpose, step=0):
    return uniform_of_keys(make_keys(seeds, position, purpose, step))


def sample_uniform64(seeds, position, purpose, step=0):
    return uniform64_of_keys(make_keys(seeds, position, purpose, step))


def test_is_a_function_of_seed_position_and_purpose_alone():
    position = torch.arange(12).expand(len(SEEDS), -1)
    together = sample_exponential(SEEDS, position, 33)
    for row, seed in enumerate(SEEDS):
        for start in (0, 5):
            alone = sample_exponential(seed[None], position[:1, start : start + 3], 33)
            assert torch.equal(alone[0], together[row, start : start + 3])


def test_a_longer_vocabulary_extends_the_noise():
    position = torch.tensor([[3]])
    assert torch.equal(sample_exponential(SEEDS[:1], position, 10), sample_exponential(SEEDS[:1], position, 20)[..., :10])


def test_known_values_do_not_change():
    """Pictures are promised to stay the same for a seed: these numbers may only change with a major version."""
    value = sample_exponential(torch.tensor([42]), torch.tensor([[7]]), 4)[0, 0]
    expected = torch.tensor([3.2858088, 3.2390995, 0.64287794, 0.22438715])
    assert torch.allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", ["seed", "position", "purpose", "token"])
def test_neighbouring_keys_are_uncorrelated(axis):
    n = 200_000
    if axis == "token":
        noise = sample_exponential(torch.tensor([3]), torch.tensor([[0]]), n + 1)[0, 0]
        a, b = noise[:-1], noise[1:]
    elif axis == "position":
        noise = sample_uniform(torch.tensor([3]), torch.arange(n + 1)[None], Purpose.TOKEN)[0]
        a, b = noise[:-1], noise[1:]
    elif axis == "seed":
        noise = sample_uniform(torch.arange(n + 1), torch.zeros(n + 1, 1, dtype=torch.int64), Purpose.TOKEN)[:, 0]
        a, b = noise[:-1], noise[1:]
    else:
        position = torch.arange(n)[None]
        a, b = (sample_uniform(torch.tensor([3]), position, p)[0] for p in (Purpose.TOKEN, Purpose.ACCEPT))
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].abs()
    assert correlation < 5 / math.sqrt(n)


@pytest.mark.parametrize("draw", [sample_uniform, sample_uniform64])
def test_numpy_and_torch_make_the_same_uniforms(draw, monkeypatch):
    seeds, position = torch.arange(40) * 7919 - 3, torch.arange(500).expand(40, -1)
    one = draw(seeds, position, Purpose.RESAMPLE, 9)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(one, draw(seeds, position, Purpose.RESAMPLE, 9))
    assert one.min() > 0 and one.max() < 1 and one.unique().numel() > 19_900


@pytest.mark.parametrize("draw", [sample_uniform, sample_uniform64, lambda *key: sample_exponential(*key[:2], 33, *key[2:])])
@pytest.mark.parametrize("step", [0, 1, 9, 2**40])
def test_a_pass_that_the_device_counts_has_the_same_uniforms(draw, step):
    position = torch.arange(50).expand(len(SEEDS), -1)
    assert torch.equal(draw(SEEDS, position, Purpose.DRAFT, torch.tensor(step)), draw(SEEDS, position, Purpose.DRAFT, step))


def test_race_samples_from_its_law_and_never_what_has_no_probability():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    n = 200_000
    generated = Noise(torch.tensor([9]), torch.arange(n)[None]).sample(probs.expand(1, n, 5), Purpose.TOKEN)[0]
    share = torch.bincount(generated, minlength=5) / n
    assert share[1] == 0
    assert (share - probs).abs().max() < 5 * math.sqrt(0.25 / n)
    certain = torch.tensor([0.0, 1.0, 0.0])
    assert (Noise(torch.tensor([9]), torch.arange(1000)[None]).sample(certain.expand(1, 1000, 3), Purpose.TOKEN) == 1).all()


def test_uniforms_of_passes_and_purposes_are_independent_but_token_noise_is_the_images_own():
    seeds, position = torch.arange(3), torch.arange(5).expand(3, -1)
    probs = torch.full((3, 5, 64), 1 / 64)
    one, two = Noise(seeds, position, 1), Noise(seeds, position, 2)
    assert torch.equal(one.sample(probs, Purpose.TOKEN), two.sample(probs, Purpose.TOKEN))
    assert torch.equal(one.sample(probs, Purpose.TOKEN), (probs / sample_exponential(seeds, position, 64)).argmax(-1))
    for purpose in Purpose:
        same = torch.equal(one.uniform(purpose), two.uniform(purpose))
        assert same == (purpose == Purpose.TOKEN)
    assert torch.equal(one.select_slot(torch.tensor([1, 0, 4])).position[:, 0], torch.tensor([1, 0, 4]))


def test_noise_that_is_kept_is_the_same_noise(monkeypatch):
    """Windows that move on by other steps in each image, grow, shrink, stand still and go back; siblings share a position."""
    own = TokenNoise(SEEDS, 400)
    generator = torch.Generator().manual_seed(0)
    start = torch.zeros(len(SEEDS), 1, dtype=torch.int64)
    for T in (4, 4, 1, 4, 16, 16, 3, 16, 16, 16):
        position = start + torch.arange(T)
        assert torch.equal(own.exponential(position, 33), sample_exponential(SEEDS, position, 33))
        start = start + torch.randint(0, 7, start.shape, generator=generator)
    tree = start - 20 + torch.tensor([0, 1, 1, 2, 2, 9])
    assert torch.equal(own.exponential(tree, 33), sample_exponential(SEEDS, tree, 33))
    probs = torch.rand(len(SEEDS), 6, 33, generator=generator)
    cached = Noise(SEEDS, tree, token_noise=own)
    assert torch.equal(cached.sample(probs, Purpose.TOKEN), Noise(SEEDS, tree).sample(probs, Purpose.TOKEN))
    made = []
    monkeypatch.setattr(
        "vargen.kernels.noise_bits._lane_bits_numpy", lambda keys, lanes: made.append(keys.size) or torch.zeros(1)
    )
    own.exponential(tree, 33)
    assert not made, "nothing is made twice"


@pytest.mark.parametrize("purpose", [Purpose.TOKEN, Purpose.ACCEPT, Purpose.DRAFT])
@pytest.mark.parametrize("compiling", [False, True])  # torch on all devices; NumPy on a CPU
def test_each_image_may_have_a_number_of_its_own_passes(purpose, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    position, step = torch.arange(4).expand(len(SEEDS), -1), torch.tensor([2, 9, 2, 2**40, 3])
    noise = Noise(SEEDS, position, step)
    for row in range(len(SEEDS)):
        alone = Noise(SEEDS[row : row + 1], position[:1], int(step[row]))
        assert torch.equal(noise.uniform(purpose)[row], alone.uniform(purpose)[0])
        assert torch.equal(noise.uniform64(purpose)[row], alone.uniform64(purpose)[0])
    if purpose != Purpose.TOKEN:
        assert torch.equal(Noise(*noise.key).uniform(purpose), noise.uniform(purpose))


def test_rows_of_cached_noise_are_replaced():
    position, vocab = torch.arange(3).expand(len(SEEDS), -1), 5
    cached = TokenNoise(SEEDS, 8)
    cached.exponential(position, vocab)
    cached.replace_rows(torch.tensor([1, 4]), SEEDS[[2, 0]])
    assert torch.equal(cached.exponential(position, vocab), sample_exponential(SEEDS[[0, 2, 2, 3, 0]], position, vocab))
