"""Tokens of training pictures, to lie beside a model for drafters that look up (see
`vargen.decoding.next_token.drafters.lookup`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from vargen.models.tokenizers.vq import VQModel
from vargen.training.blanks import BlankAware, tokens_digest
from vargen.training.dataset import to_pixels
from vargen.training.token_cache import check_tokens

_BATCH = 32


def kept_tokens(run: Path, vqvae: VQModel, pictures: int) -> np.ndarray:
    """What a generator's run has made of the pictures themselves, int `[pictures, N]`; -1 where it has made nothing.

    Raises:
        ValueError: if the run keeps none, or those of another tokenizer or of other pictures.
    """
    check_tokens(run, vqvae, run)
    files = sorted(run.glob(f"tokens-{tokens_digest(vqvae)}-*.npy"))
    if not files:
        raise ValueError(f"{run} keeps no tokens: give the folder of a generator's run, which holds tokens-*.npy")
    try:
        kept = np.load(files[0], mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{files[0]} is damaged or not of vargen's ({error}); remove it") from error
    if kept.ndim != 3 or len(kept) != pictures:
        raise ValueError(f"{files[0]} must hold tokens of the {pictures} pictures of the data set, got {list(kept.shape)}")
    return kept[:, 0].astype(np.int64) - 1  # which are kept one larger, so that 0 is not there yet


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
        kept: `[pictures, N]`, tokens that are known, written in order, -1 elsewhere.
        progress: called with the number of pictures that are done, and of all.
    """
    training = set(data.indices("train").tolist())
    chosen = [i for i in np.random.default_rng(seed).permutation(len(data.images)).tolist() if i in training][:count]
    tokens = np.full((len(chosen), 0), -1) if kept is None else kept[chosen].astype(np.int64)
    tokens_of = BlankAware(vqvae)
    missing = [place for place in range(len(chosen)) if kept is None or tokens[place, -1] < 0]
    for start in range(0, len(missing), _BATCH):
        places = missing[start : start + _BATCH]
        pictures = np.stack([data.images[chosen[place]] for place in places])
        drawn = tokens_of(to_pixels(pictures, vqvae.device)).cpu().numpy()
        if not tokens.shape[1]:
            tokens = np.full((len(chosen), drawn.shape[1]), -1)
        tokens[places] = drawn
        if progress is not None:
            progress(len(chosen) - len(missing) + start + len(places), len(chosen))
    return torch.from_numpy(tokens)
