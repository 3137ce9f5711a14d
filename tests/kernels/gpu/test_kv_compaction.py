"""Moving accepted tokens together, in the layout that Triton attention reads, against a copy made slot by slot."""

import pytest
import torch

from vargen.models.kv_cache import KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("K", [64, 100])
def test_paths_become_consecutive(K: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that keep the root alone, a path with its first token in place, a long one that overlaps its target, none."""
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    path = [[0], [0, 1, 4, 6], [0, 2, 3, 4, 5, 6, 7], [0, 3]]
    count, length = [1, 4, 7, 0], [3, 0, 11, 20]
    cache = KVCache(3, 4, 2, K, prefix=2, tokens=20, scratch=8, dtype=dtype, device=DEVICE)
    assert cache.fused and (cache.kv.stride(-2) > K) == (K == 100), "slots are padded to multiples of 16 bytes"
    cache.kv.normal_()
    cache.rollback(torch.tensor(length, device=DEVICE))
    expected, before = cache.kv.clone(), cache.kv.clone()
    for row, slots in enumerate(path):
        for place, slot in enumerate(slots[: count[row]]):
            start = cache.prefix + length[row]
            expected[:, :, row, :, start + place] = before[:, :, row, :, start + slot]
    padded = torch.tensor([[*each, *[0] * (7 - len(each))] for each in path], device=DEVICE)
    cache.commit_path(padded, torch.tensor(count, device=DEVICE))
    assert torch.equal(cache.kv, expected) and cache.length.tolist() == [4, 4, 18, 20]
