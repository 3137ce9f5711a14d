"""What torch is set to around a call, or around the opening of a model, never changes what is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import THERE_AND_BACK, TINY, made, seeded
from tiny_language_models import has_release, make_janus
from tiny_models import text_pipeline

import vargen
from vargen.decoding import decode

FAMILIES = ["next-token text", "next-scale class", "video", "janus"]


@contextmanager
def setting(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return setting(torch.set_default_dtype, dtype, torch.get_default_dtype())


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: torch.device("meta"),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "threads": lambda: setting(torch.set_num_threads, 3, torch.get_num_threads()),
}


def call(pipe: Any, family: str, method: Any, state: str | None = None) -> torch.Tensor:
    """Pixels of two images or videos, generated within a state."""
    with nullcontext() if state is None else STATES[state]():
        if family == "janus":
            return pipe(["a red apple", "dog"], accelerator=method, generator=seeded(1, 2), output_type="pt").images
        found = made(TINY[family].call(pipe, slice(0, 2), seeded(1, 2), method))
    return torch.stack(list(found))


def same(found: torch.Tensor, expected: torch.Tensor, state: str) -> bool:
    """Bit for bit; but several threads add in another order."""
    if state == "threads":
        return torch.allclose(found, expected, atol=1e-5)
    return found.dtype == expected.dtype and torch.equal(found, expected)


METHODS: dict[str, list[Any]] = {
    "next-token text": ["gumbel", "scd"],
    "next-scale class": ["plain", THERE_AND_BACK],
    "video": ["target"],
    "janus": ["scd"],
}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family, its pipeline, and its folder."""
    family, path = request.param, tmp_path_factory.mktemp("models")
    if family == "janus":
        if not has_release("janus"):
            pytest.skip("needs a newer transformers")
        vargen.accelerate(*make_janus()).save_pretrained(path / "model")
    elif family == "video":
        return family, TINY[family].open(path / "runs"), path / "runs" / "out"
    else:
        TINY[family].open(path / "runs").save_pretrained(path / "model")
    return family, vargen.open_pipeline(path / "model"), path / "model"


@pytest.mark.parametrize("state", STATES)
def test_ambient_state_changes_nothing(saved: tuple[str, Any, Path], state: str) -> None:
    family, pipe, folder = saved
    for method in METHODS[family]:
        expected = call(pipe, family, method)
        assert same(call(pipe, family, method, state), expected, state), method
    if state == "meta" or (state in ("float64", "inference mode") and family != "video"):
        with STATES[state]():
            opened = vargen.open_pipeline(folder)
        assert torch.equal(call(opened, family, method), expected)
        assert torch.equal(call(opened, family, method, state), expected)


def test_autocast_around_the_parts_of_a_call_changes_nothing() -> None:
    texts = text_pipeline()
    condition, _ = texts.encode_condition("a cat")
    seeds, tokens = torch.tensor([5]), torch.arange(16).view(1, 4, 4)
    image = torch.rand(1, 3, 8, 8, generator=seeded(0)[0])

    def parts() -> list[torch.Tensor]:
        return [
            texts.encode_prompt("a cat")[0],
            decode(texts.decoding_model(2.0), condition, seeds).tokens,
            texts.decode_tokens(tokens, output_type="pt"),
            texts.encode_image(image),
        ]

    alone = parts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = parts()
        assert torch.is_autocast_enabled("cpu"), "and it is on again afterwards"
    assert all(torch.equal(*pair) for pair in zip(alone, around, strict=True))
