"""One uniform per row samples from the weights of the row, the same with NumPy and torch; order statistics."""

import pytest
import torch

from vargen.kernels.ops import kth_largest_value, sample_categorical


def by_torch(weights, uniforms, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        return sample_categorical(weights, uniforms)


def rows(*shape, seed=0):
    weights = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3).exp()
    return torch.where(weights < weights.median(-1, keepdim=True).values, 0.0, weights)


@pytest.mark.parametrize("vocab", [2, 5, 64, 100, 128, 4096])
def test_is_the_inverse_of_the_cumulative_sum(vocab, monkeypatch):
    weights = rows(3, 7, vocab)
    uniforms = torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    upto = weights.double().cumsum(-1)
    expected = (upto <= uniforms[..., None] * upto[..., -1:]).sum(-1)
    for sampled in (sample_categorical(weights, uniforms), by_torch(weights, uniforms, monkeypatch)):
        assert sampled.dtype == torch.int64 and torch.equal(sampled, expected)


@pytest.mark.parametrize("vocab", [3, 320])
def test_a_token_without_weight_is_never_sampled(vocab, monkeypatch):
    weights = rows(500, vocab, seed=2)
    weights[:, -1] = weights[:, 0] = 0
    weights[::2, : vocab // 2] = 0
    weights[:, vocab // 2] += 1e-30
    for uniform in (2.0**-53, 0.5, 1 - 2.0**-53):
        uniforms = torch.full((500,), uniform, dtype=torch.float64)
        for sampled in (sample_categorical(weights, uniforms), by_torch(weights, uniforms, monkeypatch)):
            assert (weights.gather(1, sampled[:, None]) > 0).all()


def test_rows_without_weight_or_with_nan_stay_in_the_vocabulary(monkeypatch):
    weights = torch.stack([torch.zeros(128), torch.full((128,), float("nan")), torch.ones(128)])
    uniforms = torch.tensor([0.1, 0.9, 0.999], dtype=torch.float64)
    for sampled in (sample_categorical(weights, uniforms), by_torch(weights, uniforms, monkeypatch)):
        assert ((sampled >= 0) & (sampled < 128)).all() and sampled[2] == 127


@pytest.mark.parametrize("k", [1, 2, 7, 31, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_sorting_with_ties_and_infinities(k, dtype):
    values = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(k)).mul(2).round().to(dtype)  # many ties
    values[0, 0, :9] = float("-inf")
    expected = values.sort(-1, descending=True).values[..., k - 1 : k]
    assert torch.equal(kth_largest_value(values, k), expected)
    strided = values.transpose(0, 1)
    assert torch.equal(kth_largest_value(strided, k), expected.transpose(0, 1))
