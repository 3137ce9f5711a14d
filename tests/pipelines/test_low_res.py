"""A low-resolution transformer in a pipeline: loaded, saved along, opened again, refused where it does not belong."""

import json
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline, tiny_transformer

from vargen import LlamaGenPipeline
from vargen.adapters import drafters as llamagen_low_res
from vargen.decoding import Accelerator, Jacobi, Noise, PooledRule, Sampling, Tree, speculative_sampling
from vargen.decoding.noise import Purpose
from vargen.models.condition import Condition
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import LlamaGenTransformer

EXACT = Accelerator(drafter=Jacobi(8, "maximal", "low-res"), acceptance=speculative_sampling)
MULO = Accelerator(drafter=Jacobi(8, "from-verdict", "low-res"), acceptance=PooledRule(4, 0.2, 1))
REFRESHED = Accelerator(drafter=Jacobi(8, "maximal", "low-res-refreshed"), acceptance=speculative_sampling)


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


@pytest.mark.parametrize("method", [EXACT, MULO, REFRESHED], ids=["exact", "mulo", "refreshed"])
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


# -- what a refresh shows ---------------------------------------------------------------------------------------------


def refreshing(folder: Path, batch: int = 2):
    """A low-resolution model of 4 x 4 for a grid of 8 x 8, and its state of so many images."""
    pipe = class_pipeline(grid_size=8)
    low, up = saved(folder, {"grid_size": 4}, {"low_grid": 4, "grid_size": 8})
    pipe.load_low_res(low, up)
    model = pipe.decoding_model(2.0).low_res
    condition = Condition(class_labels=torch.arange(3, 3 + batch))
    with torch.inference_mode():
        return model, model.start(condition, torch.arange(batch) + 7, Sampling())


@torch.inference_mode()
def test_a_refresh_depends_on_committed_tokens_alone(tmp_path) -> None:
    model, state = refreshing(tmp_path)
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0))
    committed = torch.tensor([19, 35])  # one row of the low resolution, and two
    found = model.refresh(state, tokens, committed)
    later = torch.where(torch.arange(64) < committed[:, None], tokens, (tokens + 1) % 64)
    assert torch.equal(model.refresh(state, later, committed).upsampled, found.upsampled)
    codes = model.codes[tokens].view(2, 4, 2, 4, 2, -1).mean((2, 4)) @ model.codes.T
    shown = codes.argmax(-1).flatten(1)
    assert torch.equal(found.low[0, :4], shown[0, :4]) and torch.equal(found.low[1, :8], shown[1, :8])
    other = tokens.clone()
    other[:, :16] = (other[:, :16] + 9) % 64
    assert not torch.equal(model.refresh(state, other, committed).upsampled, found.upsampled)
    assert torch.equal(state.shown, torch.zeros(2))  # the first state can still be gone on from


@torch.inference_mode()
def test_less_than_a_row_shows_nothing(tmp_path) -> None:
    model, state = refreshing(tmp_path)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    assert model.refresh(state, tokens, torch.tensor([15, 1])) is state
    once = model.refresh(state, tokens, torch.tensor([16, 1]))
    assert torch.equal(once.low[1], state.low[1]) and not torch.equal(once.low[0], state.low[0])
    assert model.refresh(once, tokens, torch.tensor([31, 15])) is once
    assert model.refresh(once, tokens, torch.tensor([64, 15])) is once  # nothing is left to draft


@torch.inference_mode()
def test_an_image_as_it_was_generated_stays(tmp_path) -> None:
    """The noise of the rows behind is that which drew them first."""
    model, state = refreshing(tmp_path)
    shown = state.low.view(2, 4, 1, 4, 1).expand(2, 4, 2, 4, 2).reshape(2, 64)
    after = state
    for committed in (16, 40, 48):
        after = model.refresh(after, shown, torch.tensor([committed, 16]))
        assert torch.equal(after.low, state.low)


@torch.inference_mode()
def test_what_follows_is_what_the_model_generates_after_what_was_committed(tmp_path) -> None:
    """Also the second time, and of images at other rows; a whole prefix fed at once says so."""
    model, state = refreshing(tmp_path)
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1))
    for committed in (torch.tensor([16, 16]), torch.tensor([32, 18]), torch.tensor([48, 48])):
        state = model.refresh(state, tokens, committed)
        for image, rows in enumerate((committed // 16).tolist()):
            condition = Condition(class_labels=torch.tensor([3 + image]))
            cache, _ = model.model.prefill(condition, 16)
            out = model.model.forward(state.low[image : image + 1, : 4 * rows], cache, Tree.make_chain(4 * rows - 1))
            noise = Noise(state.seeds[image : image + 1], torch.tensor([[4 * rows]]))
            assert state.low[image, 4 * rows] == noise.sample(out.logits[:, -1:].softmax(-1), Purpose.TOKEN)


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
