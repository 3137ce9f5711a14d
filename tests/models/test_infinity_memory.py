"""What Infinity's memory is predicted to be is what its tensors take, measured without memory on the meta device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vargen.models.guidance import Condition
from vargen.models.infinity import blocks
from vargen.models.infinity.memory import predict_memory
from vargen.models.infinity.network import SIZES, InfinityTransformer
from vargen.models.infinity.schedules import ScalePlan


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            if not isinstance(each, Tensor):
                continue
            storage = each.untyped_storage()
            if storage._cdata in known or storage._cdata in self._seen:
                continue
            self._seen.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize(("name", "gigabytes"), [("infinity-2b", (4.41, 3.37)), ("infinity-8b", (16.75, 7.37))])
@pytest.mark.parametrize("tile", [None, 512])
def test_official_sizes_at_a_megapixel(name: str, gigabytes: tuple[float, float], tile: int | None, monkeypatch: Any) -> None:
    """Weights, keys and values to the byte; the last pass up to the upper bound, of which it takes most."""
    monkeypatch.setattr(
        blocks, "attend", lambda q, k, v, mask, scale=None: torch.empty_like(q)
    )  # the meta device has no kernel
    plan, rows = ScalePlan.official(), 100
    with torch.device("meta"):
        weights = InfinityTransformer(**SIZES[name]).to(torch.bfloat16).state_dict()
        model = InfinityTransformer(**{**SIZES[name], "depth": 2}).to(torch.bfloat16)  # a pass takes as much at any depth
        cache = model.new_cache(plan, 2, rows, torch.device("meta"))
        condition = Condition(None, torch.zeros(2, rows, 2048), torch.ones(2, rows, dtype=torch.bool))
        inputs = torch.zeros(2, 4096, model.config.code_dim)
    need, layers = predict_memory(SIZES[name], plan, text=rows, tile=tile), SIZES[name]["depth"] / 2
    assert need.weights == sum(each.nbytes for each in weights.values())
    assert need.keys == layers * (cache.k.nbytes + cache.v.nbytes)
    assert need.text == layers * (cache.text_k.nbytes + cache.text_v.nbytes)
    assert (need.weights / 1e9, need.keys / 1e9) == pytest.approx(gigabytes, abs=0.01)
    with torch.inference_mode():
        model(None, condition, cache=cache)
        cache.scale = 12
        with LiveBytes() as live:
            model(inputs, cache=cache, tile=tile)
    assert 0.7 * need.largest_pass < live.most <= need.largest_pass, (live.most / 1e9, need.largest_pass / 1e9)


def test_rows_dtype_and_tiles_count() -> None:
    size, plan = SIZES["infinity-2b"], ScalePlan.official(10)
    one = predict_memory(size, plan)
    assert predict_memory(size, plan, rows=1).keys * 2 == one.keys
    assert predict_memory(size, plan, last_rows=1).largest_pass * 2 == one.largest_pass
    assert predict_memory(size, plan, rows=6, text=100).text * 512 == 3 * one.text * 100
    assert predict_memory(size, plan, dtype=torch.float32).weights == 2 * one.weights
    assert predict_memory(size, plan, tile=64).largest_pass < one.largest_pass / 2
