"""Passes only write into tensors that are allocated once, and the host reads none of them: a GPU can capture any pass.

On a CPU, with the paths of a GPU: every operation of a pass is written down, with the addresses of the fixed tensors that it
takes and the numbers that it gets from the host. All of these have to be the same in every pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded_graph import list_leaves, list_tensors, memory, refuse_reads
from tiny_targets import GRID, take_gpu_paths, tiny_low_res, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vargen.decoding import Accelerator, Engine, Jacobi, Sampling, list_methods, shared_noise, speculative_sampling
from vargen.decoding.relaxed_rules import PooledRule
from vargen.decoding.tree import PassResult
from vargen.kernels.noise_bits import _lane_offsets
from vargen.models.guidance import Condition

METHODS = {method.name: method for method in list_methods("next-token")}
# With fewer neighbors: in so small a vocabulary all tokens are neighbors, and an image ends after two passes.
METHODS["mulo"] = replace(METHODS["mulo"], acceptance=PooledRule(size=2))
COUPLINGS = {"independent": speculative_sampling, "maximal": speculative_sampling, "gumbel": shared_noise}
OPTIONS = (Sampling(), Sampling(0.7), Sampling(0.9, top_k=20, top_p=0.8), Sampling(0.0))


class WrittenDown(TorchDispatchMode):
    """Writes down the operations of a pass, and refuses those for which the host waits for a device.

    Args:
        refuses: whether it refuses operations.

    Attributes:
        operations: name of each, and what it takes: numbers of the host, tensors that the pass made, by the number of the
            operation that made them, and other tensors by address. All tensors with their shapes.
        fixed: shapes of the tensors that the pass did not make, by their memory.
    """

    def __init__(self, refuses: bool):
        super().__init__()
        self.refuses = refuses
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self.fixed: dict[int, torch.Size] = {}
        self._made: dict[int, int] = {}
        self._alive: list[Any] = []  # or an address could be that of two tensors

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.refuses:
            refuse_reads(operation, args, kwargs or {})
        out, given = operation(*args, **(kwargs or {})), list_leaves((args, kwargs or {}))
        is_new = operation.overloadpacket.__name__ == "lift_fresh"  # numbers of the host
        known = set() if is_new else set(map(memory, list_tensors(given)))
        self.operations.append((str(operation), tuple(each.tolist() if is_new else self._describe(each) for each in given)))
        self._made |= {memory(each): len(self.operations) for each in list_tensors(out) if memory(each) not in known}
        self._alive.append(out)
        return out

    def _describe(self, given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        if (made := self._made.get(memory(given))) is not None:
            return made, given.storage_offset(), given.shape, given.stride()
        self.fixed[memory(given)] = given.shape
        return given.data_ptr(), given.shape, given.stride()


def find_tensors(part: Any, path: str, seen: set[int] | None = None) -> dict[str, Tensor]:
    """List all tensors that an object holds, also in objects that it holds, by path."""
    seen = set() if seen is None else seen
    if isinstance(part, Tensor):
        return {path: part}
    if isinstance(part, type) or id(part) in seen:
        return {}
    seen.add(id(part))
    parts: list[tuple[Any, Any]] = []
    if isinstance(part, dict):
        parts = [(f"[{key!r}]", each) for key, each in part.items()]
    elif isinstance(part, list | tuple | set | frozenset):
        parts = [(f"[{number}]", each) for number, each in enumerate(part)]
    elif hasattr(part, "__dict__"):
        parts = [(f".{name}", each) for name, each in vars(part).items()]
    found: dict[str, Tensor] = {}
    for name, each in parts:
        found |= find_tensors(each, path + name, seen)
    return found


class Watch:
    """Watches the passes of an engine.

    Attributes:
        passes: number of passes of each kind, of which there is one graph.
        kept: tensors of the state, the drafter, the rule and the model, by path, when they were first seen. They are held here,
            so that no other tensor can have the address of one of them.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.engine, self.passes, self.kept = engine, Counter[tuple[int, bool]](), dict[str, Tensor]()
        self._run, self._second = engine._pass.run, dict[tuple[int, bool], WrittenDown]()
        self._fixed: dict[int, torch.Size] = {}
        monkeypatch.setattr(engine._pass, "run", self.run)

    def run(self, width: int, cache: Any) -> PassResult:
        """Run a pass, which has to consist of the same operations on the same tensors as the first of its kind."""
        kind = width, self.engine._pass.state.sampling.filters
        self.passes[kind] += 1
        is_first = self.passes.total() == 1  # which also makes what is kept, such as the tree of a window
        with WrittenDown(refuses=not is_first) as written:
            result = self._run(width, cache)
        self._fixed = written.fixed
        if not is_first:
            first = self._second.setdefault(kind, written)
            for old, new in zip(first.operations, written.operations, strict=True):
                assert old == new, f"an operation of pass {self.passes[kind]} of kind {kind}"
        return result

    def step(self) -> None:
        """Step the engine, after which all tensors have to be where they were first seen.

        A pass takes no others, which could end before a graph that reads them, but the numbers of the vocabulary: a function
        caches these.
        """
        assert all(image.error is None for image in self.engine.step())
        parts = {name: getattr(self.engine._pass, name) for name in ("state", "drafter", "rule", "model")}
        found = {path: each for name, part in parts.items() for path, each in find_tensors(part, name).items()}
        assert not self.kept.keys() - found.keys(), "tensors that are gone"
        assert self.passes.total() <= 1 or not found.keys() - self.kept.keys(), "tensors that are made after the first pass"
        self.kept = found | self.kept
        for path, each in found.items():
            assert place(each) == place(self.kept[path]), f"{path} is another tensor"
        held = {memory(_lane_offsets(self.engine.model.vocab, self.engine.device)), *map(memory, found.values())}
        assert not self._fixed.keys() - held, f"tensors of nobody: {[self._fixed[each] for each in self._fixed.keys() - held]}"


def place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def check_passes(method: Accelerator, monkeypatch: pytest.MonkeyPatch, upsampled: bool = False) -> None:
    """Generate images with several options, which join one after the other; the last takes the place of the first."""
    take_gpu_paths(monkeypatch)
    engine = Engine(tiny_target(low_res=tiny_low_res(upsampled)), method, batch_size=3)
    watch = Watch(engine, monkeypatch)
    for number, sampling in enumerate(OPTIONS):
        if number == 3:
            engine.cancel(0)
        engine.submit(Condition(class_labels=torch.tensor([number])), torch.tensor([number]), sampling)
        for _ in range(2):
            watch.step()
    width = engine._pass.drafter.width
    assert watch.passes == {(width, False): 3, (width, True): 4}, "and one step is the prefill alone"


@pytest.mark.parametrize("name", METHODS)
def test_a_pass_of_a_preset_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_passes(METHODS[name], monkeypatch)


@pytest.mark.parametrize("name", ["mulo-exact", "mulo"])
def test_a_pass_over_drafts_of_an_upsampler_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_passes(METHODS[name], monkeypatch, upsampled=True)


@pytest.mark.parametrize("width", [2, 3, 7, GRID**2])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_pass_over_a_window_can_be_captured(coupling: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_passes(Accelerator(drafter=Jacobi(width, coupling), acceptance=COUPLINGS[coupling]), monkeypatch)
