"""Training of next-scale models at tiny size: losses, histories that are mended, and runs that end as if never broken."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rejects import rejects
from tiny_models import tiny_encoder
from tiny_training import check_resumes

from recipes.emoji.captions import can_recolor
from recipes.emoji.dataset import EmojiDataset, is_held_out_style
from recipes.emoji_var import transformer as var
from recipes.emoji_var.data import LatentBatches, LatentStore, SelfCorrection
from recipes.emoji_var.generate import sample_tokens
from recipes.emoji_var.transformer import NextScaleConfig, distillation_loss, scale_weights
from recipes.runner import load_settings
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.training.augment import HUE_NAMES, HUES, SamplingWeights, dominant_hue, find_color_word, recolor_caption, rotate_hue
from vargen.training.config import Schedule
from vargen.training.dataset import CaptionBank
from vargen.training.next_token_losses import chunked_cross_entropy
from vargen.training.run import TrainingRun

CPU = torch.device("cpu")
ENCODER = tiny_encoder()
SCALES = (1, 2, 4)


def tiny_vq() -> MultiScaleVQModel:
    torch.manual_seed(1)
    return MultiScaleVQModel(
        "hybrid", codebook_size=32, codebook_embed_dim=6, ch=16, ch_mult=(1, 2), num_res_blocks=1, scales=SCALES,
        scale_codes=(8, 16, 32), patch_size=2, transformer_blocks=1,
    ).eval()  # fmt: skip


def data(count: int = 40, size: int = 16) -> EmojiDataset:
    generate = np.random.default_rng(0)
    images = np.full((count, size, size, 3), 255, dtype=np.uint8)
    records = []
    for i in range(count):
        images[i, 3:13, 3:13] = (220, 30, 30) if i % 2 else generate.integers(0, 255, 3)
        records.append(
            {
                "label": f"thing {i // 2}", "concept": f"{i // 2}", "tags": ["round"], "synonyms": [], "tones": [],
                "skin_tone": False, "group": "objects", "style": ("3d", "flat", "noto", "twemoji")[i % 4], "weight": 1.0,
                "split": "validation" if i < 4 else "train",
            }
        )  # fmt: skip
    return EmojiDataset(images, records)


def recipe(**changes) -> NextScaleConfig:
    model = {
        "scales": list(SCALES), "depth": 2, "dim": 32, "n_head": 2, "vocab_size": 32, "code_dim": 6, "caption_rows": 12,
        "caption_dim": 32, "shared_aln": True,
    }  # fmt: skip
    base = {
        "schedule": Schedule(steps=12, learning_rate=3e-3, warmup_steps=2), "batch_size": 6, "early_batch_size": 4,
        "early_scales": 2, "shift_pixels": 2, "shift_variants": 2, "max_caption_tokens": 12, "evaluate_every": 6,
        "checkpoint_every": 5,
    }  # fmt: skip
    return NextScaleConfig(**{"model": model, **base, **changes})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vq")
    tiny_vq().save_pretrained(folder)
    return folder


def train(folder, tokenizer, changed=None, teacher=None):
    return var.train_next_scale(changed or recipe(), data(), tokenizer, ENCODER, folder, CPU, teacher)


# -- runs --------------------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, tokenizer):
    check_resumes(lambda folder: train(folder, tokenizer), tmp_path, 7, "transformer")
    assert Image.open(tmp_path / "killed" / "samples.png").size == (4 * 16, 4 * 16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer):
    """The folder and the metrics of a run that has learned something."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder, tokenizer, recipe(schedule=Schedule(steps=30, learning_rate=8e-3, warmup_steps=3)))


def test_training_lowers_the_loss(trained):
    assert trained[1]["loss_seen"] < 0.9 * np.log(32)


def test_a_small_model_comes_near_its_teacher(tmp_path, tokenizer, trained):
    """First at all scales, then at the last, given early scales that the teacher generates; the early scales then stay."""
    teacher = trained[0] / "transformer"
    small = recipe(
        model={**recipe().model, "depth": 1, "dim": 16}, schedule=Schedule(steps=40, learning_rate=1e-2, warmup_steps=2),
        adamw_learning_rate=1e-2, late_scales=1, evaluate_every=100, checkpoint_every=100,
    )  # fmt: skip
    train(tmp_path / "small", tokenizer, small, teacher)
    run = TrainingRun(tmp_path / "small", {}, 0).read_log()
    divergences = [record["late_divergence"] for record in run if "late_divergence" in record]
    assert any("divergence" in record for record in run) and divergences[-1] < 0.2
    with pytest.raises(ValueError, match="settings"):  # without its teacher it is another run
        train(tmp_path / "small", tokenizer, small)


def test_a_run_does_not_resume_with_another_tokenizer(tmp_path, trained):
    other = tiny_vq()
    with torch.no_grad():
        other.quantize.embedding.weight[3] += 0.1
    other.save_pretrained(tmp_path / "other")
    rejects(lambda: train(trained[0], tmp_path / "other"), "settings")
    changed = tiny_vq()
    with torch.no_grad():
        next(changed.decoder.parameters()).add_(0.1)  # which has no say in tokens
    assert var.hash_tokenizer(changed) == var.hash_tokenizer(tiny_vq()) != var.hash_tokenizer(other)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [({"scales": [1, 2, 3]}, 16, "scales"), ({"vocab_size": 31}, 16, "vocab_size"), ({}, 32, "images")],
)
def test_what_does_not_fit_is_named_before_training(tmp_path, tokenizer, model, size, message):
    changed = recipe(model={**recipe().model, **model})
    rejects(lambda: var.train_next_scale(changed, data(size=size), tokenizer, ENCODER, tmp_path / "run", CPU), message)
    assert not (tmp_path / "run").exists()


def test_networks_that_are_not_what_their_configs_say_are_refused(tmp_path, tokenizer):
    folder = shutil.copytree(tokenizer, tmp_path / "vq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "codebook_size": 33}))
    with pytest.raises(ValueError, match="do not fit the model"):
        train(tmp_path / "run", folder)
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        train(tmp_path / "run", tokenizer, teacher=tmp_path / "none")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["emoji-var", "emoji-var-small"])
def test_packaged_recipes_make_models_of_the_size_they_should_have(name):
    loaded = load_settings(name)
    with torch.device("meta"):
        model = VARTransformer(**{"condition": "text", **loaded.model})
    least, most = {"emoji-var": (8e6, 14e6), "emoji-var-small": (2e6, 4e6)}[name]
    assert least < sum(parameter.numel() for parameter in model.parameters()) < most


def test_shares_outside_the_unit_interval_are_refused():
    rejects(lambda: recipe(code_noise=1.5), "code_noise")


# -- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
def test_the_head_and_its_loss_in_one_are_the_head_and_its_loss(monkeypatch, biased):
    monkeypatch.setattr("vargen.training.next_token_losses._ROWS", 7)
    torch.manual_seed(0)
    head, features = torch.nn.Linear(8, 20, bias=biased), torch.randn(3, 5, 8, requires_grad=True)
    targets, weights = torch.randint(20, (3, 5)), torch.rand(5)
    parameters = [features, *head.parameters()]
    plain = F.cross_entropy(head(features).flatten(0, 1), targets.flatten(), reduction="none").view(3, 5)
    expected = torch.autograd.grad((plain * weights).sum(), parameters)
    loss, each = chunked_cross_entropy(head.weight, head.bias, features, targets, weights, torch.float32)
    torch.testing.assert_close(each, plain.detach())
    for found, right in zip(torch.autograd.grad(2 * loss, parameters), expected, strict=True):
        torch.testing.assert_close(found, 2 * right)


def test_divergence_is_zero_for_equal_laws_alone():
    logits = torch.randn(2, 5, 9)
    weights = scale_weights((1, 2), CPU)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5]))
    assert distillation_loss(logits, logits + 3.0, weights).abs() < 1e-5
    expected = (logits.flip(0).softmax(-1) * (logits.flip(0).log_softmax(-1) - logits.log_softmax(-1))).sum(-1) @ weights
    torch.testing.assert_close(distillation_loss(logits, logits.flip(0), weights), expected.sum())


# -- self-correction -----------------------------------------------------------------------------------------------


def test_without_noise_inputs_and_targets_are_the_tokenizers():
    vq, latents = tiny_vq(), torch.randn(3, 6, 4, 4)
    inputs, targets = SelfCorrection(vq, 0.0)(latents, torch.Generator())
    tokens = vq.quantize_latent(latents)
    assert torch.equal(targets, torch.cat([of_scale.flatten(1) for of_scale in tokens], 1))
    torch.testing.assert_close(inputs, vq.teacher_inputs(tokens))


def test_targets_mend_what_the_history_got_wrong():
    """The inputs are those of the wrong codes; the targets are what the rest, with the wrong codes taken out, asks for."""
    vq, latents = tiny_vq(), torch.randn(4, 6, 4, 4)
    corrupted = []

    class Watched(SelfCorrection):
        def corrupt(self, tokens, k, generator):
            corrupted.append(super().corrupt(tokens, k, generator))
            return corrupted[-1]

    inputs, targets = Watched(vq, 1.0)(latents, torch.Generator().manual_seed(0))
    right = vq.quantize_latent(latents)
    assert len(corrupted) == 2 and (corrupted[1] != right[1]).any()  # nothing follows the last scale
    assert all(int(a.max()) < codes for a, codes in zip(corrupted, vq.scale_codes, strict=False))
    torch.testing.assert_close(inputs, vq.teacher_inputs([*corrupted, right[-1]]))
    rest = latents - vq.accumulate_latents(corrupted)
    assert torch.equal(targets[:, -16:].view(4, 4, 4), vq.quantize.find_nearest(rest, 2))
    few, early = SelfCorrection(vq, 0.5)(latents, torch.Generator().manual_seed(0), 2)
    assert few.shape == (4, 4, 6) and early.shape == (4, 5)


def test_noise_has_the_share_that_was_asked_for():
    vq = tiny_vq()
    tokens = torch.randint(32, (4000, 4, 4))
    wrong = SelfCorrection(vq, 0.4).corrupt(tokens, 2, torch.Generator().manual_seed(0))
    share = (wrong != tokens).float().mean((1, 2))
    assert 0.17 < share.mean() < 0.2 and share.std() > 0.1  # half of the most; some of the others are equal by chance


# -- data ----------------------------------------------------------------------------------------------------------


def test_held_out_cells_and_concepts_are_never_generated(tmp_path):
    images = data(600)
    held = {i for i, record in enumerate(images.records) if is_held_out_style(record) or record["split"] == "validation"}
    assert len(held) > 8 and len({images.records[i]["split"] for i in held}) == 2
    store = LatentStore(tmp_path, images.images, tiny_vq(), recipe(), CPU)
    batches = LatentBatches(images, store, CaptionBank(ENCODER, 12, CPU), recipe())
    assert not held & set(batches.augmented.sample.indices.tolist())
    groups = images.evaluation_groups(SamplingWeights())
    assert set(groups["styles"]) | set(groups["concepts"]) <= held and not set(groups["seen"]) & held


def test_weights_of_styles_tones_and_groups():
    record = {"style": "3d", "skin_tone": False, "group": "objects"}
    factor = SamplingWeights().factor
    assert factor(record) == 1.0 and factor({**record, "style": "noto"}) == 0.2
    assert factor({**record, "skin_tone": True}) == 0.05 and factor({**record, "group": "flags"}) == 0.5


def test_latents_are_kept_and_variants_are_what_they_say(tmp_path):
    images, vq = data(), tiny_vq()
    store = LatentStore(tmp_path, images.images, vq, recipe(), CPU)
    first = store([5, 7, 5], [0, 1, 0])
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])
    expected = vq.encode_latent(torch.from_numpy(images.images[5:6].copy()).permute(0, 3, 1, 2).float() / 127.5 - 1)
    torch.testing.assert_close(first[:1], expected, atol=2e-2, rtol=2e-2)
    again = LatentStore(tmp_path, images.images, vq, recipe(), CPU)
    again.vq = None  # nothing is left to encode
    assert torch.equal(again([5, 7, 5], [0, 1, 0]), first)
    blue = store.image(1, len(store.offsets) + HUE_NAMES.index("blue"))
    assert find_color_word(dominant_hue(blue)) == "blue" and find_color_word(dominant_hue(store.image(1, 0))) == "red"


def test_a_batch_depends_on_its_step_alone(tmp_path):
    images = data()
    store = LatentStore(tmp_path, images.images, tiny_vq(), recipe(), CPU)
    changed = recipe(caption_dropout=0.5, recolor_probability=0.6)
    one, two = (LatentBatches(images, store, CaptionBank(ENCODER, 12, CPU), changed) for _ in range(2))
    one(0, 16)
    a, b = one(3, 16), two(3, 16)
    assert a.texts == b.texts and torch.equal(a.latents, b.latents)
    assert torch.equal(a.condition.caption_mask, b.condition.caption_mask)
    assert a.texts != one(3, 16, 1).texts
    dropped = ~a.condition.caption_mask.any(1)
    assert 2 < dropped.sum() < 14
    assert any(color in text.split() for text in a.texts for color in HUE_NAMES)


# -- colours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HUE_NAMES)
def test_a_turned_image_has_the_colour_that_is_asked_for(name):
    image = np.full((32, 32, 3), 255, dtype=np.uint8)
    image[8:24, 8:24] = (230, 40, 40)
    image[10:12, 10:12] = 128
    changed = rotate_hue(image, HUES[name] - dominant_hue(image))
    assert find_color_word(dominant_hue(changed)) == name
    assert (changed[10:12, 10:12] == 128).all() and (changed[0] == 255).all()
    assert np.abs(rotate_hue(image, 360.0).astype(int) - image).max() <= 1


def test_images_of_many_colours_or_none_have_no_dominant_one():
    gray, mixed = np.full((16, 16, 3), 90, dtype=np.uint8), np.full((16, 16, 3), 255, dtype=np.uint8)
    mixed[:8, :, 1:], mixed[8:, :, :2] = 0, 0
    assert dominant_hue(gray) is None and dominant_hue(mixed) is None
    assert dominant_hue(np.full((16, 16, 3), 255, dtype=np.uint8)) is None
    assert not can_recolor({"label": "black cat", "group": "animals & nature"})
    assert not can_recolor({"label": "flag: japan", "group": "flags"})
    assert can_recolor({"label": "red apple", "group": "food & drink"})


@pytest.mark.parametrize(
    ("text", "new", "expected"),
    [
        ("red apple, 3d style", "blue", "blue apple, 3d style"),
        ("a strawberry", "orange", "an orange strawberry"),
        ("an umbrella, rain", "blue", "a blue umbrella, rain"),
        ("emoji of a car", "pink", "emoji of a pink car"),
        ("emoji of heart, red", "green", "emoji of heart, green"),
        ("green apple", "blue", None),
        ("an apple", "red", "a red apple"),
    ],
)
def test_captions_say_the_new_colour(text, new, expected):
    assert recolor_caption(text, "red", new) == expected


# -- drawing -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_sampling_follows_the_models_laws():
    """A single draw's tokens of each scale have the laws that teacher forcing on earlier ones gives."""
    vq = tiny_vq()
    torch.manual_seed(0)
    model = VARTransformer(**{"condition": "text", **recipe().model}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    condition = Condition(caption_embeds=torch.randn(1, 5, 32)).select_rows(slice(0, 1))
    many = Condition(
        caption_embeds=condition.caption_embeds.expand(3000, -1, -1), caption_mask=torch.ones(3000, 5, dtype=torch.bool)
    )
    tokens = sample_tokens(model, vq, many, torch.Generator().manual_seed(0), guidance=0.0)
    assert [t.shape[1] for t in tokens] == [1, 4, 16]
    assert all(int(t.max()) < codes for t, codes in zip(tokens, vq.scale_codes, strict=True))
    logits = model(vq.teacher_inputs(tokens), many).logits
    logits[:, 0, 8:] = float("-inf")
    law = logits[0, 0].softmax(-1)
    found = torch.bincount(tokens[0].flatten(), minlength=32) / 3000
    assert (found - law).abs().max() < 0.04
    logits[:, 1:5, 16:] = float("-inf")
    expected = logits[:, 1:5].softmax(-1).mean((0, 1))  # over the histories that were drawn
    assert (torch.bincount(tokens[1].flatten(), minlength=32) / 12000 - expected).abs().max() < 0.03


def test_words_of_a_batch_are_those_of_its_seed(tmp_path):
    images = data()
    store, bank = LatentStore(tmp_path, images.images, tiny_vq(), recipe(), CPU), CaptionBank(ENCODER, 12, CPU)
    other = dataclasses.replace(recipe(), seed=1)
    assert LatentBatches(images, store, bank, recipe())(0, 8).texts != LatentBatches(images, store, bank, other)(0, 8).texts
