"""Tokens of training images, stored in a model's folder for drafters that look up earlier tokens.

See `vargen.decoding.next_token.drafters.lookup`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from vargen.models.tokenizers.vq import VQModel
from vargen.training.dataset import to_pixels
from vargen.training.token_cache import BackgroundTokenizer, hash_tokens, validate_token_cache

_BATCH = 32


def load_cached_tokens(run: Path, vqvae: VQModel, num_images: int) -> np.ndarray:
    """Return the tokens of unshifted images that a generator's run has cached, int `[num_images, N]`; -1 if not cached.

    Raises:
        ValueError: if the run has cached no tokens, or those of another tokenizer or data set.
    """
    validate_token_cache(run, vqvae, run)
    files = sorted(run.glob(f"tokens-{hash_tokens(vqvae)}-*.npy"))
    if not files:
        raise ValueError(f"{run} contains no cached tokens: give the folder of a generator's run, with tokens-*.npy")
    try:
        cached = np.load(files[0], mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{files[0]} is damaged or was not written by vargen ({error}); remove it") from error
    if cached.ndim != 3 or len(cached) != num_images:
        raise ValueError(f"{files[0]} must contain tokens of the {num_images} images of the data set, got {list(cached.shape)}")
    return cached[:, 0].astype(np.int64) - 1  # stored plus 1: zero means not computed yet


@torch.no_grad()
def choose_examples(
    vqvae: VQModel,
    data: EmojiDataset,
    count: int,
    cached: np.ndarray | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Return the tokens int64 `[M, N]` of at most `count` random training images, none of the validation split.

    Args:
        vqvae: on its device.
        cached: `[num_images, N]`, tokens that are known, written in order, -1 elsewhere.
        progress: called with the number of finished images, and of all.
    """
    training = set(data.indices("train").tolist())
    members = [i for i in np.random.default_rng(seed).permutation(len(data.images)).tolist() if i in training][:count]
    tokens = np.full((len(members), 0), -1) if cached is None else cached[members].astype(np.int64)
    tokenize = BackgroundTokenizer(vqvae)
    missing = [place for place in range(len(members)) if cached is None or tokens[place, -1] < 0]
    for start in range(0, len(missing), _BATCH):
        places = missing[start : start + _BATCH]
        images = np.stack([data.images[members[place]] for place in places])
        encoded = tokenize(to_pixels(images, vqvae.device)).cpu().numpy()
        if not tokens.shape[1]:
            tokens = np.full((len(members), encoded.shape[1]), -1)
        tokens[places] = encoded
        if progress is not None:
            progress(len(members) - len(missing) + start + len(places), len(members))
    return torch.from_numpy(tokens)
