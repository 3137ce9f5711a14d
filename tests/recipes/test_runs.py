"""Trainers at tiny size: they learn, and a run killed at any moment ends with the weights of an unbroken one."""

import dataclasses
import os
import pathlib
import pickle
import signal
import sys

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import tiny_encoder, tiny_vq
from tiny_training import Killed, check_resumes, data, generator_recipe

from recipes.emoji import tokenizer
from recipes.emoji.codebook import Codebook, flat_color_codes, quantize_flat_patches_together
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.tokenizer import TokenizerConfig
from vargen import compat
from vargen.files import atomic_file
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.training import augment, run, variants
from vargen.training import next_token as generator
from vargen.training import next_token_losses as generator_losses
from vargen.training import token_cache as generator_data
from vargen.training.config import Schedule
from vargen.training.dataset import to_pixels
from vargen.training.run import TrainingRun
from vargen.training.token_cache import BackgroundTokenizer

CPU = torch.device("cpu")
ENCODER = tiny_encoder()


def tokenizer_recipe(**changes) -> TokenizerConfig:
    model = {
        "codebook_size": 32, "ch": 32, "encoder_ch_mult": [1, 1], "decoder_ch_mult": [1, 1],
        "num_res_blocks": 1, "z_channels": 32,
    }  # fmt: skip
    base = {
        "schedule": Schedule(steps=14, learning_rate=2e-3, warmup_steps=2), "batch_size": 4, "crop": 8,
        "autoencoder_steps": 4, "revive_every": 3, "evaluate_every": 7, "checkpoint_every": 5,
    }  # fmt: skip
    return TokenizerConfig(model=model, **{**base, **changes})


def train_tokenizer(folder, recipe=None):
    return tokenizer.train_tokenizer(recipe or tokenizer_recipe(), data(), folder, CPU)


def train_next_token(folder, recipe=None, init=None):
    vq = folder.parent / "vq"
    if not vq.exists():
        tiny_vq().save_pretrained(vq)
    return generator.train_next_token(recipe or generator_recipe(), data(), vq, ENCODER, folder, CPU, init)


TRAINERS = {
    "tokenizer": (train_tokenizer, VQModel, "vqvae"),
    "generator": (train_next_token, LlamaGenTransformer, "transformer"),
}
RECIPES = {"tokenizer": tokenizer_recipe, "generator": generator_recipe}


@pytest.mark.parametrize("kind", TRAINERS)
def test_training_in_bfloat16(tmp_path, monkeypatch, kind):
    """As on CUDA, and on CPUs that multiply it: losses are finite and near those of float32."""
    train, network, part = TRAINERS[kind]
    monkeypatch.setattr(run, "preferred_dtype", lambda device: torch.float32)  # also where this CPU multiplies bfloat16
    expected = train(tmp_path / "float32")
    monkeypatch.setattr(run, "preferred_dtype", lambda device: torch.bfloat16)
    figures = train(tmp_path / "bfloat16")
    measure = {"tokenizer": "psnr", "generator": "held_out_loss"}[kind]
    assert figures[measure] == pytest.approx(expected[measure], rel=0.05) and figures[measure] != expected[measure]
    weights = network.from_pretrained(tmp_path / "bfloat16" / part).state_dict()
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights.values())


def test_a_run_that_could_not_plot_its_curves_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)
    rejects(lambda: train_tokenizer(tmp_path / "run"), "run", ImportError)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "killed_at", "checkpoint_every"), [("tokenizer", 6, 4), ("generator", 11, 5)])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, kind, killed_at, checkpoint_every):
    """At step 4 a tokenizer's codebook is fitted to latents of earlier steps, which the checkpoint has to contain."""
    trainer, _, part = TRAINERS[kind]
    check_resumes(lambda folder: trainer(folder, RECIPES[kind](checkpoint_every=checkpoint_every)), tmp_path, killed_at, part)


def test_training_lowers_the_losses(tmp_path):
    recipe = tokenizer_recipe(schedule=Schedule(steps=60, learning_rate=3e-3, warmup_steps=2), evaluate_every=30)
    train_tokenizer(tmp_path / "tokenizer", recipe)
    losses = [r["reconstruction"] for r in TrainingRun(tmp_path / "tokenizer", {}, 0).read_log() if "reconstruction" in r]
    assert losses[-1] < 0.7 * losses[0]
    recipe = generator_recipe(schedule=Schedule(steps=25, learning_rate=5e-3, warmup_steps=2), dropout=0.0)
    figures = train_next_token(tmp_path / "generator", recipe)
    assert figures["held_out_loss"] < 0.8 * np.log(64) and 0 <= figures["entropy"] < np.log(64)


def test_the_last_steps_train_the_decoder_alone(tmp_path):
    """Resumed with eight steps more, all of them the decoder's: codes and tokens stay, reconstructions get better."""
    schedule = Schedule(steps=12, learning_rate=3e-3, warmup_steps=2)
    before = train_tokenizer(tmp_path / "run", tokenizer_recipe(schedule=schedule))
    first = VQModel.from_pretrained(tmp_path / "run" / "vqvae")
    longer = dataclasses.replace(schedule, steps=20)
    after = train_tokenizer(tmp_path / "run", tokenizer_recipe(schedule=longer, decoder_steps=8))
    second = VQModel.from_pretrained(tmp_path / "run" / "vqvae")
    old, new = first.state_dict(), second.state_dict()
    changed = {name.split(".")[0] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"decoder", "post_quant_conv"}
    images = to_pixels(data().images, CPU)
    assert torch.equal(first.encode(images), second.encode(images))
    assert after["psnr"] > before["psnr"] and after["codebook_use"] == before["codebook_use"]


@pytest.mark.parametrize("steps", [-1, 10, 14])
def test_a_decoder_needs_codes_to_learn_from(tmp_path, steps):
    message = "decoder_steps must be at least 0" if steps < 0 else f"steps must be at least {5 + steps}, got 14"
    with pytest.raises(ValueError, match=message):
        train_tokenizer(tmp_path / "run", tokenizer_recipe(decoder_steps=steps))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("side", "codes", "message"),
    [(32, 64, "grid_size"), (8, 64, "grid_size"), (16, 32, "vocab_size")],
)  # fmt: skip
def test_images_tokenizer_and_model_must_fit(tmp_path, side, codes, message):
    torch.manual_seed(0)
    vq = {"ch": 32, "encoder_ch_mult": (1, 1), "decoder_ch_mult": (1, 1), "num_res_blocks": 1, "z_channels": 32}
    VQModel(codebook_size=codes, **vq).save_pretrained(tmp_path / "vqvae")
    with pytest.raises(ValueError, match=message):
        generator.train_next_token(generator_recipe(), data(size=side), tmp_path / "vqvae", ENCODER, tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


def test_another_recipe_does_not_resume_the_run(tmp_path):
    short = Schedule(steps=6, learning_rate=2e-3, warmup_steps=2)
    train_tokenizer(tmp_path / "run", tokenizer_recipe(schedule=short))
    rejects(lambda: train_tokenizer(tmp_path / "run", tokenizer_recipe(schedule=short, seed=1)), "settings")


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def _checkpointed(folder):
    run = TrainingRun(folder, {"kind": "x"}, 9)
    assert run.load_checkpoint() is None
    run.save_checkpoint(5, model={"weight": torch.zeros(300)})
    return folder / "checkpoint.pt"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b"", "is damaged, incomplete or not a torch checkpoint"),
        (lambda b: b[:300], "is damaged, incomplete or not a torch checkpoint"),
        (lambda b: b[: len(b) // 2], "is damaged, incomplete or not a torch checkpoint"),
        (lambda b: b[:-1], "is damaged, incomplete or not a torch checkpoint"),
        (lambda b: b"no checkpoint" * 99, "is damaged, incomplete or not a torch checkpoint"),
        (lambda b: pickle.dumps({"step": 5}), "is (not a checkpoint|damaged)"),
        (lambda b: pickle.dumps(pathlib.PurePosixPath("x")), "(holds more than tensors|is damaged)"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_said_what_to_do(tmp_path, damage, message):
    """In our words: torch's recommend to let the file run code."""
    state = _checkpointed(tmp_path / "run")
    state.write_bytes(damage(state.read_bytes()))
    with pytest.raises(ValueError, match=rf"checkpoint\.pt {message}.*; remove it") as caught:
        TrainingRun(tmp_path / "run", {"kind": "x"}, 9).load_checkpoint()
    assert "weights_only" not in str(caught.value) and "torch.load" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_run_code_is_refused_and_runs_none(tmp_path, zipped):
    state = _checkpointed(tmp_path / "run")
    torch.save({"step": 5, "model": Hostile(tmp_path / "ran")}, state, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"checkpoint\.pt holds more than tensors: \w+\.mkdir\. .*; remove it") as caught:
        TrainingRun(tmp_path / "run", {"kind": "x"}, 9).load_checkpoint()
    assert "weights_only" not in str(caught.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[1, 2], {}, {"step": 5}, {"step": "5", "seconds": 1.0, "fingerprint": {"kind": "x"}}])
def test_what_is_no_checkpoint_of_a_run_is_refused(tmp_path, content):
    state = _checkpointed(tmp_path / "run")
    torch.save(content, state)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        TrainingRun(tmp_path / "run", {"kind": "x"}, 9).load_checkpoint()


def test_a_run_cannot_be_resumed_to_less_than_it_has_done(tmp_path):
    state = _checkpointed(tmp_path / "run")
    before = state.read_bytes()
    rejects(TrainingRun(tmp_path / "run", {"kind": "x"}, 4).load_checkpoint, "steps")
    assert state.read_bytes() == before
    assert TrainingRun(tmp_path / "run", {"kind": "x"}, 5).load_checkpoint()["step"] == 5


def test_a_damaged_line_of_the_log_is_dropped(tmp_path):
    _checkpointed(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").write_bytes(b'{"step": 1}\n7\n[]\n{"loss": 3}\n{"step": "x"}\n\xff\n{"step": 9}\n{"st')
    run = TrainingRun(tmp_path / "run", {"kind": "x"}, 9)
    run.load_checkpoint()
    assert run.read_log() == [{"step": 1}]


@pytest.mark.parametrize("kept", [b"", b"no array" * 9999, np.zeros(9999, np.float32)])
def test_damaged_tokens_are_named(tmp_path, kept):
    store = generator_data.TokenStore(tmp_path, data().images, tiny_vq(), generator_recipe(), CPU)
    (path,) = tmp_path.glob("tokens-*.npy")
    whole = path.stat().st_size
    if isinstance(kept, bytes):
        path.write_bytes(kept * (1 + whole // max(len(kept), 1)) if kept else kept)
    else:
        np.save(path, np.resize(kept, whole))
    if isinstance(kept, bytes) and not kept:  # killed before it was made
        generator_data.TokenStore(tmp_path, data().images, tiny_vq(), generator_recipe(), CPU)([1], [0])
        return
    with pytest.raises(ValueError, match=r"tokens-.*\.npy is damaged") as caught:
        generator_data.TokenStore(tmp_path, data().images, tiny_vq(), generator_recipe(), CPU)
    assert "allow_pickle" not in str(caught.value) and store is not None


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_one_process_at_a_time_trains_in_a_folder(tmp_path):
    ready, held = os.pipe()
    if (other := os.fork()) == 0:
        try:
            holder = TrainingRun(tmp_path, {}, 1)
            holder.load_checkpoint()
            os.write(held, b"held")
            signal.pause()
        finally:
            os._exit(1)
    os.close(held)
    try:
        assert os.read(ready, 4) == b"held"
        with pytest.raises(ValueError, match="another process"):
            TrainingRun(tmp_path, {}, 1).load_checkpoint()
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(ready)
    first = TrainingRun(tmp_path, {}, 1)  # a killed process holds nothing
    assert first.load_checkpoint() is None
    assert TrainingRun(tmp_path, {}, 1).load_checkpoint() is None  # nor does this one shut itself out


def test_the_code_prior_folds_into_an_ordinary_model():
    torch.manual_seed(0)
    model = LlamaGenTransformer(condition="class", dim=32, n_layer=1, n_head=2, vocab_size=64, grid_size=4, multiple_of=32)
    prior = generator_losses.CodebookPrior(torch.nn.functional.normalize(torch.randn(64, 8), dim=-1), 32)
    torch.nn.init.normal_(prior.head)
    from vargen.models.condition import Condition

    tokens, condition = torch.randint(64, (2, 16)), Condition(class_labels=torch.tensor([1, 2]))
    summed = torch.func.functional_call(model, prior.weights(model), (tokens, condition)).logits
    folded = LlamaGenTransformer.from_config(model.config)
    folded.load_state_dict(prior.merge_into(model))
    assert torch.allclose(folded(tokens, condition).logits, summed, atol=1e-5)
    assert not torch.allclose(model(tokens, condition).logits, summed, atol=1e-2)


def test_noise_takes_tokens_of_other_images_at_the_same_places():
    tokens = 1000 + 3 * torch.arange(64 * 100).view(64, 100)  # all different, and no other number is in the batch
    torch.manual_seed(0)
    given = generator_losses.corrupt_tokens(tokens, 0.4)
    changed = given != tokens
    shares = changed.float().mean(1)
    assert shares.min() < 0.1 and 0.3 < shares.max() <= 0.55 and 0.15 < shares.mean() < 0.25
    assert torch.equal((given - 1000) // 3 % 100, torch.arange(100).expand(64, 100))
    assert torch.equal(generator_losses.corrupt_tokens(tokens, 0.0), tokens)
    assert torch.equal(generator_losses.corrupt_tokens(tokens[:1], 1.0, 1.0), tokens[:1])  # there is no other picture


def test_a_wrong_start_is_that_of_one_other_image_and_needs_a_caption():
    tokens = 100 * torch.arange(64)[:, None] + torch.arange(100)
    captioned = torch.arange(64) % 2 == 0
    torch.manual_seed(0)
    given = generator_losses.corrupt_tokens(tokens, 0.0, 1.0, captioned)
    assert torch.equal(given[~captioned], tokens[~captioned])
    changed = given != tokens
    assert (changed.int().diff(dim=1) <= 0).all()  # from the first token on, up to a place
    assert changed[captioned].sum(1).unique().numel() > 20
    for row, wrong in zip(given, changed, strict=True):
        assert (row[wrong] // 100).unique().numel() <= 1
    some = (generator_losses.corrupt_tokens(tokens, 0.0, 0.3) != tokens).any(1).float().mean()
    assert 0.15 < some < 0.45


def test_near_noise_takes_the_nearest_codes():
    torch.manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(300, 8), dim=-1)
    tokens = torch.randint(300, (64, 100))
    given = generator_losses.NeighborNoise(codes, 0.5, neighbors=3)(tokens)
    changed = given != tokens
    assert changed.float().mean(1).max() > 0.35 and 0.2 < changed.float().mean() < 0.3
    distances = torch.cdist(codes, codes)
    ranks = distances.argsort(-1).argsort(-1)  # 0 is a code itself
    assert set(ranks[tokens[changed], given[changed]].tolist()) == {1, 2, 3}
    assert torch.equal(generator_losses.NeighborNoise(codes, 0.0)(tokens), tokens)


def test_tokens_with_which_an_image_begins_weigh_more():
    row = torch.tensor([[7, 7, 1, 7] + [2] * 20])  # 7 is blank
    weights = generator_losses.first_token_weights(row, blank=7, weight=17.0)[0]
    assert weights[:3].tolist() == [17.0] * 3  # blank ones before it, and the first that shows something
    assert weights[11].item() == 9.0  # behind eight: half as much beyond one
    assert (weights.diff() <= 0).all() and weights[-1] > 1
    assert torch.equal(generator_losses.first_token_weights(row, 7, 1.0), torch.ones(row.shape))


def test_shifted_moves_and_fills_with_white():
    image = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3)
    moved = augment.shift_images(image, 1, -2)
    assert (moved[:, 0] == 255).all() and (moved[:, :, 2:] == 255).all()
    assert np.array_equal(moved[:, 1:, :2], image[:, :3, 2:])
    assert np.array_equal(augment.shift_images(image, 0, 0), image)


def test_codebook_revives_what_nothing_chooses():
    vq = tiny_vq()
    codebook = Codebook(vq, decay=0.5)
    z = torch.nn.functional.normalize(torch.randn(500, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    codebook.fit(z, torch.Generator().manual_seed(0))
    used = vq.quantize.find_nearest(z.T[None, :, :, None]).flatten().unique()
    assert len(used) == 64
    codebook.counts[:10] = 0
    assert codebook.replace_dead_codes(z, torch.Generator().manual_seed(1)) == 10
    assert torch.allclose(vq.quantize.embedding.weight.norm(dim=-1), torch.ones(64), atol=1e-5)


def test_crops_are_functions_of_seed_and_step():
    a, b = (tokenizer.CropBatches(data(), tokenizer_recipe()) for _ in range(2))
    assert np.array_equal(a(5), b(5)) and not np.array_equal(a(5), a(6))
    assert a(0).shape == (4, 8, 8, 3) and a(13).shape == (1, 16, 16, 3)  # whole pictures at the end


def test_orthogonalise_keeps_directions_and_levels_singular_values():
    from vargen.training.optimizers import orthogonalize

    matrices = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(0))
    for given in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalize(given))
        assert values.min() > 0.5 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert ((orthogonalize(matrices) * (u @ vh)).sum((1, 2)) / 20 > 0.8).all()


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(Killed), atomic_file(target) as temporary:
        temporary.write_text("half")
        raise Killed
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_plain_patches_are_reported_with_their_colours():
    """One number for a colour, within the tolerance; -1 for patches of several colours."""
    levels = np.full((1, 16, 16, 3), 255, dtype=np.uint8)
    levels[0, :8, 8:] = (200, 0, 0)
    levels[0, 8:, :8] = 253  # nearly white is white
    levels[0, 12, 12] = 0
    colors = flat_color_codes(to_pixels(levels, CPU), 8)[0]
    white, red = colors[0]
    assert colors[1, 0] == white and red not in (white, -1) and colors[1, 1] == -1


def test_plain_patches_of_a_colour_share_the_code_nearest_to_their_mean():
    model = tiny_vq()
    z = torch.nn.functional.normalize(torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    colors = torch.tensor([-1, 7, 7, 9]).expand(2, 4, 4)
    own, together = model.quantize.find_nearest(z), quantize_flat_patches_together(model, z, colors)
    assert torch.equal(own[..., 0], together[..., 0])  # not plain: as ever
    for column in (slice(1, 3), slice(3, 4)):
        mean = torch.nn.functional.normalize(z[..., column].mean((0, 2, 3)), dim=0)
        assert (together[..., column] == model.quantize.find_nearest(mean[None, :, None, None]).item()).all()
    assert len(own[..., 1:].unique()) > 2
    assert torch.equal(own, quantize_flat_patches_together(model, z, torch.full((2, 4, 4), -1)))


def test_training_brings_plain_patches_to_one_code(tmp_path):
    """Held-out pictures, each patch quantised by itself: fewer codes for a colour than without the shared targets."""
    schedule = Schedule(steps=25, learning_rate=3e-3, warmup_steps=2)
    apart, together = (
        train_tokenizer(
            tmp_path / str(weight), tokenizer_recipe(schedule=schedule, evaluate_every=25, flat_patch_weight=weight)
        )["plain_perplexity"]
        for weight in (0.0, 10.0)
    )
    assert 1 <= together < apart


def test_tokens_are_kept_until_the_tokenizer_changes(tmp_path):
    """Decoder weights have no say in tokens; encoder and codebook have."""
    recipe, images, model = generator_recipe(), data().images, tiny_vq()

    def store() -> generator_data.TokenStore:
        return generator_data.TokenStore(tmp_path, images, model, recipe, CPU)

    tokens = store()(range(4), [0] * 4)
    expected = BackgroundTokenizer(model)(to_pixels(images[:4], CPU))
    assert torch.equal(tokens, expected)
    with torch.no_grad():
        next(model.decoder.parameters()).add_(1)
    assert (store().array[:4, 0] == tokens.numpy() + 1).all()
    with torch.no_grad():
        model.quantize.embedding.weight.copy_(model.quantize.embedding.weight.roll(1, 0))
    again = store()
    assert not again.array.any()
    assert torch.equal(again(range(4), [0] * 4), (tokens + 1) % model.config.codebook_size)


def test_mirror_images_are_variants_of_their_own(tmp_path):
    images = data()
    store = generator_data.TokenStore(tmp_path, images.images, tiny_vq(), generator_recipe(), CPU)
    assert store.array.shape[1] == 2 * len(store.offsets) + len(augment.HUE_NAMES)
    assert np.array_equal(store.image(3, store.first_flipped), images.images[3][:, ::-1])
    moved = augment.shift_images(images.images[3:4, :, ::-1], *store.offsets[1])[0]
    assert np.array_equal(store.image(3, store.first_flipped + 1), moved)
    looks = variants.AugmentedBatches(images, store, generator_recipe(flip_probability=1.0, recolor_probability=0.0))
    assert all(variant >= store.first_flipped for variant in looks(0, 8)[1])
    written = [{**record, "group": "symbols"} for record in images.records]
    looks = variants.AugmentedBatches(
        EmojiDataset(images.images, written), store, generator_recipe(flip_probability=1.0, recolor_probability=0.0)
    )
    assert all(variant < len(store.offsets) for variant in looks(0, 8)[1])


def test_a_run_belongs_to_its_tokenizer(tmp_path):
    train_next_token(tmp_path / "run")
    other = VQModel.from_pretrained(tmp_path / "vq")
    with torch.no_grad():
        other.quantize.embedding.weight.neg_()
    other.save_pretrained(tmp_path / "vq")
    rejects(lambda: train_next_token(tmp_path / "run"), "settings")


def test_a_run_starts_from_given_weights(tmp_path):
    """They are what the first step sees, the shared weights included; a model of another shape is refused."""
    train_next_token(tmp_path / "first")
    given = tmp_path / "first" / "transformer"
    still = generator_recipe(schedule=Schedule(steps=3, learning_rate=0.0, warmup_steps=0), adamw_learning_rate=0.0)
    train_next_token(tmp_path / "still", still, given)
    first, second = (LlamaGenTransformer.from_pretrained(tmp_path / run / "transformer") for run in ("first", "still"))
    second = second.state_dict()
    assert all(torch.allclose(value, second[name], atol=1e-6) for name, value in first.state_dict().items())
    wider = dataclasses.replace(still, model={**still.model, "n_layer": 1})
    rejects(lambda: train_next_token(tmp_path / "other", wider, given), "init")
    assert not (tmp_path / "other").exists()
    rejects(lambda: train_next_token(tmp_path / "still", still), "settings")


def test_a_low_resolution_is_a_start_for_the_full_one(tmp_path):
    recipe = generator_recipe()
    small = LlamaGenTransformer(condition="text", **{**recipe.model, "grid_size": recipe.model["grid_size"] // 2})
    small.save_pretrained(tmp_path / "small")
    model, digest = generator.load_or_init(recipe, tmp_path / "small")
    assert model.config.grid_size == recipe.model["grid_size"] and digest
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_last_weights_are_averaged(tmp_path, monkeypatch):
    """Of a run that is resumed to more steps, those of its new end."""
    monkeypatch.setattr(generator, "_AVERAGE_EVERY", 1)
    seen = []
    merge = generator.CodebookPrior.merge_into

    def merge_into(self, model):
        weights = merge(self, model)
        seen.append(weights["output.weight"].clone())
        return weights

    monkeypatch.setattr(generator.CodebookPrior, "merge_into", merge_into)
    for steps, last in ((10, 3), (14, 4)):
        seen.clear()
        recipe = generator_recipe(average_last_fraction=0.3, schedule=Schedule(steps, 3e-3, 2), evaluate_every=99)
        train_next_token(tmp_path / "run", recipe)
        saved = LlamaGenTransformer.from_pretrained(tmp_path / "run" / "transformer").state_dict()
        assert len(seen) == last and torch.allclose(saved["output.weight"], torch.stack(seen).mean(0), atol=1e-6)
