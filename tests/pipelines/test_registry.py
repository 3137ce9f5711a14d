"""Models of any family by name, and what a pipeline says of itself; nobody above names a family."""

from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline, tiny_transformer, tiny_vq

from vargen import LlamaGenPipeline, open_pipeline
from vargen.decoding import PRESETS, list_methods, resolve_method


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
