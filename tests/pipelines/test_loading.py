"""A folder is checked before a weight of it is loaded, and nothing in it is ever run."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import class_pipeline

from vargen import LlamaGenPipeline
from vargen.pipelines import loading
from vargen.pipelines.loading import DiffusionPipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    class_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch) -> Path:
    """A fresh copy, with a tripwire on loading weights."""
    shutil.copytree(saved, tmp_path / "model")
    loaded = DiffusionPipeline.from_pretrained.__func__

    def tripwire(cls, *args, **kwargs):
        raise AssertionError("weights were about to be loaded")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", classmethod(tripwire))
    monkeypatch.setattr(DiffusionPipeline, "_untripped", loaded, raising=False)
    return tmp_path / "model"


def refused(name, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaGenPipeline.from_pretrained(name)


def test_the_tripwire_is_reached_by_a_good_folder(folder):
    with pytest.raises(AssertionError, match="about to be loaded"):
        LlamaGenPipeline.from_pretrained(folder)


@pytest.mark.parametrize("name", ["emojy", "./nowhere", "/nowhere/at/all", ""])
def test_unknown_names(folder, name):
    refused(name or str(folder / "transformer"), "unknown model|no model_index.json")


def test_a_near_miss_names_the_packaged_model(monkeypatch):
    monkeypatch.setattr(loading, "packaged_models", lambda: ["emoji"])
    refused("emojy", "did you mean 'emoji'")


def test_a_hub_id_without_network_says_so(monkeypatch):
    refused("some-owner/some-model", "no local folder 'some-owner/some-model' exists, and fetching")


def test_a_hub_id_goes_through_the_hub(saved, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(name=name, **options)
        return str(saved)

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    pipe = LlamaGenPipeline.from_pretrained("owner/name", revision="v2", local_files_only=True)
    assert isinstance(pipe, LlamaGenPipeline)
    assert asked == {"name": "owner/name", "use_safetensors": True, "revision": "v2", "local_files_only": True}


def test_index_is_not_json(folder):
    (folder / "model_index.json").write_text("{")
    refused(folder, "is not valid JSON")


def test_index_of_another_pipeline(folder):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    refused(folder, "describes a 'StableDiffusionPipeline', this class opens 'LlamaGenPipeline'")


def test_index_that_names_foreign_code(folder, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "vqvae": ["stranger", "VQModel"]}))
    refused(folder, "takes 'vqvae' from 'stranger'")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["transformer", "vqvae"])
def test_missing_weights(folder, part):
    (folder / part / WEIGHTS).unlink()
    refused(folder, rf"{part}.*{WEIGHTS} is missing")


def test_a_pickle_in_place_of_weights_is_not_opened(folder, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (folder / "transformer" / WEIGHTS).unlink()
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    refused(folder, "diffusion_pytorch_model.bin may run code when opened and is not read")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_damaged_weights(folder, damage):
    file = folder / "transformer" / WEIGHTS
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "garbage": b"\xff" * 200, "empty": b""}[damage])
    refused(folder, "damaged or not a safetensors file")


def test_weights_of_another_shape_name_the_tensor(folder):
    file = folder / "transformer" / WEIGHTS
    tensors = load_file(file)
    tensors["tok_embeddings.weight"] = torch.zeros(70, 32)
    del tensors["norm.weight"]
    tensors["stranger"] = torch.zeros(1)
    save_file(tensors, file)
    refused(folder, r"missing: 1 \(norm.weight\).*unexpected: 1 \(stranger\).*tok_embeddings.weight is \[70, 32\]")


def test_missing_and_broken_config(folder):
    config = folder / "transformer" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "n_head": 3}))
    refused(folder, "does not describe a LlamaGenTransformer")
    config.unlink()
    refused(folder, "config.json is missing")


def test_default_dtypes(saved, monkeypatch):
    monkeypatch.setattr(loading, "cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pipe = LlamaGenPipeline.from_pretrained(saved)
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vqvae.dtype == torch.float32
    monkeypatch.setattr(loading, "cpu_multiplies_bfloat16", lambda: False)
    assert LlamaGenPipeline.from_pretrained(saved).transformer.dtype == torch.float32
    assert LlamaGenPipeline.from_pretrained(saved, torch_dtype=torch.bfloat16).transformer.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="torch_dtype must be a floating-point"):
        LlamaGenPipeline.from_pretrained(saved, torch_dtype=torch.int8)
