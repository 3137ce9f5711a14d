"""Whatever a packaged model's configuration says in place of its values, opening ends soon: it opens, or the value is named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vargen.assets
from vargen.adapters.video_settings import validate_settings
from vargen.models import component_files
from vargen.models.component_files import validate_network_files
from vargen.models.image_text import ImageTextModel
from vargen.pipelines.registry import FAMILIES, inspect_model
from vargen.scoring.image_text import load_image_tower
from vargen.weight_files import read_weight_header

ROOT = Path(vargen.assets.__file__).parent
CONFIGS = sorted(file.parent.relative_to(ROOT).as_posix() for file in ROOT.rglob("config.json"))
COMPONENTS = [component for family in FAMILIES.values() for component in family.components.values()]
KINDS = {name: kind for component in COMPONENTS for (_, name), kind in component.paths.items() if isinstance(kind, type)}
KINDS |= {ImageTextModel.__name__: ImageTextModel}
VALUES = (-1, 0, "x", None, math.nan, 10**12)


@pytest.fixture
def few_layers(monkeypatch: Any) -> None:
    """No network of an absurd size is even described."""

    def counting(build: Callable[..., None]) -> Callable[..., None]:
        def made(self: Any, *words: Any, **options: Any) -> None:
            built.append(1)
            if len(built) > 2000:
                pytest.fail("a network of that size was being built")
            build(self, *words, **options)

        return made

    built: list[int] = []
    for layer in (torch.nn.Linear, torch.nn.Conv2d):
        monkeypatch.setattr(layer, "__init__", counting(layer.__init__))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_checked(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    header = read_weight_header(ROOT / name, "diffusion_pytorch_model")
    monkeypatch.setattr(component_files, "read_weight_header", lambda *_: header)
    held = json.loads((ROOT / name / "config.json").read_text("utf-8"))
    kind = KINDS[held["_class_name"]]
    validate_network_files(ROOT / name, kind)
    for field in (field for field in held if not field.startswith("_")):
        for value in VALUES:
            (tmp_path / "config.json").write_text(json.dumps({**held, field: value}))
            try:
                validate_network_files(tmp_path, kind)
            except ValueError as error:
                reported = str(error).replace(str(tmp_path), "")
                possible = value is None or value == 0  # some mean another network, of which the shapes tell
                assert field in reported or (possible and "do not fit the model" in reported), (field, value, reported)
            else:
                assert value is None or value == 0 or field in ("codes", "drafter"), (field, value)  # digests


def copied(name: str, part: str, to: Path, **values: Any) -> Path:
    """A packaged model of which one part's configuration is another."""
    for source in (path for path in (ROOT / name).rglob("*") if path.is_file()):
        target = to / source.relative_to(ROOT / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    file = to / part / "config.json"
    held = json.loads(file.read_text("utf-8"))
    file.unlink()
    file.write_text(json.dumps({**held, **values}))
    return to


@pytest.mark.usefixtures("few_layers")
@pytest.mark.parametrize(
    ("name", "part", "field", "value"),
    [
        ("emoji", "transformer", "norm_eps", -1),
        ("emoji", "transformer", "norm_eps", "x"),
        ("emoji", "vqvae", "num_res_blocks", 10**12),
        ("emoji", "medusa", "blocks", 10**12),
        ("emoji-var", "vqvae", "num_res_blocks", 10**12),
        ("emoji-var", "vqvae", "num_res_blocks", 2),
        ("emoji-var", "vqvae", "shared_phi", 10**12),
        ("emoji-var", "vqvae", "shared_phi", 5),
        ("emoji-var", "vqvae", "transformer_blocks", 10**12),
        ("emoji-var", "vqvae", "scales", [1, 10**9]),
        ("emoji-video", "vae", "conv_blocks", 10**12),
        ("emoji-video", "vae", "transformer_blocks", 10**12),
        ("emoji-video", "vae", "widths", [64] * 10_000),
        ("emoji-video", "transformer", "text_len", 10**12),
        ("emoji-video", "transformer", "text_len", -1),
        ("emoji-video", "transformer", "text_len", math.nan),
    ],
)
def test_a_whole_model_is_refused_before_a_network_of_that_size_is_built(
    name: str, part: str, field: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{part}.config\.json.*{field}") as refused:
        inspect_model(copied(name, part, tmp_path / "model", **{field: value}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("field", "value"), [("image_size", 10**12), ("blocks", [10**12] * 3), ("groups", 0), ("widths", "x")])
def test_a_scorer_is_checked_likewise(field: str, value: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "emoji-scorer", tmp_path / "scorer")
    held = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**held, field: value}))
    with pytest.raises(ValueError, match=rf"config\.json.*{field} must be"):
        load_image_tower(folder)


@pytest.mark.parametrize("name", ["num_blocks", "window", "sinks", "caption_rows", "scored_frames"])
@pytest.mark.parametrize("value", [-1, "x", math.nan, 10**12])
def test_defaults_of_video_have_bounds(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"defaults: {name} must be"):
        validate_settings({name: value})
