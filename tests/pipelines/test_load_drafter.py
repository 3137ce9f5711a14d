"""Networks that draft for a pipeline: loaded, saved along, opened again, refused where they do not belong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from table_methods import SharedMedusa
from tiny_models import class_pipeline, class_var_pipeline, tiny_transformer

from vargen import LlamaGenPipeline
from vargen.decoding import Accelerator, DynamicTree, Jacobi, PooledRule, shared_noise, speculative_sampling
from vargen.decoding.experimental import EagleSharedNoise
from vargen.models.heads import decoding as low_res_drafters
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.pipelines import loading

HEAD = {"dim": 32, "vocab_size": 64, "grid_size": 4}
LOW = {"grid_size": 2, "dim": 16, "n_layer": 1}
UP = {"vocab_size": 64, "low_grid": 2, "grid_size": 4, "dim": 16, "blocks": 1}
# The class, its sizes, and where its training leaves it.
NETWORKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "eagle": (EagleDrafter, {**HEAD, "n_head": 2, "multiple_of": 32}, ""),
    "medusa": (MedusaDrafter, HEAD, "drafter"),
    "low_res": (lambda **sizes: tiny_transformer("class", **sizes), LOW, "transformer"),
    "upsampler": (TokenUpsampler, UP, "upsampler"),
}
EXACT = Accelerator(drafter=Jacobi(8, "maximal", "low-res"), acceptance=speculative_sampling)
MULO = Accelerator(drafter=Jacobi(8, "from-verdict", "low-res"), acceptance=PooledRule(4, 0.2, 1))
METHODS = [
    (("eagle",), Accelerator("same", EagleSharedNoise(DynamicTree(3, 3, 1)), shared_noise)),
    (("medusa",), Accelerator("same", SharedMedusa(DynamicTree(3, 3, 1)), shared_noise)),
    *((kinds, method) for kinds in (("low_res", "upsampler"), ("low_res",)) for method in (EXACT, MULO)),
]


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    build, sizes, place = NETWORKS[kind]
    torch.manual_seed(3)
    build(**{**sizes, **changes}).save_pretrained(folder / kind / place)
    return folder / kind


def generated(pipe: LlamaGenPipeline, accelerator: Any, labels: tuple[int, ...] = (3, 4)) -> Any:
    generators = [torch.Generator().manual_seed(seed) for seed in labels]
    options = {"accelerator": accelerator, "generator": generators, "output_type": "latent", "guidance_scale": 2.0}
    return pipe(class_labels=list(labels), **options)


@pytest.mark.parametrize(("kinds", "method"), METHODS, ids=range(len(METHODS)))
def test_loaded_networks_draft_and_are_saved_along(kinds: tuple[str, ...], method: Any, tmp_path: Path) -> None:
    pipe = class_pipeline()
    with pytest.raises(ValueError, match=r"this pipeline has none|need a model for it beside this one"):
        generated(pipe, method)
    assert pipe.load_drafter(*(saved(tmp_path, kind) for kind in kinds)) == kinds[0]
    found = generated(pipe, method)
    assert found.stats.passes < 16
    assert torch.equal(found.images, torch.cat([generated(pipe, method, (label,)).images for label in (3, 4)]))
    assert method.name != "same" or torch.equal(found.images, generated(pipe, "ar").images)
    pipe.save_pretrained(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert {kind for kind in NETWORKS if index[kind][1]} == set(kinds)
    again = LlamaGenPipeline.from_pretrained(tmp_path / "model")
    assert torch.equal(generated(again, method).images, found.images)


MISFITS = [
    *((kind, {size: value}, f"{size} of {kind} is {value}") for kind in ("eagle", "medusa")
      for size, value in (("dim", 48), ("vocab_size", 96), ("grid_size", 8))),
    ("low_res", {"grid_size": 4}, "grid_size 4 must divide 4"), ("low_res", {"grid_size": 3}, "grid_size 3 must divide"),
    ("low_res", {"vocab_size": 32}, "vocab_size"), ("low_res", {"num_classes": 5}, "num_classes"),
    ("upsampler", {"vocab_size": 32}, "vocab_size"), ("upsampler", {"low_grid": 1}, "low_grid"),
    ("upsampler", {"grid_size": 8}, "grid_size"), ("upsampler", {}, "upsampler needs the low_res transformer"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), MISFITS)
def test_networks_that_do_not_belong_are_refused_before_weights_are_read(
    kind: str, changes: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [saved(tmp_path, kind, **changes)]
    if kind == "upsampler" and changes:
        folders.insert(0, saved(tmp_path, "low_res"))
    for network in (EagleDrafter, MedusaDrafter, LlamaGenTransformer, TokenUpsampler):
        monkeypatch.setattr(network, "from_pretrained", None)
    pipe = class_pipeline()
    rejects(lambda: pipe.load_drafter(*folders), message)
    assert getattr(pipe, kind) is None and pipe.low_res is None
    build, sizes, _ = NETWORKS[kind]
    if len(folders) == 1:
        parts: dict[str, Any] = {**class_pipeline().components, kind: build(**{**sizes, **changes})}
        rejects(lambda: LlamaGenPipeline(**parts), message)


def test_a_model_of_another_codebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are as many, and mean other things."""
    pipe, own = class_pipeline(), class_pipeline().vqvae.quantize.digest()
    folders = saved(tmp_path, "low_res"), saved(tmp_path, "upsampler", codes=own)
    pipe.load_drafter(*folders)
    other = class_pipeline()
    torch.nn.init.normal_(other.vqvae.quantize.embedding.weight)
    monkeypatch.setattr(LlamaGenTransformer, "from_pretrained", None)
    with pytest.raises(ValueError, match="belongs to another codebook"):
        other.load_drafter(*folders)
    assert class_pipeline().vqvae.half().quantize.digest() == own
    assert class_pipeline().vqvae.bfloat16().quantize.digest() is None


def test_small_images_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise for both, drafts would know what the target is about to sample."""
    pipe, seeds = class_pipeline(), []
    pipe.register_modules(low_res=tiny_transformer("class", grid_size=2, n_layer=1))
    generate = low_res_drafters.generate_images
    monkeypatch.setattr(low_res_drafters, "generate_images", lambda *given: seeds.append(given[2]) or generate(*given))
    generated(pipe, EXACT)
    (used,) = seeds
    assert len(used) == 2 and used[0] != used[1] and not {3, 4} & set(used.tolist())


def test_what_is_no_drafter_is_refused(tmp_path: Path) -> None:
    pipe = class_pipeline()
    rejects(lambda: pipe.load_drafter(tmp_path / "nowhere"), "drafter")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        pipe.load_drafter(tmp_path / "empty")
    pipe.vqvae.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="a 'VQModel'; drafters of a LlamaGenPipeline are EagleDrafter, Medusa"):
        pipe.load_drafter(tmp_path / "other")
    folder = saved(tmp_path, "eagle")
    rejects(lambda: class_var_pipeline().load_drafter(folder), "drafters")
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    rejects(lambda: pipe.load_drafter(folder), "damaged")
    rejects(lambda: pipe.load_drafter(saved(tmp_path, "low_res"), folder), "damaged")
    assert pipe.eagle is None and pipe.low_res is None, "all are loaded or none"


def test_a_packaged_drafter_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "tiny", "eagle")
    monkeypatch.setattr(loading.vargen.assets, "__file__", str(tmp_path / "__init__.py"))
    pipe = class_pipeline()
    assert pipe.load_drafter("tiny/eagle") == "eagle" and pipe.eagle is not None
    with pytest.raises(ValueError, match=r"a packaged one \(tiny/eagle\), got 'tiny/medusa'"):
        pipe.load_drafter("tiny/medusa")
