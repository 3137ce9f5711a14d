"""A low-resolution transformer in a pipeline: loaded, saved along, opened again, refused where it does not belong."""

import json
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline, tiny_transformer

from vargen import LlamaGenPipeline
from vargen.adapters import drafters as llamagen_low_res
from vargen.decoding import Accelerator, Jacobi, PooledRule, speculative_sampling
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import LlamaGenTransformer

EXACT = Accelerator(drafter=Jacobi(8, "maximal", "low-res"), acceptance=speculative_sampling)
MULO = Accelerator(drafter=Jacobi(8, "from-verdict", "low-res"), acceptance=PooledRule(4, 0.2, 1))


def saved(folder: Path, small: dict | None = None, up: dict | None = None) -> tuple[Path, Path]:
    """As trainings leave them."""
    small = {"grid_size": 2, "dim": 16, "n_layer": 1} | (small or {})
    tiny_transformer("class", **small).save_pretrained(folder / "low" / "transformer")
    torch.manual_seed(3)
    upsampler = TokenUpsampler(**{"vocab_size": 64, "low_grid": 2, "grid_size": 4, "dim": 16, "blocks": 1} | (up or {}))
    upsampler.save_pretrained(folder / "up" / "upsampler")
    return folder / "low", folder / "up"


def generated(pipe: LlamaGenPipeline, accelerator, labels=(3, 4)):
    generators = [torch.Generator().manual_seed(seed) for seed in labels]
    pipe.set_progress_bar_config(disable=True)
    options = {"accelerator": accelerator, "generator": generators, "output_type": "latent", "guidance_scale": 2.0}
    return pipe(class_labels=list(labels), **options)


@pytest.mark.parametrize("method", [EXACT, MULO], ids=["exact", "mulo"])
@pytest.mark.parametrize("trained", [True, False], ids=["up-sampler", "resized"])
def test_a_low_resolution_drafts_and_is_saved_along(method, trained, tmp_path: Path) -> None:
    pipe = class_pipeline()
    with pytest.raises(ValueError, match="need a model for it beside this one"):
        generated(pipe, method)
    low, up = saved(tmp_path)
    pipe.load_low_res(low, up if trained else None)
    found = generated(pipe, method)
    assert found.stats.passes < 16
    alone = torch.cat([generated(pipe, method, (label,)).images for label in (3, 4)])
    assert torch.equal(alone, found.images)

    pipe.save_pretrained(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["low_res"][1] == "LlamaGenTransformer" and (index["upsampler"][1] == "TokenUpsampler") == trained
    again = LlamaGenPipeline.from_pretrained(tmp_path / "model")
    assert torch.equal(generated(again, method).images, found.images)


def test_captions_condition_both() -> None:
    pipe = text_pipeline()
    pipe.register_modules(low_res=tiny_transformer("text", grid_size=2, n_layer=1))
    pipe.set_progress_bar_config(disable=True)
    options = {"accelerator": MULO, "output_type": "latent", "guidance_scale": 2.0}
    pixels = [pipe(p, generator=torch.Generator().manual_seed(0), **options).images for p in ("a cat", "a house")]
    assert not torch.equal(*pixels)


def test_small_images_have_noise_of_their_own(monkeypatch) -> None:
    """Were the same noise to draw both, drafts would know what the target is about to draw."""
    pipe, seeds = class_pipeline(), []
    pipe.register_modules(low_res=tiny_transformer("class", grid_size=2, n_layer=1))
    decode = llamagen_low_res.decode
    monkeypatch.setattr(llamagen_low_res, "decode", lambda *given: seeds.append(given[2]) or decode(*given))
    generated(pipe, EXACT)
    (used,) = seeds
    assert len(used) == 2 and used[0] != used[1] and not {3, 4} & set(used.tolist())


@pytest.mark.parametrize(("small", "up", "message"), [
    ({"grid_size": 4}, {}, "grid_size 4 must divide 4"),
    ({"grid_size": 3}, {}, "grid_size 3 must divide"),
    ({"vocab_size": 32}, {}, "vocab_size"),
    ({"num_classes": 5}, {}, "num_classes"),
    ({}, {"vocab_size": 32}, "vocab_size"),
    ({}, {"low_grid": 1}, "low_grid"),
    ({}, {"grid_size": 8}, "grid_size"),
])  # fmt: skip
def test_networks_that_do_not_belong_are_refused_before_weights_are_read(small, up, message, tmp_path, monkeypatch) -> None:
    low, above = saved(tmp_path, small, up)
    monkeypatch.setattr(LlamaGenTransformer, "from_pretrained", None)
    pipe = class_pipeline()
    rejects(lambda: pipe.load_low_res(low, above), message)
    assert pipe.low_res is None and pipe.upsampler is None


def test_a_model_of_another_codebook_is_refused(tmp_path, monkeypatch) -> None:
    """Its tokens are as many, and mean other things."""
    pipe, own = class_pipeline(), {"codes": class_pipeline().vqvae.quantize.digest()}
    low, up = saved(tmp_path, up=own)
    pipe.load_low_res(low, up)
    other = class_pipeline()
    torch.nn.init.normal_(other.vqvae.quantize.embedding.weight)
    monkeypatch.setattr(LlamaGenTransformer, "from_pretrained", None)
    with pytest.raises(ValueError, match="belongs to another codebook"):
        other.load_low_res(low, up)
    halves = class_pipeline().vqvae.half().quantize.digest()
    assert halves == own["codes"] and class_pipeline().vqvae.bfloat16().quantize.digest() is None


def test_folders_without_networks_and_with_code_are_refused(tmp_path) -> None:
    low, up = saved(tmp_path)
    for folders in ((tmp_path / "none",), (low, tmp_path / "none")):
        with pytest.raises(ValueError, match="drafter"):
            class_pipeline().load_low_res(*folders)
    (up / "upsampler" / "more.py").write_text("")
    rejects(lambda: class_pipeline().load_low_res(low, up), "more.py")


def test_an_upsampler_alone_is_refused() -> None:
    pipe = class_pipeline()
    with pytest.raises(ValueError, match="upsampler needs the low_res transformer"):
        LlamaGenPipeline(vqvae=pipe.vqvae, transformer=pipe.transformer, upsampler=TokenUpsampler(64, 2, 4, 16))
