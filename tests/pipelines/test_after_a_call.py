"""A pipeline that has generated can be saved, copied, pickled and cast like a new one, and generates the same afterwards."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tiny_families import MULO, TINY, brightness, drafting_pipeline, seeded

from vargen import CausalVideoPipeline, open_pipeline

FAMILIES: dict[str, tuple[Callable[[Path], Any], tuple[Any, ...]]] = {
    "next-token class": (TINY["next-token class"].build, ("ar", "auto")),
    "next-token": (lambda _: drafting_pipeline(), ("auto", "sjd", "speculative", "eagle", "medusa", MULO)),
    "next-scale class": (TINY["next-scale class"].build, ("plain", "code")),
    "next-scale": (TINY["next-scale text"].build, ("plain", "code")),
    "video": (TINY["video"].build, ("sdvg",)),
}


def generated(pipe: Any, method: Any, **options: Any) -> torch.Tensor:
    asked: dict[str, Any] = {"generator": seeded(3)[0], "accelerator": method, "output_type": "pt", **options}
    if isinstance(pipe, CausalVideoPipeline):
        return pipe("a red apple", num_blocks=2, scorer=None if method == "target" else brightness, **asked).frames
    by_class = pipe.transformer.config.condition == "class"
    return pipe(**({"class_labels": 3} if by_class else {"prompt": "a red apple"}), **asked).images


def networks(pipe: Any) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def check(pipe: Any, method: Any, folder: Path) -> None:
    """Of the weights, of what is written, and of copies; `pipe` has generated nothing yet."""
    before = generated(pipe, method)
    states = {name: network.state_dict() for name, network in networks(pipe).items()}
    for name, state in states.items():
        assert all(value.is_contiguous() for value in state.values()), name
        save(state)
        torch.save(state, io.BytesIO())
    pipe.save_pretrained(folder)
    for other in (open_pipeline(folder), copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe)), pipe):
        assert torch.equal(generated(other, method), before)
    for network in networks(pipe).values():
        network.load_state_dict(copy.deepcopy(network.state_dict()))
    assert torch.equal(generated(pipe, method), before)


@pytest.mark.parametrize(
    ("family", "method"), [(family, method) for family, (_, methods) in FAMILIES.items() for method in methods]
)
def test_tiny_models_of_every_family(family: str, method: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    check(FAMILIES[family][0](tmp_path / "runs"), method, tmp_path / "saved")


@pytest.mark.extended
@pytest.mark.parametrize(("name", "method"), [("emoji", "sjd"), ("emoji-var", "plain"), ("emoji-video", "target")])
def test_packaged_models_are_saved_after_a_call(name: str, method: str, tmp_path: Path) -> None:
    pipe, stop = open_pipeline(name), lambda _, step, *others: {"stop": step == 20}
    before = generated(pipe, method, callback_on_step_end=stop)
    pipe.save_pretrained(tmp_path / "saved")
    assert torch.equal(generated(open_pipeline(tmp_path / "saved"), method, callback_on_step_end=stop), before)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_cast_back_and_forth_changes_no_more_than_a_cast(family: str, tmp_path: Path) -> None:
    opened, methods = FAMILIES[family]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    used, fresh = opened(tmp_path / "one"), opened(tmp_path / "two")
    for method in methods:
        generated(used, method)
    for pipe in (used, fresh):
        pipe.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(generated(used, methods[0]), generated(fresh, methods[0]))


def test_weights_are_contiguous_again_in_training() -> None:
    pipe = drafting_pipeline()
    generated(pipe, "medusa")
    for name in ("transformer", "medusa"):
        network = getattr(pipe, name)
        assert not all(weight.is_contiguous() for weight in network.parameters())
        network.train()
        assert all(weight.is_contiguous() for weight in network.parameters())
        state = network.state_dict()
        assert all(state[key].data_ptr() == weight.data_ptr() for key, weight in network.named_parameters())
