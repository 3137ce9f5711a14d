"""Checkpoint files: every layout that training leaves behind is read, no code in one ever runs."""

import argparse
import datetime
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vargen.convert.state_dicts import build_network, read_checkpoint

State = dict[str, Tensor]


@pytest.fixture
def state() -> State:
    generator = torch.Generator().manual_seed(0)
    names = ("tok.weight", "layers.0.w.weight", "layers.0.w.bias", "module_list.0.weight")
    return {name: torch.randn(4, 3, generator=generator) for name in names}


def _same(found: State, given: State) -> bool:
    return found.keys() == given.keys() and all(torch.equal(found[k], v) for k, v in given.items())


def _views(state: State) -> State:
    """All tensors in one storage, as fully sharded training leaves them."""
    flat = torch.cat([v.flatten() for v in state.values()])
    pieces = flat.split([v.numel() for v in state.values()])
    return {k: piece.view(v.shape) for (k, v), piece in zip(state.items(), pieces, strict=True)}


KEYS = ("model", "model_state_dict", "gpt", "net", "params", "generator", "ema", "ema_model", "params_ema", "generator_ema")

_LAYOUTS: dict[str, Callable[[State], Any]] = {
    "bare": lambda s: s,
    "model": lambda s: {"model": s, "optimizer": {"state": {}}, "steps": 3},
    "module": lambda s: {"module": s},
    "state_dict": lambda s: {"state_dict": s, "epoch": 1},
    "ddp": lambda s: {f"module.{k}": v for k, v in s.items()},
    "compiled": lambda s: {"model": {f"_orig_mod.{k}": v for k, v in s.items()}},
    "ddp of compiled": lambda s: {f"module._orig_mod.{k}": v for k, v in s.items()},
    "compiled ddp": lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()},
    "compiled blocks": lambda s: {re.sub(r"(layers\.\d+)", r"\1._orig_mod", k): v for k, v in s.items()},
    "training": lambda s: {"model": s, "args": argparse.Namespace(lr=1e-4, name="x", layers=[1], seed=None)},
    "views into one buffer": _views,
    "parameters": lambda s: {k: nn.Parameter(v) for k, v in s.items()},
    **{key: lambda s, key=key: {key: s, "epoch": 1} for key in KEYS},
    **{f"{key}.": lambda s, key=key: {"state_dict": {f"{key}.{k}": v for k, v in s.items()}} for key in KEYS},
    "ddp in a prefix": lambda s: {f"model.module.{k}": v for k, v in s.items()},
    "nested keys": lambda s: {"state_dict": {"model": s, "epoch": 1}, "steps": 2},
    "averaged only": lambda s: {"ema": {}, "model": s},
    "decay of an average": lambda s: {"ema": {"decay": 0.99}, "model": s},
    "key of a discriminator": lambda s: {"generator": s, "discriminator": {"main.0.weight": torch.ones(2)}},
    "prefix of a discriminator": lambda s: {"generator." + k: v for k, v in s.items()} | {"discriminator.a.b": torch.ones(2)},
    "losses": lambda s: {**s, "loss.discriminator.main.0.weight": torch.ones(2), "loss.logvar": torch.ones(1)},
    "moving average": lambda s: (
        {"ema_model." + k: v for k, v in s.items()} | {"initted": torch.tensor(True), "step": torch.tensor(3)}
    ),
    "values of NumPy": lambda s: {
        "model": s,
        "best": np.float64(0.5),
        "rank": np.int32(1),
        "rng": np.random.RandomState(0).get_state(),
        "curve": np.arange(6.0).reshape(2, 3)[:, ::2],
        "names": np.array(["a", None], dtype=object),
        "args": argparse.Namespace(lr=np.float32(0.1)),
    },
    "paths": lambda s: {"model": s, "args": argparse.Namespace(out=Path("a/b"), data=PurePosixPath("c"))},
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_is_read(layout: str, state: State, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save(_LAYOUTS[layout](state), file)
    found = read_checkpoint(file)
    assert _same(found, state) and not any(v.requires_grad for v in found.values())


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".PT", ".Ckpt", ".SAFETENSORS"])
def test_every_kind_of_file_is_read(ending: str, state: State, tmp_path: Path) -> None:
    file = tmp_path / f"x{ending}"
    if ending.lower() == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
        assert _same(read_checkpoint(file), state)
        torch.save(state, file, _use_new_zipfile_serialization=False)  # files from before torch 1.6
    assert _same(read_checkpoint(file), state)


@pytest.mark.parametrize(
    ("trained", "averaged"),
    [("model", "ema"), ("params", "params_ema"), ("model_state_dict", "model_ema_state_dict"), ("online_model", "ema_model")],
)
@pytest.mark.parametrize("prefer", ["ema", ()])
def test_a_choice_between_two_is_reported(
    trained: str, averaged: str, prefer: Any, state: State, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = {name: value / 2 for name, value in state.items()}
    torch.save({trained: state, averaged: half}, tmp_path / "x.pt")
    assert _same(read_checkpoint(tmp_path / "x.pt", prefer=prefer), half if prefer else state)
    (line,) = caplog.messages
    assert trained in line and averaged in line


def _shards(state: State, folder: Path, ending: str) -> Path:
    """Save each tensor to a file of its own, and return the index."""
    names = {name: f"model-{i + 1:05}-of-{len(state):05}{ending}" for i, name in enumerate(state)}
    for name, file in names.items():
        (save_file if ending == ".safetensors" else torch.save)({name: state[name]}, folder / file)
    index = folder / f"model{ending}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_parts_are_read_by_their_index(ending: str, prefix: str, state: State, tmp_path: Path) -> None:
    index = _shards({prefix + name: value for name, value in state.items()}, tmp_path, ending)
    assert _same(read_checkpoint(index), state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update({"tok.weight": "../x.bin"}), "index.json"),
        (lambda m: m.update({"tok.weight": "/etc/passwd"}), "index.json"),
        (lambda m: m.update({"tok.weight": "none.bin"}), "none.bin"),
        (lambda m: m.update({"tok.weight": "model.py"}), "model.py"),
        (lambda m: m.update({"more": m["tok.weight"]}), "tensors"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    change: Callable[[dict[str, str]], Any], said: str, state: State, tmp_path: Path
) -> None:
    index = _shards(state, tmp_path, ".bin")
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    rejects(lambda: read_checkpoint(index), said, ValueError)


def test_a_file_of_the_current_format_is_mapped(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file must not need its size in memory before the first tensor is used."""
    torch.save(state, tmp_path / "x.pt")
    options: dict[str, Any] = {}
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: options.update(k) or load(*a, **k))
    read_checkpoint(tmp_path / "x.pt")
    assert options["mmap"] and options["weights_only"] is True


# -- what is refused -------------------------------------------------------------------------------------------


class _Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["args", "model", "namespace"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(place: str, zipped: bool, state: State, tmp_path: Path) -> None:
    marker, file = tmp_path / "ran", tmp_path / "x.pt"
    hostile: Any = _Hostile(marker)
    content = {
        "args": {"model": state, "args": hostile},
        "model": {"model": {**state, "extra": hostile}},
        "namespace": {"model": state, "args": argparse.Namespace(inner=hostile)},
    }[place]
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"x\.pt holds more than tensors: \w+\.mkdir.*could run code") as caught:
        read_checkpoint(file)
    assert not marker.exists()
    assert "weights_only" not in str(caught.value) and caught.value.__cause__ is None, "no bad advice"
    torch.load(file, weights_only=False)
    assert marker.exists(), "the file does run code where it is let"


def test_nothing_but_a_namespace_is_let_in_and_that_only_meanwhile(state: State, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    for other in (datetime.timedelta(1), nn.Linear(2, 2)):
        torch.save({"model": state, "args": other}, file)
        with pytest.raises(ValueError, match=r"holds more than tensors: (datetime|torch\.nn)"):
            read_checkpoint(file)
    torch.save({"model": state, "args": argparse.Namespace()}, file)
    read_checkpoint(file)
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_values_of_numpy_are_not_interpreted(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders stand in for them: the classes of NumPy are not made for data of strangers."""
    loaded: list[Any] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1])
    torch.save({"model": state, "a": np.float64(1), "b": np.ones(3), "c": np.dtype("O"), "d": Path("x")}, tmp_path / "x.pt")
    read_checkpoint(tmp_path / "x.pt")
    (content,) = loaded
    assert {type(content[name]).__mro__[1].__name__ for name in "abcd"} == {"_Ignored"}
    assert not set(map(type, torch.serialization.get_safe_globals())) & {tuple}


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(file))
    with pytest.raises(ValueError, match="holds more than tensors: a TorchScript program"):
        read_checkpoint(file)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"PK\x03\x04" + bytes(500),
        lambda b: b[:80] + b"\xff" * 40 + b[120:],
    ],
)
def test_a_damaged_file_is_refused(name: str, damage: Callable[[bytes], bytes], state: State, tmp_path: Path) -> None:
    file = tmp_path / name
    torch.save(state, file)
    file.write_bytes(damage(file.read_bytes()))
    with warnings.catch_warnings(), pytest.raises(ValueError, match=rf"{re.escape(name)} is .*damaged"):
        warnings.simplefilter("ignore")
        read_checkpoint(file)


def test_what_is_no_checkpoint_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "folder.pt").mkdir()
    for name in ("README.md", "folder.pt", "none.pt"):
        rejects(lambda name=name: read_checkpoint(tmp_path / name), name, ValueError)


@pytest.mark.filterwarnings("ignore")  # of torch, about nested and quantized tensors
@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"model": {}},
        {"epoch": 3, "weights": {"a": torch.zeros(1)}},
        {"model": {"a": 1.0}},
        {"a": torch.zeros(1), "module.a": torch.zeros(1)},
        {"model": {"odd": torch.zeros(0, 4)}},
        {"model": {"odd": torch.eye(4).to_sparse()}},
        lambda: {"model": {"odd": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}},  # which warns
        {"model": {"odd": torch.empty(4, 4, device="meta")}},
        {"model": {"odd": torch.ones(1).expand(10**9, 10**3)}},
    ],
    ids=range(10),
)
def test_what_holds_no_plain_tensors_is_refused(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content() if callable(content) else content, "x.pt")
    rejects(lambda: read_checkpoint(Path("x.pt")), "x.pt", ValueError)


# -- weights in their network ------------------------------------------------------------------------------------


def _linear() -> State:
    return {"weight": torch.randn(2, 3), "bias": torch.randn(2)}


_SHAPE: dict[str, Any] = {"in_features": 3, "out_features": 2}


def test_a_network_is_built_around_its_weights() -> None:
    given = _linear()
    network = build_network(nn.Linear, _SHAPE, given, Path("x.pt"))
    assert _same(network.state_dict(), given)
    assert network.weight.data_ptr() == given["weight"].data_ptr(), "not a second copy"
    half = build_network(nn.Linear, _SHAPE, given, Path("x.pt"), torch.float16)
    assert _same(half.state_dict(), {k: v.half() for k, v in given.items()})


def test_weights_that_share_a_buffer_can_be_saved_apart(tmp_path: Path) -> None:
    shared = torch.randn(5, 5)
    tied = {"0.weight": shared, "0.bias": shared[0], "1.weight": shared.T, "1.bias": torch.randn(5)}

    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))

    network = build_network(pair, {}, tied, Path("x.pt"))
    save_file(network.state_dict(), tmp_path / "x.safetensors")  # refuses tensors that share memory
    assert _same(load_file(tmp_path / "x.safetensors"), tied)


@pytest.mark.parametrize(
    ("change", "dtype", "said"),
    [
        (lambda s: s.pop("bias"), None, "bias"),
        (lambda s: s.update(more=torch.zeros(1)), None, "more"),
        (lambda s: s.update(bias=torch.zeros(3)), None, "bias"),
        (lambda s: s.update(bias=torch.ones(2).to(torch.float8_e4m3fn)), None, "bias"),
        (lambda s: s["bias"].fill_(torch.nan), None, "bias"),
        (lambda s: s["weight"].fill_(1e6), torch.float16, "weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[[State], Any], dtype: torch.dtype | None, said: str) -> None:
    state = _linear()
    change(state)
    rejects(lambda: build_network(nn.Linear, _SHAPE, state, Path("x.pt"), dtype), said, ValueError)
