"""Enumerated noise: the probabilities of its outcomes are those of the noise that a run samples."""

from __future__ import annotations

import itertools

import pytest
import torch
from sampled_images import compute_p_value

from vargen.decoding import PRESETS, Noise, Purpose
from vargen.decoding.sampling import to_probs
from vargen.verify.enumeration import Enumeration, NotEnumerableError, ReusedNoiseError, TooManyOutcomesError
from vargen.verify.exact_sum import sum_pass
from vargen.verify.exactness import CASES, fix_window, sum_case

P = torch.tensor([0.5, 0.2, 0.3, 0.0])


def outcomes(program, positions: int = 8) -> dict[tuple, float]:
    """The probability of each result of `program(noise)`, a tuple of tensors `[B, ...]`."""
    each = Enumeration(positions, 1000, 1000)

    def run():
        position = torch.arange(2).expand(len(each), 2)
        found = program(each.make_noise(torch.zeros(len(each), dtype=torch.int64), position, 1))
        return [tuple(torch.cat([part[row].reshape(-1) for part in found]).tolist()) for row in range(len(each))]

    total: dict[tuple, float] = {}
    for result, weight in zip(each.run(run), each.weights.tolist(), strict=True):
        total[result] = total.get(result, 0.0) + weight
    assert sum(total.values()) == pytest.approx(1)
    return total


def law(noise: Noise) -> torch.Tensor:
    return P.expand(*noise.position.shape, 4)


PROGRAMS = {
    "independent samples": lambda noise: (noise.sample(law(noise), Purpose.DRAFT),),
    "without replacement": lambda noise: (noise.sample_without_replacement(law(noise), 2, Purpose.CHOICE)[0],),
    "siblings with their own noise": lambda noise: (
        noise.sample(law(noise), Purpose.DRAFT),
        noise.fold_in(1).sample(law(noise), Purpose.DRAFT),
    ),
    "one uniform, two distributions": lambda noise: (
        noise.sample(law(noise), Purpose.DRAFT),
        noise.sample(law(noise).flip(-1), Purpose.DRAFT),
    ),
    "one uniform, two thresholds": lambda noise: (
        (noise.uniform(Purpose.RESAMPLE_ACCEPT) < 0.7).long(),
        (noise.uniform(Purpose.RESAMPLE_ACCEPT) * torch.tensor(0.5) < 0.15).long(),
        (torch.tensor([0.9, 0.2]) > noise.uniform(Purpose.RESAMPLE_ACCEPT)).long(),
    ),
    "one uniform for two slots": lambda noise: (
        (Noise.shift(noise, -torch.arange(2)).uniform(Purpose.RESAMPLE_ACCEPT) < torch.tensor([0.3, 0.6])).long(),
    ),
    "evenly": lambda noise: (noise.sample_evenly(3, Purpose.DRAFT),),
    "shared noise": lambda noise: (noise.sample(law(noise), Purpose.TOKEN), noise.sample(law(noise), Purpose.TOKEN)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_probabilities_are_the_frequencies_of_samples(name: str) -> None:
    program, count = PROGRAMS[name], 40_000
    expected = outcomes(program)
    noise = Noise(torch.arange(count) + 10**6, torch.arange(2).expand(count, 2), 1)
    found = torch.cat([part.reshape(count, -1) for part in program(noise)], 1)
    keys = {result: number for number, result in enumerate(expected)}
    counts = torch.bincount(torch.tensor([keys[tuple(row)] for row in found.tolist()]), minlength=len(keys))
    assert compute_p_value(counts, torch.tensor(list(expected.values()))) > 1e-3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_orders_have_the_probabilities_of_plackett_and_luce(count: int) -> None:
    found = outcomes(lambda noise: (noise.select_slot(torch.zeros(len(noise.seeds)).long()).sample_without_replacement(
        P.expand(len(noise.seeds), 1, 4), count, Purpose.CHOICE)[0],))  # fmt: skip
    p = P.double()
    for order in itertools.permutations([0, 1, 2], count):
        expected, left = 1.0, 1.0
        for token in order:
            expected, left = expected * float(p[token]) / left, left - float(p[token])
        assert found[order] == pytest.approx(expected)


def test_what_has_no_effect_is_not_split() -> None:
    assert len(outcomes(lambda noise: (noise.sample(law(noise), Purpose.DRAFT),), positions=1)) == 3
    assert len(outcomes(lambda noise: (noise.where(torch.tensor([[True, False]])).sample(law(noise), Purpose.DRAFT),))) == 3


def test_a_limit_of_outcomes_is_kept() -> None:
    with pytest.raises(TooManyOutcomesError):
        outcomes(lambda noise: (noise.shift(torch.arange(2)).sample(torch.ones(len(noise.seeds), 2, 40), Purpose.DRAFT),))
    assert sum_case(PRESETS["speculative"], CASES[0], max_drafts=2) is None
    with pytest.raises(TooManyOutcomesError):
        sum_pass(fix_window(PRESETS["speculative"]), CASES[0].model(), max_drafts=10)


@pytest.mark.parametrize("use", [lambda u: 1 - u, lambda u: u.mean(), lambda u: torch.log(u), lambda u: u + 1], ids=range(4))
def test_uniforms_are_only_compared(use) -> None:
    with pytest.raises((NotEnumerableError, TypeError)):
        outcomes(lambda noise: (use(noise.uniform(Purpose.RESAMPLE_ACCEPT)) < 0.5,))


def test_shared_noise_has_one_distribution() -> None:
    with pytest.raises(ReusedNoiseError):
        outcomes(lambda noise: (noise.sample(law(noise), Purpose.TOKEN), noise.sample(law(noise).flip(-1), Purpose.TOKEN)))


def test_a_pass_after_a_prefix_is_compared_with_what_follows_it() -> None:
    case = CASES[0]
    found = sum_pass(fix_window(PRESETS["speculative"]), case.model(), (1, 2), case.sampling)
    assert found.distance < 1e-6 and found.most_drafts == 3
    for prefix in ((1, 2, 0),):
        with pytest.raises(ValueError, match="prefix"):
            sum_pass(fix_window(PRESETS["speculative"]), case.model(), prefix)
    with pytest.raises(ValueError, match="prefix"):
        sum_pass(fix_window(PRESETS["sjd"]), case.model(), (1, 2))
    certain = CASES[-1]
    with pytest.raises(ValueError, match="prefix"):
        sum_pass(fix_window(PRESETS["speculative"]), certain.model(), (1, 1))


def test_a_wrong_target_is_as_far_as_the_two_are_apart() -> None:
    case = CASES[0]
    model, other = case.model(), case.model().draft_model
    expected = model.joint(0, lambda x: to_probs(x, case.sampling)) - other.joint(0, lambda x: to_probs(x, case.sampling))
    found = sum_pass(PRESETS["ar"], model, passes=2, target=(other, case.sampling))
    assert found.distance == pytest.approx(float(expected.abs().sum()) / 2, abs=1e-6)
