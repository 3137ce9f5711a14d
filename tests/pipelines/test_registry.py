"""Models of any family by name, and what a pipeline says of itself; nobody above names a family."""

import ast
import json
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline, tiny_transformer, tiny_vq

import vargen
from vargen import LlamaGenPipeline, open_pipeline
from vargen.decoding import PRESETS, Accelerator, Jacobi, list_methods, resolve_method, speculative_sampling
from vargen.pipelines.registry import inspect_model, pipeline_class

ROOT = Path(vargen.__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of text with two styles, the number of entries that a component's place in an index has, too."""
    pipe = text_pipeline()
    folder = tmp_path_factory.mktemp("saved") / "text"
    LlamaGenPipeline(**pipe.components, prompt_styles=["3d", "flat"], defaults={"top_k": 7}).save_pretrained(folder)
    return folder


def test_open_pipeline_finds_the_class_in_the_folder(folder: Path) -> None:
    pipe = open_pipeline(folder, torch_dtype=torch.float64)
    assert type(pipe) is LlamaGenPipeline and pipe.transformer.dtype == torch.float64
    assert list(pipe.config.prompt_styles) == ["3d", "flat"] and pipe.default_sampling["top_k"] == 7
    rejects(lambda: open_pipeline("emojj"), "emojj")


def test_a_folder_of_no_family_is_refused(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="describes a 'FluxPipeline'; vargen opens LlamaGenPipeline"):
        open_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "_class_name": "VARPipeline"}))
    with pytest.raises(ValueError, match=r"only vargen\.models\.var\.VARTransformer may be named there"):
        open_pipeline(tmp_path)


def test_a_description_says_what_the_pipeline_does(folder: Path) -> None:
    said, pipe = inspect_model(folder), open_pipeline(folder)
    assert pipeline_class(said.pipeline) is type(pipe)
    assert (said.condition, said.vocab_size, said.num_tokens) == (
        "text",
        pipe.vocab_size,
        pipe.num_tokens,
    ) and "draft_transformer" not in said.components
    with pytest.raises(ValueError, match="window"):
        type(pipe).validate_method_for(
            said, Accelerator(drafter=Jacobi(window=said.num_tokens + 1), acceptance=speculative_sampling)
        )


def test_methods_say_why_not() -> None:
    found = {method.name: method for method in class_pipeline().list_methods()}
    assert list(found) == [preset.name for preset in list_methods("next-token")]
    assert found["ar"].unsupported_reason is None and found["ar"].kind == "exact" and found["gsd"].kind == "relaxed"
    assert "draft_transformer" in found["speculative"].unsupported_reason
    parts = {"vqvae": tiny_vq(), "transformer": tiny_transformer("class")}
    able = LlamaGenPipeline(**parts, draft_transformer=tiny_transformer("class", n_layer=1))
    lacking = {
        method.name: method.unsupported_reason for method in able.list_methods() if method.unsupported_reason is not None
    }
    trained = {name for name, reason in lacking.items() if "vargen train drafter" in reason}
    assert trained == {"eagle", "eagle-gumbel", "eagle-2", "lantern", "medusa"}
    few = {"layer-skip", "pac", "gumbel-tree", "mulo", "mulo-exact", "wavefront"}  # too few layers, or tokens, for these
    assert lacking.keys() - trained <= few


def test_methods_of_another_family_are_refused() -> None:
    rejects(lambda: resolve_method("ar", "next-scale"), "next-scale")
    rejects(lambda: resolve_method("sdj", "next-token"), "sdj")
    assert resolve_method("sjd") is PRESETS["sjd"]


@pytest.mark.parametrize("styles", ["flat", ["3d", 4], ["", "flat"], {"3d": 1}])
def test_styles_must_be_words(styles: object) -> None:
    rejects(lambda: LlamaGenPipeline(**class_pipeline().components, prompt_styles=styles), "prompt_styles")


def test_a_device_may_be_named_at_opening(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("cpu", torch.device("cpu"), "auto" if not torch.cuda.is_available() else "cpu"):
        pipe = open_pipeline(folder, device=place)
        assert pipe.device.type == "cpu" and pipe.transformer.dtype == torch.float32
    pipe = open_pipeline(folder, device="meta")
    assert pipe.device.type == "meta" and pipe.transformer.dtype == torch.bfloat16, "that device's fastest"
    assert open_pipeline(folder, device="meta", torch_dtype=torch.float64).transformer.dtype == torch.float64
    monkeypatch.setattr("vargen.pipelines.registry.find_model_folder", None)  # nothing is looked at before
    for wrong in ("gpu", "cuda:999", 3.5):
        with pytest.raises(ValueError, match="device"):
            open_pipeline(folder, device=wrong)


@pytest.mark.parametrize("name", ["num_images", "tranformer", "eagle_drafter"])
def test_an_unknown_argument_of_opening_is_named(folder: Path, name: str) -> None:
    for name_of_model in (folder, "emoji", "nobody/nothing"):
        with pytest.raises(TypeError, match=f"^{name} is no argument"):
            open_pipeline(name_of_model, **{name: 1})
    with pytest.raises(TypeError, match=f"^{name} is no argument"):
        LlamaGenPipeline.from_pretrained(folder, **{name: 1})
    with pytest.raises(TypeError, match=r"^eagle is no argument"):  # of this family
        open_pipeline("emoji-var", eagle=None)
    rejects(lambda: LlamaGenPipeline.from_pretrained(folder, device="cpu"), "device", TypeError)


# Verbs that take or make files of one family are named after it.
_MAY_NAME = {"vargen/cli/convert.py", "vargen/cli/train.py"}


def test_nothing_above_the_pipelines_names_a_family() -> None:
    parts = [ROOT / "vargen" / part for part in ("cli", "demo", "evaluation")]
    above = [ROOT / "app.py", *(file for part in parts for file in part.glob("*.py"))]
    assert len(above) > 30
    for file in above:
        if str(file.relative_to(ROOT)) in _MAY_NAME:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
            for name in modules + names:
                family = any(part in name.lower() for part in ("llamagen", "minilm", "multi_scale")) or name.startswith("VAR")
                assert not family, f"{file.name} names {name}"
