"""The scorer's trainer at tiny size: it learns which caption fits, resumes, and keeps what is held out from training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_vq
from tiny_training import check_resumes

import vargen.assets
from recipes.emoji import scorer
from recipes.emoji.captions import (
    STYLES,
    can_flip,
    captions_without_style,
    extract_color_words,
    full_captions,
    swap_color_words,
)
from recipes.emoji.dataset import EmojiDataset, is_held_out_style, split_of
from recipes.emoji.scorer import CaptionTable, ScorerConfig
from recipes.emoji.scorer_evaluation import embed_images, top1_accuracy
from recipes.package import package_scorer
from vargen.models.image_text import ImageTextModel
from vargen.scoring.image_text import ImageTextScorer
from vargen.training.config import Schedule

CPU = torch.device("cpu")
ENCODER = vargen.assets.packaged_model_path("emoji")
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "gray": (90, 90, 90)}
CONCEPTS = ("red circle", "green book", "blue heart", "gray stone", "red house", "blue ship", "green frog", "gray wolf")


def data(size: int = 32) -> EmojiDataset:
    """Eight concepts in four styles: a block of the concept's colour whose place says which it is."""
    records, images = [], []
    for number, label in enumerate(CONCEPTS):
        for style in STYLES:
            split = "validation" if number >= 6 else "train"
            about = {"tags": [], "synonyms": [], "tones": [], "skin_tone": False, "group": "objects", "weight": 1.0}
            records.append({"concept": f"C{number}", "label": label, "style": style, "split": split, **about})
            image = np.full((size, size, 3), 255, dtype=np.uint8)
            image[4 * (number % 4) :][:12, 4 * STYLES.index(style) :][:, :12] = COLORS[label.split()[0]]
            images.append(image)
    return EmojiDataset(np.stack(images), records)


def recipe(**changes: Any) -> ScorerConfig:
    base: dict[str, Any] = {
        "schedule": Schedule(steps=12, learning_rate=3e-3, warmup_steps=2), "batch_size": 8, "sizes": [16, 32],
        "encoded_per_step": 1, "evaluate_every": 6, "checkpoint_every": 5,
    }  # fmt: skip
    model = {"widths": [16, 32], "blocks": [1, 1], "image_size": 32}
    return ScorerConfig(model=model, **{**base, **changes})


def train(folder: Path, changed: ScorerConfig | None = None, vq: Path | None = None) -> dict[str, float]:
    return scorer.train_scorer(changed or recipe(), data(), ENCODER, vq, folder, CPU)


def test_it_learns_and_saves_a_model_that_opens(tmp_path: Path) -> None:
    tiny_vq().save_pretrained(tmp_path / "vq")
    longer = recipe(schedule=Schedule(steps=80, learning_rate=4e-3, warmup_steps=5), batch_size=16)
    figures = train(tmp_path / "run", longer, tmp_path / "vq")
    assert {"training", "held_out_concepts", "held_out_concepts_style", "training_style"} <= set(figures)
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    for name in ("concept_loss", "pair_loss"):
        losses = [line[name] for line in logged if name in line]
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), (name, losses)
    model = ImageTextModel.from_pretrained(tmp_path / "run" / "scorer")
    vectors = embed_images(model.eval(), data().images[:3], 32)
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(3), atol=1e-5)


def test_a_packaged_run_scores_alike_and_says_nothing_of_this_machine(tmp_path: Path) -> None:
    train(tmp_path / "run")
    figures = package_scorer(tmp_path / "run", ENCODER, data(), tmp_path / "out", note="On a slow machine.")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "On a slow machine." in card and "12 steps" in card
    for name, drop in figures["score_drops"].items():
        assert f"| {name} | {drop['mean']:+.1f} | {100 * drop['share']:.0f} % |" in card
    assert set(figures["score_drops"]) >= {"swapped caption", "noise 0.4", "blur 4 px", "through the tokenizer"}
    for file in (tmp_path / "out").iterdir():
        assert file.stat().st_mode & 0o044 == 0o044, f"{file.name} is for its owner alone"
        assert file.suffix == ".safetensors" or str(tmp_path) not in file.read_text(), file.name
    packaged = ImageTextScorer(tmp_path / "out", ENCODER)
    assert packaged.model.state_dict().keys() == ImageTextModel.from_pretrained(tmp_path / "run" / "scorer").state_dict().keys()
    images = torch.from_numpy(data().images[:2]).permute(0, 3, 1, 2).float() / 255
    score = packaged.score(images, ["red circle", "red circle"])
    exact = ImageTextScorer(tmp_path / "run", ENCODER)
    exact.baseline_embeddings = packaged.baseline_embeddings
    assert torch.allclose(score, exact.score(images, ["red circle", "red circle"]), atol=0.05), "float16 weights"


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    check_resumes(train, tmp_path, 7, "scorer")


def test_what_is_held_out_is_never_trained_on() -> None:
    images = data()
    for record in images.records:  # some cell of theirs is held out by the hash, as in the real data
        record["concept"] = f"{record['concept']}-11"
    batches = scorer.ScorerBatches(images, recipe(), None, CPU)
    held_out = {i for i, record in enumerate(images.records) if is_held_out_style(record) or record["split"] != "train"}
    assert held_out and not held_out & set(batches.indices.tolist())


def test_held_out_cells_are_a_fixed_small_share_of_training_pairs() -> None:
    cells = [{"concept": f"{n:X}", "style": style, "split": split_of(f"{n:X}")} for n in range(2000) for style in STYLES]
    chosen = [cell for cell in cells if is_held_out_style(cell)]
    assert 0.02 < len(chosen) / len(cells) < 0.03 and all(cell["split"] == "train" for cell in chosen)
    assert is_held_out_style({"concept": "1F3F0", "style": "flat", "split": "validation"}) is False


def test_a_changed_colour_changes_image_and_caption_together() -> None:
    assert swap_color_words("a red apple, flat style", "red", "blue") == "a blue apple, flat style"
    assert swap_color_words("a reddish fox", "red", "blue") == "a reddish fox"
    assert extract_color_words({"label": "Green salad", "group": "food & drink"}) == ["green"]
    assert extract_color_words({"label": "woman: red hair", "group": "people & body"}) == []
    images = data()
    batches = scorer.ScorerBatches(images, recipe(recolor_probability=1.0, encoded_per_step=0, batch_size=32), None, CPU)
    batch = batches(3)
    for row, text in enumerate(batch.full_texts):
        middle = batch.pixels[row][:, batch.pixels[row].amax(0) - batch.pixels[row].amin(0) > 1.6]
        for channel, color in enumerate(("red", "green", "blue")):
            if color in text.split() and middle.numel():
                assert middle.mean(1).argmax() == channel
    assert -1 in batch.concept.tolist(), "a changed picture belongs to no concept"


def test_only_images_without_sides_or_writing_are_mirrored() -> None:
    cases = [("objects", "hammer", True), ("objects", "left luggage", False), ("flags", "flag: Fiji", False),
           ("symbols", "plus", False), ("travel & places", "eight o’clock", False)]  # fmt: skip
    for group, label, expected in cases:
        assert can_flip({"group": group, "label": label}) is expected


def test_captions_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = data().records[0]
    texts = [*captions_without_style(record), *full_captions(record)]
    table = CaptionTable(tmp_path / "table.npz", texts, ENCODER, CPU)
    assert torch.allclose(table(texts).norm(dim=-1), torch.ones(len(texts)), atol=1e-3)

    def never(*_: Any) -> Any:
        raise AssertionError("encoded again")

    monkeypatch.setattr("recipes.emoji.scorer.embed_texts", never)
    again = CaptionTable(tmp_path / "table.npz", texts, ENCODER, CPU)
    assert torch.equal(again(texts), table(texts))
    with pytest.raises(AssertionError, match="encoded again"):
        CaptionTable(tmp_path / "table.npz", [*texts, "another"], ENCODER, CPU)


def test_ranking_counts_own_captions_above_the_others() -> None:
    image, others = torch.eye(3), torch.eye(3)
    allowed = ~torch.eye(3, dtype=torch.bool)
    assert top1_accuracy(image, image, others, allowed, 3) == 1.0
    assert top1_accuracy(image, others.roll(1, 0), others, torch.ones(3, 3, dtype=torch.bool), 4) == 0.0


@pytest.mark.parametrize("changes", [{"sizes": []}, {"sizes": [20]}, {"batch_size": 0}])
def test_bad_recipes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sizes|batch_size"):
        dataclasses.replace(recipe(), **changes)
