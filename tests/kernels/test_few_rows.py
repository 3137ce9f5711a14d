"""The mirrored product is the linear layer, for every number of rows and every layout of its input."""

import pytest
import torch
import torch.nn.functional as F

from vargen.kernels.few_rows import MOST_ROWS, linear

WEIGHT = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", [48, 40, 39])  # divisible by a block of 16, by 2, by neither
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 7, 16, 31, 32, MOST_ROWS, MOST_ROWS + 1])
def test_equals_the_linear_layer(rows, width):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 24, generator=generator), torch.randn(width, 24, generator=generator)
    with torch.no_grad():
        out = linear(x, weight)
    assert out.shape == (rows, width) and out.is_contiguous()
    assert torch.allclose(out, F.linear(x, weight), atol=1e-5)


def test_leading_dimensions_and_layouts():
    x = torch.randn(24, 2, 3, generator=torch.Generator().manual_seed(1)).permute(1, 2, 0)
    with torch.no_grad():
        for given in (x, x[:1], x[:, :1], x.expand(2, 2, 3, 24)):
            assert torch.allclose(linear(given, WEIGHT), F.linear(given, WEIGHT), atol=1e-5)


def test_gradients_and_other_dtypes_take_the_plain_path():
    x = torch.randn(2, 24, requires_grad=True)
    linear(x, WEIGHT).sum().backward()
    assert torch.allclose(x.grad, WEIGHT.sum(0).expand(2, -1), atol=1e-5)
    with torch.no_grad():
        low = linear(x.bfloat16(), WEIGHT.bfloat16())
    assert low.dtype == torch.bfloat16 and torch.equal(low, F.linear(x.bfloat16(), WEIGHT.bfloat16()))
