"""Moving accepted tokens together: against a copy made slot by slot, and against `KVCache.keep` on a CPU."""

import pytest
import torch
from rejects import rejects
from torch import Tensor

from vargen.kernels.triton import reference
from vargen.kernels.triton.kv import compact_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    k: Tensor, v: Tensor, length: list[int], path: list[list[int]], count: list[int], first: int, tokens: int
) -> list[Tensor]:
    """Keys, values, pointers and the counter after `keep`, between canaries."""
    A = max(map(len, path))
    stores = []
    for store in (k, v):
        whole = torch.full((store.numel() + 128,), 99.0, dtype=store.dtype, device=DEVICE)
        stores.append((whole, whole[64:-64].view(store.shape)))
        stores[-1][1].copy_(store)
    pointer, done = torch.tensor(length, device=DEVICE), torch.zeros(len(length), dtype=torch.int32, device=DEVICE)
    padded = torch.tensor([[*each, *[0] * (A - len(each))] for each in path], device=DEVICE)
    compact_kv(
        stores[0][1],
        stores[1][1],
        pointer,
        padded,
        torch.tensor(count, device=DEVICE),
        done,
        image_start=first,
        grid_tokens=tokens,
    )
    assert all((whole[:64] == 99).all() and (whole[-64:] == 99).all() for whole, _ in stores)
    return [stores[0][1].cpu(), stores[1][1].cpu(), pointer.cpu(), done.cpu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("K", [64, 100])
def test_paths_become_consecutive(K: int, dtype: torch.dtype) -> None:
    """Rows that keep the root alone, a path with its first token in place, a long one that overlaps its target, none."""
    layers, G, tokens, first = 3, 2, 20, 2
    path = [[0], [0, 1, 4, 6], [0, 2, 3, 4, 5, 6, 7], [0, 3]]
    count, length = [1, 4, 7, 0], [3, 0, 11, 20]
    k, v = torch.randn(2, layers, 4, G, first + tokens + 8, K).to(dtype)
    got = run(k, v, length, path, count, first, tokens)
    kept = [each[:n] for each, n in zip(path, count, strict=True)]
    starts = [first + n for n in length]
    assert torch.equal(got[0], reference.compact_path(k, starts, kept))
    assert torch.equal(got[1], reference.compact_path(v, starts, kept))
    assert got[2].tolist() == [4, 4, 18, 20] and not got[3].any()


def test_operands_that_do_not_fit_are_refused() -> None:
    k = torch.zeros(1, 2, 1, 8, 16)
    path, done = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    rejects(lambda: compact_kv(k, k[..., :8], path[:, 0], path, path[:, 0], done, image_start=0, grid_tokens=4), "alike")
    with pytest.raises(ValueError, match="count must be int64 of 2 rows"):
        compact_kv(k, k, path[:, 0].contiguous(), path, path[:, 0].int(), done, image_start=0, grid_tokens=4)
    with pytest.raises(ValueError, match="must be contiguous"):
        compact_kv(k, k, path[:, 0], path, path[:, 1], done, image_start=0, grid_tokens=4)
