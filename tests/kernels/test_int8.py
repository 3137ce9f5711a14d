"""8-bit integer products and the steps between them: precision, and independence of rows and order."""

import math

import pytest
import torch
import torch.nn.functional as F

from vargen.kernels.int8 import arithmetic as int8
from vargen.kernels.int8.format import score_limit, value_limit


def test_exp_is_precise_and_the_same_at_any_place() -> None:
    x = torch.linspace(-87, 87, 10_007)
    error = (int8.exact_exp(x).double() / x.double().exp() - 1).abs()
    assert error.max() < 5e-6 and error[x.abs() < 1].max() < 3e-7
    alone = torch.cat([int8.exact_exp(part) for part in x.split(13)])
    assert torch.equal(alone, int8.exact_exp(x))
    assert int8.exact_exp(torch.tensor([-math.inf])).mul(2.0**19).round() == 0


def test_steps_agree_with_torch() -> None:
    torch.manual_seed(0)
    x, weight, other = torch.randn(5, 96) * 4, torch.rand(96), torch.randn(5, 96)
    torch.testing.assert_close(int8.exact_rms_norm(x, weight, 1e-5), F.rms_norm(x, (96,), weight, 1e-5), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(int8.exact_swiglu(x, other), F.silu(x) * other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(int8.exact_gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-5)
    features = torch.randn(6, 3, 8)
    assert torch.equal(int8.guide_rows(features, 1.0), int8.guide_rows(features, torch.ones(3, 3, 1)))


def test_a_quantized_product_is_that_of_its_factors_to_their_precision() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 64), torch.randn(32, 64)
    values, scale = int8.quantize_activations(x)
    assert (values.float() * scale - x).abs().max() <= scale.max() / 2 * 1.0001
    assert values.abs().amax(-1).eq(127).all()
    quantized, channels = int8.quantize_weight_rows(weight)
    product = int8.int8_linear(values, scale, quantized, channels)
    assert (product - x @ weight.T).abs().max() < 0.02 * (x @ weight.T).abs().max()
    alone = torch.cat([int8.int8_linear(values[i : i + 1], scale[i : i + 1], quantized, channels) for i in range(9)])
    assert torch.equal(product, alone)
    assert int8.int8_linear(values[:0], scale[:0], quantized, channels).shape == (0, 32)


def test_rows_of_zeros_stay_zero() -> None:
    values, scale = int8.quantize_activations(torch.zeros(2, 8))
    assert not values.any() and scale.gt(0).all()
    assert not int8.exact_rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).any()


@pytest.mark.parametrize("groups", [1, 3])
def test_stored_weights_become_int8_without_a_second_rounding_of_their_largest(groups: int) -> None:
    torch.manual_seed(0)
    values, scale = torch.randint(-127, 128, (7, 12), dtype=torch.int8), torch.rand(7, groups) + 0.1
    values[:, ::4] = 127  # as in each group of a stored matrix
    found, channels = int8.regroup_weight_rows(values, scale)
    exact = (values.float().unflatten(1, (groups, -1)) * scale[..., None]).flatten(1)
    assert (found * channels[:, None] - exact).abs().max() <= channels.max() * 0.5001
    assert found.abs().amax(1).eq(127).all()
    if groups == 1:
        assert torch.equal(found, values) and torch.equal(channels, scale[:, 0])


def test_attention_agrees_with_torch_and_does_not_depend_on_hidden_slots() -> None:
    torch.manual_seed(0)
    R, T, H, G, K, S = 2, 3, 4, 2, 16, 30
    q, k, v = torch.randn(R, T, H, K), torch.randn(R, G, S, K), torch.randn(R, G, S, K)
    bias = torch.zeros(R, 1, T, S).masked_fill_(torch.rand(R, 1, T, S) < 0.3, -math.inf)
    bias[..., 0] = math.log(3)
    keys, key_scale = int8.quantize_activations(k, score_limit(K), torch.int16)
    values, value_scale = int8.quantize_activations(v, value_limit(S), torch.int16)
    out = int8.attend_int8(q, keys.mT, key_scale[..., 0], values, value_scale[..., 0], bias)
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias, enable_gqa=True).transpose(1, 2)
    assert (out - expected).abs().max() < 0.01

    order = torch.randperm(S)  # the same slots in another order, and others that are hidden
    mixed = (q, keys.mT[..., order], key_scale[:, :, order, 0], values[:, :, order], value_scale[:, :, order, 0])
    assert torch.equal(int8.attend_int8(*mixed, bias[..., order]), out)
    noise = torch.where(bias[:, :1, :1].squeeze(1) == -math.inf, 7, 0)
    one = bias[:, :, :1]
    other_scale = value_scale[..., 0] * (1 + noise)
    changed = (q[:, :1], keys.mT + noise[:, :, None].short(), key_scale[..., 0], values, other_scale)
    assert torch.equal(int8.attend_int8(*changed, one), out[:, :1])
