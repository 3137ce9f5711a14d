"""What tests of Triton kernels share. They run compiled where there is a GPU, and interpreted elsewhere."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

collect_ignore_glob = [] if find_spec("triton") else ["test_*"]  # an extra
_MARGIN = 64  # numbers on both sides of a buffer


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a wrapper allocates uninitialized lies between canaries, which have to be alive afterwards, and holds poison."""
    kept: list[tuple[Tensor, Tensor]] = []
    empty, new_empty = torch.empty, Tensor.new_empty

    def guarded(shape: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
        dtype = dtype or torch.get_default_dtype()
        count = int(torch.Size(shape).numel())
        poison = torch.nan if dtype.is_floating_point else True if dtype == torch.bool else 101
        whole = torch.full((count + 2 * _MARGIN,), poison, dtype=dtype, device=device)
        kept.append((whole, whole.clone()))
        return whole[_MARGIN : _MARGIN + count].view(shape)

    def flat(shape: tuple[Any, ...]) -> Any:
        return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape

    def patched(*shape: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        return empty(*shape, dtype=dtype, device=device, **options) if options else guarded(flat(shape), dtype, device)

    def patched_new(self: Tensor, *shape: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return guarded(flat(shape), dtype or self.dtype, device or self.device)

    monkeypatch.setattr(torch, "empty", patched)
    monkeypatch.setattr(Tensor, "new_empty", patched_new)
    yield
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    for whole, before in kept:
        for side in (slice(0, _MARGIN), slice(len(whole) - _MARGIN, None)):
            assert torch.equal(whole[side].nan_to_num(nan=7.0), before[side].nan_to_num(nan=7.0)), "written outside of a buffer"
