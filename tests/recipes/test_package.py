"""Two runs join to a folder that opens; a failure leaves what was there."""

import json

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import tiny_transformer, tiny_vq

import vargen.assets
from recipes.package import package_emoji
from vargen import LlamaGenPipeline
from vargen.training.token_cache import BackgroundTokenizer, hash_encoder

ENCODER = vargen.assets.packaged_model_path("emoji")


@pytest.fixture
def runs(tmp_path):
    tokenizer, generator = tmp_path / "tokenizer", tmp_path / "generator"
    tiny_vq().save_pretrained(tokenizer / "vqvae")
    tiny_transformer("text", cls_token_num=32, caption_dim=384).save_pretrained(generator / "transformer")
    tokenizer.joinpath("log.jsonl").write_text(
        json.dumps({"step": 30, "seconds": 7200.0, "psnr": 25.5, "codebook_use": 0.5, "perplexity": 9.0}) + "\n"
    )
    reported = {"final_held_out_loss": 4.25, "final_entropy": 3.5, "top1_seen": 0.25, "top5_seen": 0.5}
    generator.joinpath("log.jsonl").write_text(json.dumps({"step": 40, "seconds": 60.0, **reported}) + "\n")
    return tokenizer, generator


def test_the_folder_opens_and_generates(runs, tmp_path):
    folder = package_emoji(*runs, ENCODER, tmp_path / "model", note="On a slow machine.")
    pipe = LlamaGenPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.default_sampling == {"guidance_scale": 1.25, "temperature": 1.0, "top_k": None, "top_p": 0.6}
    assert pipe.normalize_prompt("😺").text == "grinning cat", "the table goes along with the text encoder"
    assert len(pipe("a red apple").images) == 1  # the usual top_k of 500 would be refused: these are 64 tokens
    card = (folder / "README.md").read_text()
    figures = ("25.50 dB", "50.0%", "2.00", "4.250", "3.500", "below its goal of 26 dB", "On a slow machine.",
               "50% (25% first) of training")  # fmt: skip
    for figure in figures:
        assert figure in card
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()], "no folder of this machine"
    assert pipe.vqvae.config.blank_code == BackgroundTokenizer(tiny_vq()).code, "of the weights before they are rounded"
    trained, packaged = tiny_vq().state_dict(), pipe.vqvae.state_dict()
    for name, value in trained.items():
        step = 0 if name == "quantize.embedding.weight" else float(value.abs().max()) / 61  # half a step of int6
        assert (packaged[name] - value).abs().max() <= step, name


def test_recall_at_the_packaged_settings_goes_to_the_card(runs, tmp_path):
    reported = tmp_path / "recall.json"
    shares = {f"top{count}_{group}": 0.07 * count for count in (1, 5) for group in ("seen", "styles", "concepts")}
    reported.write_text(json.dumps({"model": "emoji", **shares}))
    folder = package_emoji(*runs, ENCODER, tmp_path / "model", recall=reported)
    assert "35% (7% first) of training captions, 35% (7% first) of held-out styles" in (folder / "README.md").read_text()
    assert json.loads((folder / "training.json").read_text())["generator"]["top5_seen"] == pytest.approx(0.35)


@pytest.mark.parametrize("text", ["{}", "[1]", '{"top1_seen": 61}'])
def test_other_figures_in_place_of_recall_leave_what_was_there(runs, tmp_path, text):
    reported = tmp_path / "recall.json"
    reported.write_text(text)
    rejects(lambda: package_emoji(*runs, ENCODER, tmp_path / "model", recall=reported), "recall")
    assert not (tmp_path / "model").exists()


def test_a_drafter_goes_along(runs, tmp_path):
    drafter = tmp_path / "drafter"
    tiny_transformer("text", cls_token_num=32, caption_dim=384).save_pretrained(drafter / "transformer")
    drafter.joinpath("log.jsonl").write_text(
        json.dumps({"step": 70, "seconds": 60.0, "final_held_out_loss": 5.125, "final_entropy": 4.5}) + "\n"
    )
    folder = package_emoji(*runs, ENCODER, tmp_path / "model", drafter_run=drafter)
    pipe = LlamaGenPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    result = pipe("a red apple", top_k=8, accelerator="speculative", output_type="latent")
    assert result.stats.passes_by_width == {5: result.stats.passes - 1}
    assert "`draft_transformer`" in (folder / "README.md").read_text() and "5.125" in (folder / "README.md").read_text()
    with pytest.raises(FileNotFoundError, match="finish the training run first"):
        package_emoji(*runs, ENCODER, tmp_path / "other", drafter_run=tmp_path / "nothing")


def test_a_packaged_model_lends_its_tokenizer_and_what_is_known_of_it(runs, tmp_path):
    first = package_emoji(*runs, ENCODER, tmp_path / "model")
    again = package_emoji(first, runs[1], first, tmp_path / "again", defaults={"guidance_scale": 2.0})
    assert "25.50 dB" in (again / "README.md").read_text() and "guidance_scale 2.0" in (again / "README.md").read_text()
    assert (again / "vqvae/diffusion_pytorch_model.safetensors").read_bytes() == (
        first / "vqvae/diffusion_pytorch_model.safetensors"
    ).read_bytes()


def test_an_unfinished_run_leaves_the_old_folder(runs, tmp_path):
    package_emoji(*runs, ENCODER, tmp_path / "model")
    before = sorted(p.relative_to(tmp_path) for p in (tmp_path / "model").rglob("*"))
    with pytest.raises(FileNotFoundError, match="finish the training run first"):
        package_emoji(runs[0], tmp_path / "nothing", ENCODER, tmp_path / "model")
    assert sorted(p.relative_to(tmp_path) for p in (tmp_path / "model").rglob("*")) == before
    assert not list(tmp_path.glob(".*"))


def test_runs_of_different_tokens_are_not_joined(runs, tmp_path):
    """Tokens kept by a run tell which encoder and codebook made them; a decoder trained further is no other tokenizer."""
    tokenizer, generator = runs
    vqvae = tiny_vq()
    with torch.no_grad():
        next(vqvae.decoder.parameters()).add_(1)
    np.save(generator / f"tokens-{hash_encoder(vqvae)}-0-8-3.npy", np.zeros(1, np.uint16))
    package_emoji(*runs, ENCODER, tmp_path / "model")
    with torch.no_grad():
        vqvae.quantize.embedding.weight.neg_()
    vqvae.save_pretrained(tokenizer / "vqvae")
    with pytest.raises(ValueError, match="was trained on the tokens of another tokenizer than"):
        package_emoji(*runs, ENCODER, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_that_is_no_model_is_never_replaced(runs, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not a model folder"):
        package_emoji(*runs, ENCODER, tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep"
