"""Training of next-scale models at tiny size: losses, histories that are mended, and runs that end as if never broken."""

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import vargen.assets
from recipes.emoji.captions import can_recolor
from recipes.emoji.dataset import EmojiDataset, is_held_out_cell
from recipes.emoji_var import transformer as var
from recipes.emoji_var.config import NextScaleConfig
from recipes.emoji_var.data import Batches, LatentStore
from recipes.emoji_var.generate import draw_tokens
from recipes.emoji_var.losses import distillation, scale_weights
from recipes.emoji_var.self_correction import Corrector
from recipes.runner import load_settings
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.training.caption_bank import CaptionBank
from vargen.training.config import Schedule
from vargen.training.focus import Focus
from vargen.training.head_loss import head_loss
from vargen.training.recolor import COLOURS, HUES, color_of_hue, dominant_hue, recolor_caption, turned

CPU = torch.device("cpu")
ENCODER = vargen.assets.packaged_model_path("emoji")
SCALES = (1, 2, 4)


class Killed(BaseException):
    pass


def tiny_vq() -> MultiScaleVQModel:
    torch.manual_seed(1)
    return MultiScaleVQModel(
        "hybrid", codebook_size=32, codebook_embed_dim=6, ch=16, ch_mult=(1, 2), num_res_blocks=1, scales=SCALES,
        scale_codes=(8, 16, 32), patch_size=2, transformer_blocks=1,
    ).eval()  # fmt: skip


def data(count: int = 40, size: int = 16) -> EmojiDataset:
    draw = np.random.default_rng(0)
    images = np.full((count, size, size, 3), 255, dtype=np.uint8)
    records = []
    for i in range(count):
        images[i, 3:13, 3:13] = (220, 30, 30) if i % 2 else draw.integers(0, 255, 3)
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
        "shared_aln": True,
    }  # fmt: skip
    base = {
        "schedule": Schedule(steps=12, learning_rate=3e-3, warmup_steps=2), "batch_size": 6, "early_batch_size": 4,
        "early_scales": 2, "shift_pixels": 2, "shift_variants": 2, "caption_rows": 12, "evaluate_every": 6,
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


@pytest.mark.parametrize(("killed_at", "checkpoint_every"), [(3, 5), (7, 5)])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch, tokenizer, killed_at, checkpoint_every):
    changed = recipe(checkpoint_every=checkpoint_every)
    expected = train(tmp_path / "unbroken", tokenizer, changed)
    assert {f"{figure}_{group}" for figure in ("loss", "rank", "gap") for group in ("seen", "concepts")} <= expected.keys()
    losses = var.Losses.__call__

    def kill(self, step, batches):
        if step == killed_at:
            raise Killed
        return losses(self, step, batches)

    monkeypatch.setattr(var.Losses, "__call__", kill)
    with pytest.raises(Killed):
        train(tmp_path / "killed", tokenizer, changed)
    monkeypatch.setattr(var.Losses, "__call__", losses)
    assert train(tmp_path / "killed", tokenizer, changed) == expected
    files = [tmp_path / run / "transformer" / "diffusion_pytorch_model.safetensors" for run in ("killed", "unbroken")]
    one, other = map(load_file, files)
    assert Image.open(tmp_path / "killed" / "drawn.png").size == (4 * 16, 4 * 16)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_training_lowers_the_loss_and_captions_begin_to_tell(tmp_path, tokenizer):
    figures = train(tmp_path, tokenizer, recipe(schedule=Schedule(steps=30, learning_rate=8e-3, warmup_steps=3)))
    assert figures["loss_seen"] < 0.9 * np.log(32)


def test_a_small_model_comes_near_its_teacher(tmp_path, tokenizer):
    """First at all scales, then at the last on histories that the teacher draws; the early scales are then left alone."""
    train(tmp_path / "large", tokenizer)
    small = recipe(
        model={**recipe().model, "depth": 1, "dim": 16}, schedule=Schedule(steps=25, learning_rate=6e-3, warmup_steps=2),
        late_scales=1, evaluate_every=100, checkpoint_every=100,
    )  # fmt: skip
    train(tmp_path / "small", tokenizer, small, tmp_path / "large" / "transformer")
    run = var.TrainingRun(tmp_path / "small", {}, 0).records()
    divergences = [record["late_divergence"] for record in run if "late_divergence" in record]
    assert any("divergence" in record for record in run) and divergences[-1] < 0.2
    with pytest.raises(ValueError, match="another recipe"):  # without its teacher it is another run
        train(tmp_path / "small", tokenizer, small)


def test_a_run_does_not_go_on_with_another_tokenizer(tmp_path, tokenizer):
    train(tmp_path / "run", tokenizer)
    other = tiny_vq()
    with torch.no_grad():
        other.quantize.embedding.weight[3] += 0.1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="another recipe"):
        train(tmp_path / "run", tmp_path / "other")
    changed = tiny_vq()
    with torch.no_grad():
        next(changed.decoder.parameters()).add_(0.1)  # which has no say in tokens
    assert var.tokenizer_digest(changed) == var.tokenizer_digest(tiny_vq()) != var.tokenizer_digest(other)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ({"scales": [1, 2, 3]}, 16, r"scales must be the tokenizer's, \(1, 2, 4\), got \(1, 2, 3\)"),
        ({"vocab_size": 31}, 16, "vocab_size must be the tokenizer's, 32, got 31"),
        ({}, 32, "the tokenizer wants pictures of 16 pixels, the data set has 32"),
    ],
)
def test_what_does_not_fit_is_named_before_training(tmp_path, tokenizer, model, size, message):
    changed = recipe(model={**recipe().model, **model})
    with pytest.raises(ValueError, match=message):
        var.train_next_scale(changed, data(size=size), tokenizer, ENCODER, tmp_path / "run", CPU)
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
    with pytest.raises(ValueError, match="code_noise must be a share from 0 to 1"):
        recipe(code_noise=1.5)


# -- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
def test_the_head_and_its_loss_in_one_are_the_head_and_its_loss(monkeypatch, biased):
    monkeypatch.setattr("vargen.training.head_loss._ROWS", 7)
    torch.manual_seed(0)
    head, features = torch.nn.Linear(8, 20, bias=biased), torch.randn(3, 5, 8, requires_grad=True)
    targets, weights = torch.randint(20, (3, 5)), torch.rand(5)
    parameters = [features, *head.parameters()]
    plain = F.cross_entropy(head(features).flatten(0, 1), targets.flatten(), reduction="none").view(3, 5)
    expected = torch.autograd.grad((plain * weights).sum(), parameters)
    loss, each = head_loss(head.weight, head.bias, features, targets, weights, torch.float32)
    torch.testing.assert_close(each, plain.detach())
    for found, right in zip(torch.autograd.grad(2 * loss, parameters), expected, strict=True):
        torch.testing.assert_close(found, 2 * right)


def test_divergence_is_zero_for_equal_laws_alone():
    logits = torch.randn(2, 5, 9)
    weights = scale_weights((1, 2), CPU)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5]))
    assert distillation(logits, logits + 3.0, weights).abs() < 1e-5
    expected = (logits.flip(0).softmax(-1) * (logits.flip(0).log_softmax(-1) - logits.log_softmax(-1))).sum(-1) @ weights
    torch.testing.assert_close(distillation(logits, logits.flip(0), weights), expected.sum())


# -- self-correction -----------------------------------------------------------------------------------------------


def test_without_noise_inputs_and_targets_are_the_tokenizers():
    vq, latents = tiny_vq(), torch.randn(3, 6, 4, 4)
    inputs, targets = Corrector(vq, 0.0)(latents, torch.Generator())
    tokens = vq.quantize_latent(latents)
    assert torch.equal(targets, torch.cat([of_scale.flatten(1) for of_scale in tokens], 1))
    torch.testing.assert_close(inputs, vq.teacher_inputs(tokens))


def test_targets_mend_what_the_history_got_wrong():
    """The inputs are those of the wrong codes; the targets are what the rest, with the wrong codes taken out, asks for."""
    vq, latents = tiny_vq(), torch.randn(4, 6, 4, 4)
    drawn = []

    class Watched(Corrector):
        def wrong(self, tokens, k, draw):
            drawn.append(super().wrong(tokens, k, draw))
            return drawn[-1]

    inputs, targets = Watched(vq, 1.0)(latents, torch.Generator().manual_seed(0))
    right = vq.quantize_latent(latents)
    assert len(drawn) == 2 and (drawn[1] != right[1]).any()  # nothing follows the last scale
    assert all(int(a.max()) < codes for a, codes in zip(drawn, vq.scale_codes, strict=False))
    torch.testing.assert_close(inputs, vq.teacher_inputs([*drawn, right[-1]]))
    rest = latents - vq.sum_latent(drawn)
    assert torch.equal(targets[:, -16:].view(4, 4, 4), vq.quantize.nearest(rest, 2))
    few, early = Corrector(vq, 0.5)(latents, torch.Generator().manual_seed(0), 2)
    assert few.shape == (4, 4, 6) and early.shape == (4, 5)


def test_noise_has_the_share_that_was_asked_for():
    vq = tiny_vq()
    tokens = torch.randint(32, (4000, 4, 4))
    wrong = Corrector(vq, 0.4).wrong(tokens, 2, torch.Generator().manual_seed(0))
    share = (wrong != tokens).float().mean((1, 2))
    assert 0.17 < share.mean() < 0.2 and share.std() > 0.1  # half of the most; some of the others are equal by chance


# -- data ----------------------------------------------------------------------------------------------------------


def test_held_out_cells_and_concepts_are_never_drawn(tmp_path):
    pictures = data(600)
    held = {i for i, record in enumerate(pictures.records) if is_held_out_cell(record) or record["split"] == "validation"}
    assert len(held) > 8 and len({pictures.records[i]["split"] for i in held}) == 2
    store = LatentStore(tmp_path, pictures.images, tiny_vq(), recipe(), CPU)
    batches = Batches(pictures, store, CaptionBank(ENCODER, 12, CPU), recipe())
    assert not held & set(batches.looks.indices.tolist())
    groups = pictures.evaluation_groups(Focus())
    assert set(groups["styles"]) | set(groups["concepts"]) <= held and not set(groups["seen"]) & held


def test_weights_of_styles_tones_and_groups():
    record = {"style": "3d", "skin_tone": False, "group": "objects"}
    factor = Focus().factor
    assert factor(record) == 1.0 and factor({**record, "style": "noto"}) == 0.2
    assert factor({**record, "skin_tone": True}) == 0.05 and factor({**record, "group": "flags"}) == 0.5


def test_latents_are_kept_and_variants_are_what_they_say(tmp_path):
    pictures, vq = data(), tiny_vq()
    store = LatentStore(tmp_path, pictures.images, vq, recipe(), CPU)
    first = store([5, 7, 5], [0, 1, 0])
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])
    expected = vq.latent(torch.from_numpy(pictures.images[5:6].copy()).permute(0, 3, 1, 2).float() / 127.5 - 1)
    torch.testing.assert_close(first[:1], expected, atol=2e-2, rtol=2e-2)
    again = LatentStore(tmp_path, pictures.images, vq, recipe(), CPU)
    again.vq = None  # nothing is left to encode
    assert torch.equal(again([5, 7, 5], [0, 1, 0]), first)
    blue = store.picture(1, len(store.offsets) + COLOURS.index("blue"))
    assert color_of_hue(dominant_hue(blue)) == "blue" and color_of_hue(dominant_hue(store.picture(1, 0))) == "red"


def test_a_batch_depends_on_its_step_alone(tmp_path):
    pictures = data()
    store = LatentStore(tmp_path, pictures.images, tiny_vq(), recipe(), CPU)
    changed = recipe(caption_dropout=0.5, recoloured=0.6)
    one, two = (Batches(pictures, store, CaptionBank(ENCODER, 12, CPU), changed) for _ in range(2))
    one(0, 16)
    a, b = one(3, 16), two(3, 16)
    assert a.texts == b.texts and torch.equal(a.latents, b.latents)
    assert torch.equal(a.condition.caption_mask, b.condition.caption_mask)
    assert a.texts != one(3, 16, 1).texts
    dropped = ~a.condition.caption_mask.any(1)
    assert 2 < dropped.sum() < 14
    assert any(colour in text.split() for text in a.texts for colour in COLOURS)


# -- colours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLOURS)
def test_a_turned_picture_has_the_colour_that_is_asked_for(name):
    picture = np.full((32, 32, 3), 255, dtype=np.uint8)
    picture[8:24, 8:24] = (230, 40, 40)
    picture[10:12, 10:12] = 128
    changed = turned(picture, HUES[name] - dominant_hue(picture))
    assert color_of_hue(dominant_hue(changed)) == name
    assert (changed[10:12, 10:12] == 128).all() and (changed[0] == 255).all()
    assert np.abs(turned(picture, 360.0).astype(int) - picture).max() <= 1


def test_pictures_of_many_colours_or_none_have_no_dominant_one():
    grey, mixed = np.full((16, 16, 3), 90, dtype=np.uint8), np.full((16, 16, 3), 255, dtype=np.uint8)
    mixed[:8, :, 1:], mixed[8:, :, :2] = 0, 0
    assert dominant_hue(grey) is None and dominant_hue(mixed) is None
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
def test_drawing_follows_the_models_laws():
    """A single draw's tokens of each scale have the laws that teacher forcing on earlier ones gives."""
    vq = tiny_vq()
    torch.manual_seed(0)
    model = VARTransformer(**{"condition": "text", **recipe().model}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    condition = Condition(caption_embeds=torch.randn(1, 5, 384)).rows(slice(0, 1))
    many = Condition(
        caption_embeds=condition.caption_embeds.expand(3000, -1, -1), caption_mask=torch.ones(3000, 5, dtype=torch.bool)
    )
    tokens = draw_tokens(model, vq, many, torch.Generator().manual_seed(0), guidance=0.0)
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
    pictures = data()
    store, bank = LatentStore(tmp_path, pictures.images, tiny_vq(), recipe(), CPU), CaptionBank(ENCODER, 12, CPU)
    other = dataclasses.replace(recipe(), seed=1)
    assert Batches(pictures, store, bank, recipe())(0, 8).texts != Batches(pictures, store, bank, other)(0, 8).texts
    assert random.Random("0 0 0").random() == random.Random("0 0 0").random()
