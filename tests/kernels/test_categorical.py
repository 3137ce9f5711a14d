"""One coin a row draws from the row's weights, by NumPy and by torch alike."""

import pytest
import torch

from vargen.kernels.categorical import categorical


def by_torch(weights, coins, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        return categorical(weights, coins)


def rows(*shape, seed=0):
    weights = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3).exp()
    return torch.where(weights < weights.median(-1, keepdim=True).values, 0.0, weights)


@pytest.mark.parametrize("vocab", [2, 5, 64, 100, 128, 4096])
def test_is_the_inverse_of_the_cumulative_sum(vocab, monkeypatch):
    weights = rows(3, 7, vocab)
    coins = torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    upto = weights.double().cumsum(-1)
    expected = (upto <= coins[..., None] * upto[..., -1:]).sum(-1)
    for drawn in (categorical(weights, coins), by_torch(weights, coins, monkeypatch)):
        assert drawn.dtype == torch.int64 and torch.equal(drawn, expected)


@pytest.mark.parametrize("vocab", [3, 320])
def test_never_draws_what_has_no_weight(vocab, monkeypatch):
    weights = rows(500, vocab, seed=2)
    weights[:, -1] = weights[:, 0] = 0
    weights[::2, : vocab // 2] = 0
    weights[:, vocab // 2] += 1e-30
    for coin in (2.0**-53, 0.5, 1 - 2.0**-53):
        coins = torch.full((500,), coin, dtype=torch.float64)
        for drawn in (categorical(weights, coins), by_torch(weights, coins, monkeypatch)):
            assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_draws_in_proportion(monkeypatch):
    weights = torch.tensor([0.5, 0.0, 2.0, 1.5] + [0.0] * 124)
    weights[100] = 4.0
    coins = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    for drawn in (categorical(weights.expand(8000, 128), coins), by_torch(weights.expand(8000, 128), coins, monkeypatch)):
        assert torch.bincount(drawn, minlength=128)[[0, 1, 2, 3, 100]].tolist() == [500, 0, 2000, 1500, 4000]


def test_rows_without_weight_or_with_nan_stay_in_the_vocabulary(monkeypatch):
    weights = torch.stack([torch.zeros(128), torch.full((128,), float("nan")), torch.ones(128)])
    coins = torch.tensor([0.1, 0.9, 0.999], dtype=torch.float64)
    for drawn in (categorical(weights, coins), by_torch(weights, coins, monkeypatch)):
        assert ((drawn >= 0) & (drawn < 128)).all() and drawn[2] == 127
