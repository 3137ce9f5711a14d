"""A scorer: `pipe(prompt, num_candidates=8, scorer=Colorfulness())`, or `vargen eval --scorers colorfulness:Colorfulness`."""

import numpy as np
import torch


class Colorfulness:
    """How colorful an image is, from 0 (gray) upwards (Hasler & Süsstrunk 2003, metric M3)."""

    name, higher_is_better = "colorfulness", True

    def score(self, images, prompts):
        if not isinstance(images, torch.Tensor):
            arrays = [np.asarray(image.convert("RGB"), dtype=np.float32) / 255 for image in images]
            images = torch.from_numpy(np.stack(arrays)).movedim(-1, 1)
        red, green, blue = (255 * images).flatten(2).unbind(1)  # [N, pixels] each
        opponents = torch.stack([red - green, (red + green) / 2 - blue])
        spread, mean = opponents.std(-1), opponents.mean(-1)
        return spread.norm(dim=0) + 0.3 * mean.norm(dim=0)
