import pytest
import torch

from vargen.kernels.kth_largest import kth_largest_value


@pytest.mark.parametrize("k", [1, 2, 7, 31, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_sorting_with_ties_and_infinities(k, dtype):
    values = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(k)).mul(2).round().to(dtype)  # many ties
    values[0, 0, :9] = float("-inf")
    expected = values.sort(-1, descending=True).values[..., k - 1 : k]
    assert torch.equal(kth_largest_value(values, k), expected)
    strided = values.transpose(0, 1)
    assert torch.equal(kth_largest_value(strided, k), expected.transpose(0, 1))
