"""Attention written out is torch's own, for every number of queries, grouped heads and slots that no query sees."""

import pytest
import torch
import torch.nn.functional as F

from vargen.kernels import ops
from vargen.kernels.ops import MAX_QUERIES, attend, fold_bias


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
