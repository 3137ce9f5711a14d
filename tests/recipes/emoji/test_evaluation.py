"""How drawn pictures are judged: the right caption has to be found among others, in groups that training saw or did not."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.emoji.dataset import EmojiDataset, is_held_out_style
from recipes.emoji.evaluation import CaptionRecall
from vargen.evaluation.contact_sheets import numbered_sheet
from vargen.training.augment import SamplingWeights
from vargen.training.dataset import take_evenly
from vargen.training.next_token_evaluation import caption_ranking


def data(concepts: int = 60) -> EmojiDataset:
    records = []
    for i in range(4 * concepts):
        split = "validation" if i // 4 < 5 else "train"
        records.append(
            {
                "label": f"thing {i // 4}", "concept": f"{i // 4}", "tags": [], "synonyms": [], "tones": [], "skin_tone": False,
                "group": "objects", "style": ("3d", "flat", "noto", "twemoji")[i % 4], "weight": 1.0, "split": split,
            }
        )  # fmt: skip
    return EmojiDataset(np.zeros((len(records), 4, 4, 3), dtype=np.uint8), records)


class Reader:
    """A scorer that reads a picture's first value as the number of its concept."""

    def __init__(self, concepts: int):
        self.concepts = concepts

    def embed_captions(self, texts):
        return F.one_hot(torch.tensor([int(text.split()[1].strip(",")) for text in texts]), self.concepts).float()

    def embed_images(self, images):
        place = images[:, 0, 0, 0].round().long()
        near = torch.stack([F.one_hot((place + k) % self.concepts, self.concepts) * (1 - 0.1 * k) for k in range(10)])
        return near.sum(0).float()


@pytest.mark.parametrize(("off", "top1", "top5"), [(0, 1.0, 1.0), (3, 0.0, 1.0), (7, 0.0, 0.0)])
def test_a_caption_is_found_as_far_as_it_is_among_the_nearest(off, top1, top5):
    """Pictures of the thing `off` places before: its own caption is in that place."""
    recall = CaptionRecall(data(), SamplingWeights(), Reader(60), counts={"seen": 12, "styles": 4, "concepts": 5})

    def generate(prompts, seed):
        assert all(prompt.endswith(" style") for prompt in prompts)
        numbers = torch.tensor([(int(prompt.split()[1].strip(",")) - off) % 60 for prompt in prompts])
        return numbers.float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2)

    figures = recall(generate, batch_size=5)
    assert set(figures) == {f"top{k}_{group}" for k in (1, 5) for group in ("seen", "styles", "concepts")}
    assert all(value == (top1 if name.startswith("top1") else top5) for name, value in figures.items())


def test_captions_are_as_many_as_asked_for_and_hold_those_that_are_generated():
    recall = CaptionRecall(
        data(), SamplingWeights(), Reader(60), counts={"seen": 3, "styles": 2, "concepts": 2}, num_candidates=30
    )
    assert len(recall.captions) == len(set(recall.captions)) == 30
    generated = []
    recall(lambda prompts, seed: generated.extend(prompts) or torch.zeros(len(prompts), 3, 2, 2), num_images=3)
    assert 3 <= len(generated) <= 4 and all(prompt.split(",")[0] in recall.captions for prompt in generated)


def test_groups_are_what_they_say():
    images = data(400)
    groups = images.evaluation_groups(SamplingWeights(), seen=40, styles=9)
    records = images.records
    assert len(groups["seen"]) == 40 and len(groups["styles"]) == 9
    assert all(records[i]["style"] in ("3d", "flat") and not is_held_out_style(records[i]) for i in groups["seen"])
    assert all(is_held_out_style(records[i]) for i in groups["styles"])
    assert sorted(records[i]["concept"] for i in groups["concepts"]) == sorted(map(str, range(5)))
    assert {records[i]["style"] for i in groups["concepts"]} == {"3d", "flat"}
    assert take_evenly(range(10), 3) == [0, 3, 6] and take_evenly([1, 2], 5) == [1, 2]


def test_candidates_are_of_one_style_and_the_right_one_is_first():
    images = data()
    for i, texts in zip((1, 9, 17), images.candidate_captions((1, 9, 17), 3), strict=True):
        assert texts[0] == f"thing {i // 4}, flat style" and len(set(texts)) == 3
        assert all(text.endswith("flat style") for text in texts)


def test_choice_counts_the_likeliest_and_measures_the_distance():
    reported = caption_ranking(torch.tensor([[1.0, 2.0, 3.0], [5.0, 4.0, 6.0]]))
    assert reported == {"rank": 0.5, "gap": pytest.approx(0.75)}


def test_a_blind_sheet_has_its_key_beside_it(tmp_path):
    prompts = [f"thing {n}" for n in range(10)]
    seen = {}

    def generate(texts, seed):
        seen.update({text: seed + n for n, text in enumerate(texts)})
        return torch.rand(len(texts), 3, 8, 8)

    key = numbered_sheet(prompts, generate, tmp_path / "sheet.png", seed=3, batch=4)
    reported = json.loads(key.read_text())
    assert sorted(reported.values()) == prompts and list(reported.values()) != prompts
    assert (tmp_path / "sheet.png").stat().st_size > 100 and set(seen) == set(prompts)
