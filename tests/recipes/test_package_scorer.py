"""A scorer's card tells what was measured on the weights that are packaged."""

import numpy as np
import torch
from PIL import Image
from PIL.ImageFilter import GaussianBlur
from rejects import rejects

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.scorer_evaluation import blur, mismatched_captions
from recipes.package import package_scorer


def data() -> EmojiDataset:
    groups = ("food", "food", "animals", "food", "animals")
    records = [
        {"concept": f"thing {i}", "label": f"thing {i}", "tags": [], "synonyms": [], "tones": [], "group": group, "style": "3d",
         "split": "train"}
        for i, group in enumerate(groups)
    ]  # fmt: skip
    return EmojiDataset(np.zeros((5, 8, 8, 3), dtype=np.uint8), records)


def test_foreign_captions_are_of_another_concept_of_the_group() -> None:
    assert mismatched_captions(data(), [0, 1, 2, 3, 4]) == ["thing 1", "thing 3", "thing 4", "thing 0", "thing 2"]
    assert mismatched_captions(data(), [0, 2]) == ["thing 2", "thing 0"], "none of the group is there"


def test_blurring_is_the_blur_of_images_on_white() -> None:
    image = Image.new("RGB", (64, 64), "white")
    image.paste((200, 30, 60), (20, 24, 44, 40))
    ours = blur(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255, 2.0, padding=1.0)[0]
    theirs = np.asarray(image.filter(GaussianBlur(2.0)), dtype=np.float32) / 255
    assert np.abs(ours.permute(1, 2, 0).numpy() - theirs).max() < 0.03


def test_an_unfinished_run_is_refused(tmp_path) -> None:
    rejects(lambda: package_scorer(tmp_path, tmp_path, data(), tmp_path / "out"), "scorer", FileNotFoundError)
    assert not (tmp_path / "out").exists()
