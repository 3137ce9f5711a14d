"""The tests find a difference that is there, and none that is not."""

import pytest
import torch
from rejects import rejects

from vargen.evaluation.distribution import (
    chi_square,
    code_classes,
    features,
    marginal_counts,
    neighbor_pair_counts,
    permutation_test,
    two_sample_tests,
)

CODES = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), dim=-1)


def images(count: int, seed: int, prompts: int = 5, repeat: float = 0.3, tilt: float = 0.0) -> torch.Tensor:
    """4 x 4 tokens of 40: each prompt has its own favourites, and a token repeats its left neighbour at times."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.rand(prompts, 40, generator=torch.Generator().manual_seed(99)) ** 4
    taste[:, :10] *= 1 + tilt
    probs = taste[torch.arange(count) % prompts]
    tokens = torch.multinomial(probs, 16, replacement=True, generator=generator).view(count, 4, 4)
    for column in range(1, 4):
        copies = torch.rand(count, 4, generator=generator) < repeat
        tokens[:, :, column] = torch.where(copies, tokens[:, :, column - 1], tokens[:, :, column])
    return tokens.flatten(1)


def test_equal_distributions_give_large_p_values_and_uniform_ones_over_repeats():
    values = []
    for trial in range(12):
        results = two_sample_tests(images(200, 10 + trial), images(200, 500 + trial), CODES, 4, permutations=40)
        values += [result.p_value for result in results.values()]
    values = torch.tensor(values)
    assert (values < 0.05).sum() <= 6  # of 36
    assert 0.3 < values.mean() < 0.7


@pytest.mark.parametrize(
    ("change", "test"),
    [
        ({"tilt": 0.6}, "token marginals per position"),
        ({"repeat": 0.6}, "neighboring tokens"),
        ({"tilt": 0.6}, "tokenizer features"),
    ],
)
def test_a_changed_law_is_distinguished(change, test):
    results = two_sample_tests(images(500, 1), images(500, 2, **change), CODES, 4, permutations=99)
    assert results[test].p_value == 0.01
    assert results[test].statistic > results[test].expected


def test_cells_and_features_by_hand():
    tokens = torch.tensor([[0, 1, 2, 3]])
    assert marginal_counts(tokens, 10).tolist() == [[0, 11, 22, 33]]
    classes = torch.tensor([0, 1, 0, 1])
    assert neighbor_pair_counts(tokens, 2, classes).tolist() == [[1, 1, 4 + 0, 4 + 3]]
    codes = torch.eye(4)
    assert torch.equal(features(tokens, 2, codes)[0, :16], torch.eye(4).flatten())
    assert chi_square(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0])) == 1.0
    found = code_classes(CODES)
    assert found.min() >= 0 and found.max() < 32 and found.bincount().max() < 20


def test_bad_input():
    with pytest.raises(ValueError, match="both sets"):
        two_sample_tests(images(4, 0), images(5, 0), CODES, 4)
    rejects(lambda: permutation_test(lambda swap: swap.sum(), 4, 0), "permutations")
