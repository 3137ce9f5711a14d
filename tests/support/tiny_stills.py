"""A tiny data set of still images, to be moved."""

import numpy as np

from recipes.emoji.dataset import EmojiDataset


def still(size: int = 64) -> np.ndarray:
    """A blue square whose upper half is red."""
    image = np.full((size, size, 3), 255, dtype=np.uint8)
    image[8:32, 8:56], image[32:56, 8:56] = (200, 0, 0), (0, 0, 200)
    return image


def stills(count: int = 12) -> EmojiDataset:
    records = [
        {
            "split": "train", "label": f"thing {i}", "group": "objects", "style": "3d", "concept": str(i), "tags": [],
            "skin_tone": False,
        }
        for i in range(count)
    ]  # fmt: skip
    return EmojiDataset(np.stack([still()] * count), records)
