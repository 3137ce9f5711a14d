"""The number of kernels that a GPU launches for a pass, which decides its time: LlamaGen-B, one image with guidance, window 16.

Operations of a pass are counted that neither allocate nor make views: a lower bound of kernels, as a sort is several.
`F.rms_norm`, one kernel on a GPU, counts as one. docs/performance.md states the numbers.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from recorded_graph import list_tensors, memory
from tiny_targets import take_gpu_paths
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vargen.decoding import Engine, Sampling
from vargen.models.guidance import Condition
from vargen.models.heads.decoding import EagleModel
from vargen.models.heads.network import EagleDrafter
from vargen.models.llamagen.decoding import LlamaGenTokenModel
from vargen.models.llamagen.network import LlamaGenTransformer

ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "resolve_conj", "lift_fresh", "detach", "alias")


class CountLaunches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        given, made = {memory(each) for each in list_tensors((args, kwargs or {}))}, list_tensors(out)
        is_view = made and all(memory(each) in given for each in made) and not operation._schema.is_mutable
        if not is_view and (name := operation.overloadpacket.__name__) not in ALLOCATIONS:
            self.names[name] += 1
        return out

    def rms_norm(self, *args: Any) -> torch.Tensor:
        """Stands in for `F.rms_norm`, which is several operations on a CPU."""
        self.names["rms_norm"] += 1
        with _disable_current_modes():
            return torch.rms_norm(*args)


MOST = {"ar": 288, "gumbel": 336, "scd": 471, "gsd": 580, "lantern-jacobi": 549, "lantern": 3791}


@pytest.fixture(scope="module")
def model() -> LlamaGenTokenModel:
    """LlamaGen-B with a smaller width, which has as many operations."""
    torch.manual_seed(0)
    network = LlamaGenTransformer(dim=48, n_layer=12, n_head=12, multiple_of=32).to(torch.bfloat16).eval()
    torch.nn.init.normal_(network.output.weight, std=0.05)
    heads = {"eagle": partial(EagleModel, EagleDrafter(dim=48, multiple_of=32).to(torch.bfloat16).eval())}
    return LlamaGenTokenModel(network, 2.0, codebook=torch.randn(network.config.vocab_size, 8), draft_heads=heads)


@pytest.mark.parametrize("method", MOST)
def test_a_pass_has_few_launches(method: str, model: LlamaGenTokenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu_paths(monkeypatch)
    engine = Engine(model, method, batch_size=1)
    engine.submit(Condition(class_labels=torch.tensor([3])), torch.tensor([1]), Sampling(top_k=2000))
    for _ in range(4):
        engine.step()
    with torch.inference_mode(), CountLaunches() as count:
        monkeypatch.setattr(torch.nn.functional, "rms_norm", count.rms_norm)
        engine._pass.run(engine._pass.drafter.width)
    assert method == "lantern" or count.names["rms_norm"] == 25
    assert count.names.total() <= MOST[method], dict(count.names)
