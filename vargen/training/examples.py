"""Tokens of training pictures, to lie beside a model for drafters that look up (see `vargen.decoding.drafters.lookup`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vargen.models.vq import VQModel
from vargen.models.weights import read_arrays
from vargen.training.emoji import EmojiDataset
from vargen.training.generator_data import check_tokens
from vargen.training.tokenizer import to_pixels

_BATCH = 32


def kept_tokens(run: Path, vqvae: VQModel, pictures: int) -> np.ndarray:
    """What a generator's run has made of the pictures themselves, int `[pictures, N]`; -1 where it has made nothing.

    Raises:
        ValueError: if the run keeps none, or those of another tokenizer or of other pictures.
    """
    file = run / "tokens.npz"
    if not file.is_file():
        raise ValueError(f"{run} keeps no tokens: give the folder of a generator's run, which holds tokens.npz")
    check_tokens(run, vqvae, file)
    tokens = read_arrays(file, "tokens")["tokens"]
    if tokens.ndim != 3 or len(tokens) != pictures:
        raise ValueError(f"{file} must hold tokens of the {pictures} pictures of the data set, got {list(tokens.shape)}")
    return tokens[:, 0]


@torch.no_grad()
def choose_examples(
    vqvae: VQModel,
    data: EmojiDataset,
    count: int,
    kept: np.ndarray | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Tokens int64 `[M, N]` of at most `count` training pictures, taken at random; none of those that are held out.

    Args:
        vqvae: on its device.
        kept: `[pictures, N]`, tokens that are known, -1 elsewhere.
        progress: called with the number of pictures that are done, and of all.
    """
    training = set(data.indices("train").tolist())
    chosen = [i for i in np.random.default_rng(seed).permutation(len(data.images)).tolist() if i in training][:count]
    tokens = np.full((len(chosen), 0), -1) if kept is None else kept[chosen].astype(np.int64)
    missing = [place for place in range(len(chosen)) if kept is None or tokens[place, 0] < 0]
    for start in range(0, len(missing), _BATCH):
        places = missing[start : start + _BATCH]
        pictures = np.stack([data.images[chosen[place]] for place in places])
        drawn = vqvae.encode(to_pixels(pictures, vqvae.device)).flatten(1).cpu().numpy()
        if not tokens.shape[1]:
            tokens = np.full((len(chosen), drawn.shape[1]), -1)
        tokens[places] = drawn
        if progress is not None:
            progress(len(chosen) - len(missing) + start + len(places), len(chosen))
    return torch.from_numpy(tokens)
