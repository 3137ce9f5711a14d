"""Moving accepted tokens together, against a copy made slot by slot."""

import pytest
import torch

from vargen.kernels.triton.attention import compact_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("K", "room"), [(64, 64), (100, 100), (100, 112)])
def test_paths_become_consecutive(K: int, room: int, dtype: torch.dtype) -> None:
    """Rows that keep the root alone, a path with its first token in place, a long one that overlaps its target, none."""
    layers, G, tokens, first = 3, 2, 20, 2
    path = [[0], [0, 1, 4, 6], [0, 2, 3, 4, 5, 6, 7], [0, 3]]
    count, length = [1, 4, 7, 0], [3, 0, 11, 20]
    kv = torch.randn(layers, 2, 4, G, first + tokens + 8, room).to(dtype)
    whole = torch.full((kv.numel() + 128,), 99.0, dtype=dtype, device=DEVICE)  # between canaries
    store, expected = whole[64:-64].view(kv.shape).copy_(kv), kv.clone()
    for row, slots in enumerate(path):
        for place, slot in enumerate(slots[: count[row]]):
            start = first + length[row]
            expected[:, :, row, :, start + place, :K] = kv[:, :, row, :, start + slot, :K]
    pointer, done = torch.tensor(length, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    padded = torch.tensor([[*each, *[0] * (7 - len(each))] for each in path], device=DEVICE)
    given = padded, torch.tensor(count, device=DEVICE), done
    compact_kv(store[..., :K], pointer, *given, image_start=first, grid_tokens=tokens)
    assert (whole[:64] == 99).all() and (whole[-64:] == 99).all() and torch.equal(store.cpu(), expected)
    assert pointer.tolist() == [4, 4, 18, 20] and not done.any()
