"""Which kernels run where: torch on a CPU, and an error, before any work, where Triton was insisted on."""

from typing import Any

import pytest
import torch

from vargen.decoding import Engine, TokenModel, decode
from vargen.kernels import dispatch
from vargen.kernels.ops import pack_bits


@pytest.fixture(autouse=True)
def fresh() -> None:
    dispatch._resolve_backend.cache_clear()


def test_a_cpu_takes_torch_and_says_why() -> None:
    assert dispatch.explain_kernels("cpu") == ("reference", "Triton kernels are for NVIDIA GPUs, and this runs on cpu")
    assert not dispatch.uses_triton(torch.zeros(1))


def test_triton_without_a_gpu_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="VARGEN_KERNELS=triton needs an NVIDIA GPU, and this runs on cpu"):
        dispatch.uses_triton(torch.zeros(1))
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Triton, which is not installed"):
        dispatch.explain_kernels("cuda")


def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_KERNELS", "cuda")
    with pytest.raises(ValueError, match="VARGEN_KERNELS must be one of auto, reference, triton, cpu, got 'cuda'"):
        dispatch.uses_triton(torch.zeros(1))


def test_a_gpu_takes_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    monkeypatch.setattr(dispatch, "_run_self_check", lambda device: "sampler: off by 1" if device == "cuda:2" else None)
    assert dispatch.explain_kernels("cuda:1")[0] == "triton"
    assert dispatch.explain_kernels("cuda:2") == ("reference", "a kernel failed its check here (sampler: off by 1)")
    monkeypatch.setenv("VARGEN_KERNELS", "reference")
    assert dispatch.explain_kernels("cuda") == ("reference", "VARGEN_KERNELS=reference")
    monkeypatch.setenv("VARGEN_KERNELS", "")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert dispatch.explain_kernels("cuda")[0] == "reference"


class Unseen(TokenModel):
    """Has no attribute but its class."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return type(self)
        raise AssertionError(f"{name} is looked at")


def test_the_loop_refuses_before_it_looks_at_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_KERNELS", "trition")
    with pytest.raises(ValueError, match="VARGEN_KERNELS must be one of"):
        decode(Unseen(), None, torch.tensor([1]))
    with pytest.raises(ValueError, match="VARGEN_KERNELS must be one of"):
        Engine(None)  # type: ignore[arg-type]


@torch.no_grad()
def test_rows_that_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "uses_triton", lambda rows: True)
    assert dispatch.supports_rows(torch.empty(1, dispatch.MAX_VOCAB, device="meta"))
    assert not dispatch.supports_rows(torch.empty(1, dispatch.MAX_VOCAB + 1, device="meta"))
    assert not dispatch.supports_rows(torch.empty(1, 5, dtype=torch.float64, device="meta"))
    with torch.enable_grad():
        assert not dispatch.supports_rows(torch.empty(1, 5, device="meta"))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_words_hold_every_bit(count: int) -> None:
    table = torch.rand(2, 5, count) < 0.5
    table[..., count - 1] = True
    words = pack_bits(table)
    bits = (words[..., None] >> torch.arange(64)) & 1
    assert words.shape == (2, 5, -(-count // 64)) and torch.equal(bits.flatten(-2)[..., :count].bool(), table)
    assert count % 64 or (words[..., -1] < 0).all(), "bit 63 is the sign"
