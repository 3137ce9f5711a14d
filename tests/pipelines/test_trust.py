"""No file of a model folder runs, whichever diffusers is installed: our own checks see to it before diffusers looks."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import class_pipeline, text_pipeline

from vargen import LlamaGenPipeline
from vargen.models import component_files
from vargen.pipelines import llamagen, loading
from vargen.pipelines.base import DiffusionPipeline
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.registry import FAMILIES

CODE = """
open({marker!r}, "w").close()
class Evil:
    @classmethod
    def from_pretrained(cls, *words, **options):
        open({marker!r}, "w").close()
LlamaGenTransformer = DiffusionPipeline = T5Tokenizer = Evil
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    text_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def marker(tmp_path) -> Path:
    """Made by any code that runs."""
    return tmp_path / "ran"


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def alone(monkeypatch) -> None:
    """Our checks alone: what is refused must not have come as far as diffusers, which refuses some of it since 0.38."""

    def reached(cls: type, *args: Any, **kwargs: Any) -> None:
        pytest.fail("diffusers was asked to open the folder")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", classmethod(reached))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def name_in_index(folder: Path, **values: Any) -> None:
    change(folder / "model_index.json", **values)


def beside_the_weights(folder: Path, code: str) -> None:
    (folder / "transformer" / "vargen.models.llamagen.py").write_text(code)


def as_the_library(folder: Path, code: str) -> None:
    (folder / "tokenizer" / "transformers.py").write_text(code)
    name_in_index(folder, tokenizer=["transformers", "Evil"])


def as_a_module_of_ours(folder: Path, code: str) -> None:
    (folder / "transformer" / "vargen.evil.py").write_text(code)
    name_in_index(folder, transformer=["vargen.evil", "Evil"])


def as_a_pipeline_within(folder: Path, code: str) -> None:
    (folder / "tokenizer" / "evil.py").write_text(code)
    (folder / "tokenizer" / "model_index.json").write_text(json.dumps({"_class_name": ["evil", "Evil"]}))
    name_in_index(folder, tokenizer=["diffusers", "DiffusionPipeline"])


def as_one_more_component(folder: Path, code: str) -> None:
    (folder / "extra").mkdir()
    (folder / "extra" / "evil.py").write_text(code)
    name_in_index(folder, extra=["evil", "Evil"])


def as_the_pipeline(folder: Path, code: str) -> None:
    (folder / "evil.py").write_text(code)
    name_in_index(folder, _class_name=["evil", "Evil"])


def in_a_linked_folder(folder: Path, code: str) -> None:
    elsewhere = shutil.move(folder / "transformer", folder.parent / "elsewhere")
    (folder / "transformer").symlink_to(elsewhere, target_is_directory=True)
    (folder.parent / "elsewhere" / "vargen.models.llamagen.PY").write_text(code)


ATTACKS = [
    beside_the_weights, as_the_library, as_a_module_of_ours, as_a_pipeline_within, as_one_more_component, as_the_pipeline,
    in_a_linked_folder,
]  # fmt: skip


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_file_of_a_folder_runs(folder: Path, marker: Path, attack: Callable[[Path, str], None]) -> None:
    attack(folder, CODE.format(marker=str(marker)))
    with pytest.raises(ValueError, match=str(folder)) as caught:
        LlamaGenPipeline.from_pretrained(folder)
    assert not marker.exists()
    assert "trust_remote_code" not in str(caught.value)  # nothing advises it


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "attack", [as_the_library, as_a_module_of_ours, as_a_pipeline_within, as_one_more_component, as_the_pipeline]
)
def test_a_class_outside_the_list_is_refused_without_its_file(folder: Path, attack: Callable[[Path, str], None]) -> None:
    attack(folder, "")
    for file in folder.rglob("*.py"):
        file.unlink()
    with pytest.raises(ValueError, match=r"may be named there|are components|describes a"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "place", ["pipeline.py", "tokenizer/transformers.py", "vqvae/notes.PY", "text_encoder/deep/x.pyc", "draft_transformer/x.so"]
)
def test_code_is_refused_without_a_class_that_asks_for_it(folder: Path, place: str) -> None:
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("")
    with pytest.raises(ValueError, match=f"{place} is program code"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("component", ["transformer", "tokenizer"])
def test_code_in_a_linked_folder_of_a_component_is_refused_too(folder: Path, tmp_path: Path, component: str) -> None:
    elsewhere = tmp_path / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "x.py").write_text("")
    (elsewhere / "back").symlink_to(elsewhere.parent)  # which must not be followed for ever
    (folder / component / "linked").symlink_to(elsewhere.parent)
    with pytest.raises(ValueError, match=rf"{component}.linked.deep.x\.py is program code"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
def test_a_link_to_more_than_a_component_is_refused_soon(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_files, "_MAX_FILES", 20)
    (tmp_path / "disk").mkdir()
    for i in range(30):
        (tmp_path / "disk" / str(i)).touch()
    (folder / "vqvae" / "disk").symlink_to(tmp_path / "disk")
    with pytest.raises(ValueError, match="vqvae holds more than 20 files"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("model_index.json", "custom_pipelines", {"evil": "evil.py"}),
        ("transformer/config.json", "auto_map", {"AutoModel": "evil.Evil"}),
        ("text_encoder/config.json", "auto_map", {"AutoModel": "evil--evil.Evil"}),
        ("tokenizer/tokenizer_config.json", "auto_map", {"AutoTokenizer": ["evil.Evil", None]}),
        ("tokenizer/tokenizer_config.json", "trust_remote_code", True),
        ("text_encoder/config.json", "attn_implementation", "owner/kernel"),
        ("text_encoder/config.json", "_attn_implementation_internal", {"": "owner/kernel"}),
    ],
)
def test_no_configuration_asks_for_code(folder: Path, file: str, key: str, value: Any) -> None:
    change(folder / file, **{key: value})
    with pytest.raises(ValueError, match=rf"{file} has '{key}'.*vargen runs none"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
def test_no_weights_are_left_to_another_library_or_model(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "t5")
    name_in_index(folder.parent / "t5", text_encoder=["transformers", "T5EncoderModel"])
    encoder = folder.parent / "t5" / "text_encoder"
    change(encoder / "config.json", model_type="t5")
    (encoder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    with pytest.raises(ValueError, match=r"adapter_config\.json makes this the adapter of another model"):
        LlamaGenPipeline.from_pretrained(folder.parent / "t5")
    change(folder / "vqvae" / "config.json", quantization_config={"quant_method": "modelopt"})
    with pytest.raises(ValueError, match=r"vqvae.config\.json has a quantization_config"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("option", ["trust_remote_code", "custom_pipeline"])
def test_no_caller_can_ask_for_code_by_mistake(folder: Path, tmp_path: Path, marker: Path, option: str) -> None:
    (tmp_path / "pipeline.py").write_text(CODE.format(marker=str(marker)))
    value: Any = True if option == "trust_remote_code" else str(tmp_path)
    with pytest.raises(ValueError, match=f"{option} must be left out.*runs no code that comes with a model"):
        LlamaGenPipeline.from_pretrained(folder, **{option: value})
    assert not marker.exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "value", [5, "vargen.models.tokenizers.vq", ["vargen.models.tokenizers.vq"], {"a": 1}, [["vargen"], {}], ["torch.nn", None]]
)
def test_a_component_is_two_names_or_nothing(folder: Path, value: Any) -> None:
    name_in_index(folder, vqvae=value)
    with pytest.raises(
        ValueError, match=r"takes 'vqvae' from .* only vargen\.models\.tokenizers\.vq\.VQModel may be named there"
    ):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("component", ["transformer", "vqvae"])
@pytest.mark.parametrize("value", ["left out", None, [None, None]])
def test_a_network_that_is_not_there_is_named(folder: Path, component: str, value: Any) -> None:
    index = {**json.loads((folder / "model_index.json").read_text()), component: value}
    kept = {name: names for name, names in index.items() if names != "left out"}
    (folder / "model_index.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=f"model_index.json names no '{component}'"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("component", ["text_encoder", "tokenizer", "draft_transformer", "eagle", "upsampler"])
def test_a_part_that_is_not_there_is_two_nulls(folder: Path, component: str) -> None:
    name_in_index(folder, **{component: None})
    with pytest.raises(ValueError, match=rf"model_index.json has '{component}': null; .* \[null, null\]"):
        LlamaGenPipeline.from_pretrained(folder)


def test_a_network_that_a_caller_brings_need_not_be_there(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    name_in_index(folder, transformer=[None, None])
    assert LlamaGenPipeline.from_pretrained(folder, transformer=None).transformer is None


def test_whatever_a_folder_may_name_exists_and_is_what_we_save(saved: Path, tmp_path: Path) -> None:
    """The list is neither too long nor too short."""
    import importlib

    for component in (component for family in FAMILIES.values() for component in family.components.values()):
        assert any(hasattr(importlib.import_module(library), name) for library, name in component.paths)
    class_pipeline().save_pretrained(tmp_path / "class")
    for folder in (saved, tmp_path / "class"):
        found = loading.validate_model_folder(folder, LLAMAGEN, {"trust_remote_code": False})
        assert found.path == folder and found.family is LLAMAGEN


def test_parts_that_a_caller_brings_need_no_file(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("text_encoder", "tokenizer"))
    pipe = LlamaGenPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None)
    assert pipe.text_encoder is None and isinstance(pipe.transformer, llamagen.LlamaGenTransformer)
    os.remove(folder / "vqvae" / "config.json")
    assert LlamaGenPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None, vqvae=pipe.vqvae).vqvae is pipe.vqvae
