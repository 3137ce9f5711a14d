"""One uniform per row samples from the weights of the row, the same with NumPy and torch; order statistics."""

import pytest
import torch
import torch.nn.functional as F

from vargen.kernels import ops
from vargen.kernels.ops import MAX_QUERIES, attend, fold_bias, kth_largest_value, sample_categorical


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


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("T", [1, 3, MAX_QUERIES, MAX_QUERIES + 1])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_equals_the_attention_of_torch(
    T: int, groups: int, gradients: bool, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "prefers_explicit_attention", lambda: written)
    torch.manual_seed(T)
    B, H, S, K = 3, 6, 80, 8
    q = torch.randn(B, T, H, K) * 3
    k, v = torch.randn(2, B, groups, S + 5, K)[..., :S, :]  # not all slots of a longer store
    bias = torch.zeros(B, 1, T, S).masked_fill_(torch.rand(B, 1, T, S) < 0.5, float("-inf"))
    bias[..., 0] = torch.randn(B, 1, T)
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias, enable_gqa=True).transpose(1, 2)
    with torch.set_grad_enabled(gradients):
        ready = fold_bias(bias, H, groups)
        assert (ready.dim() == 3) == (written and not gradients and T <= MAX_QUERIES), "written out for few queries alone"
        out = attend(q, k, v, ready)
    assert out.shape == q.shape
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_a_mask_and_a_low_dtype_go_to_torch() -> None:
    q, k, v = torch.randn(2, 3, 4, 8), *torch.randn(2, 2, 4, 9, 8)
    mask = torch.rand(3, 9) < 0.5
    mask[:, 0] = True
    with torch.no_grad():
        masked = attend(q, k, v, mask)
        low = attend(*(x.bfloat16() for x in (q, k, v)), fold_bias(torch.zeros(2, 1, 3, 9).bfloat16(), 4, 2))
    assert torch.equal(masked, F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2))
    assert low.dtype == torch.bfloat16
