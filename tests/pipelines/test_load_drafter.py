"""Trained drafters in a pipeline: loaded, saved along, opened again, refused where they do not belong."""

import json
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, class_var_pipeline

from vargen import LlamaGenPipeline
from vargen.decoding import Accelerator, Eagle, Medusa, shared_noise
from vargen.models.heads.eagle import EagleDrafter
from vargen.models.heads.medusa import MedusaDrafter
from vargen.pipelines import loading as drafter_files

SIZES = {"dim": 32, "vocab_size": 64, "grid_size": 4}
DRAFTERS = {"eagle": (EagleDrafter, {"n_head": 2, "multiple_of": 32}), "medusa": (MedusaDrafter, {})}


def saved(folder: Path, kind: str = "eagle", **changes) -> Path:
    network, options = DRAFTERS[kind]
    torch.manual_seed(1)
    network(**{**SIZES, **options, **changes}).save_pretrained(folder)
    return folder


def generated(pipe: LlamaGenPipeline, accelerator):
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    pipe.set_progress_bar_config(disable=True)
    options = {"accelerator": accelerator, "generator": generators, "output_type": "latent", "guidance_scale": 2.0}
    return pipe(class_labels=[3, 4], **options)


@pytest.mark.parametrize(("kind", "drafter"), [("eagle", Eagle(3, "shared-noise")), ("medusa", Medusa(3, "shared-noise"))])
def test_a_loaded_drafter_drafts_and_is_saved_along(kind: str, drafter, tmp_path: Path) -> None:
    pipe, method = class_pipeline(), Accelerator("same", drafter, shared_noise)
    with pytest.raises(ValueError, match=rf"\({kind}\), and this pipeline has none"):
        generated(pipe, method)
    assert pipe.load_drafter(saved(tmp_path / "trained", kind)) == kind
    found = generated(pipe, method)
    assert torch.equal(found.images, generated(pipe, "ar").images) and found.stats.passes < 16

    pipe.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "model_index.json").read_text())[kind][1] == DRAFTERS[kind][0].__name__
    again = LlamaGenPipeline.from_pretrained(tmp_path / "model")
    expected = getattr(pipe, kind).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in getattr(again, kind).state_dict().items())
    assert torch.equal(generated(again, method).images, found.images)


@pytest.mark.parametrize("changes", [{"dim": 48}, {"vocab_size": 96}, {"grid_size": 8}])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_of_other_sizes_is_refused_before_its_weights_are_read(kind, changes, tmp_path, monkeypatch) -> None:
    folder = saved(tmp_path, kind, **changes)
    monkeypatch.setattr(DRAFTERS[kind][0], "from_pretrained", None)
    (name, value), pipe = next(iter(changes.items())), class_pipeline()
    with pytest.raises(ValueError, match=f"{kind} and transformer do not belong together: {name} of {kind} is {value}"):
        pipe.load_drafter(folder)
    assert getattr(pipe, kind) is None
    with pytest.raises(ValueError, match="do not belong together"):
        network, options = DRAFTERS[kind]
        LlamaGenPipeline(vqvae=pipe.vqvae, transformer=pipe.transformer, **{kind: network(**{**SIZES, **options, **changes})})


def test_what_is_no_drafter_is_refused(tmp_path: Path) -> None:
    pipe = class_pipeline()
    rejects(lambda: pipe.load_drafter(tmp_path / "nowhere"), "drafter")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        pipe.load_drafter(tmp_path / "empty")
    pipe.vqvae.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="a 'VQModel'; drafters of a LlamaGenPipeline are EagleDrafter, Medusa"):
        pipe.load_drafter(tmp_path / "other")
    folder = saved(tmp_path / "cut")
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    rejects(lambda: pipe.load_drafter(folder), "damaged")
    (saved(tmp_path / "code") / "model.py").write_text("print('hello')")
    rejects(lambda: pipe.load_drafter(tmp_path / "code"), "code")
    (tmp_path / "trained").mkdir()
    rejects(lambda: class_var_pipeline().load_drafter(saved(tmp_path / "trained")), "drafters")


def test_a_packaged_drafter_is_found_by_its_name(tmp_path: Path, monkeypatch) -> None:
    saved(tmp_path / "tiny" / "eagle")
    monkeypatch.setattr(drafter_files.vargen.assets, "__file__", str(tmp_path / "__init__.py"))
    pipe = class_pipeline()
    assert pipe.load_drafter("tiny/eagle") == "eagle" and pipe.eagle is not None
    with pytest.raises(ValueError, match=r"a packaged one \(tiny/eagle\), got 'tiny/medusa'"):
        pipe.load_drafter("tiny/medusa")


def test_methods_say_why_a_trained_drafter_is_missing(tmp_path: Path) -> None:
    pipe = class_pipeline()
    reasons = {method.name: method.unsupported_reason for method in pipe.list_methods()}
    for kind, names in {"eagle": ("eagle", "eagle-gumbel", "eagle-2"), "medusa": ("medusa",)}.items():
        assert all(f"train drafter {kind}" in reasons[name] for name in names)
        pipe.load_drafter(saved(tmp_path / kind, kind))
        assert all(method.unsupported_reason is None for method in pipe.list_methods() if method.name in names)
