"""A generator is shown what it draws itself, and told what it should have drawn: errors that it meets when it draws alone.

Ross et al. 2011, DAgger (arXiv:1011.0686), on tokens: the history is the model's own, the label is the picture's token at that
place. The model starts from trained weights, which draw all pictures once, before the first step.

Shape suffixes: B pictures, N tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from vargen.decoding import Sampling, decode
from vargen.files import whole_file
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.weights import read_arrays
from vargen.pipelines.llamagen_tokens import LlamaGenTokens
from vargen.training.caption_bank import CaptionBank
from vargen.training.emoji import sample_caption
from vargen.training.generator_data import left_padded
from vargen.training.recipe import OwnStarts
from vargen.training.variants import Looks

_AT_ONCE = 96


class OwnDrawings:
    """Tokens that the starting weights draw for training captions, by picture; drawn batch by batch, each a file of its own.

    Args:
        folder: where they are kept; a run that is killed goes on behind the last whole file.
        made_of: names the starting weights and the tokens.
        looks: which pictures are seen how often; those that are drawn are chosen likewise.

    Raises:
        ValueError: for a folder that holds drawings of other weights or another recipe.
    """

    def __init__(self, folder: Path, made_of: str, looks: Looks, bank: CaptionBank, recipe: OwnStarts, seed: int, tokens: int):
        self.folder, self.records, self.bank, self.recipe, self.seed = folder, looks.records, bank, recipe, seed
        self.made_of = f"{made_of}, {recipe}, seed {seed}"
        chances = np.diff(looks.cumulative, prepend=0.0)
        count = min(recipe.pictures, int((chances > 0).sum()))
        draw = np.random.default_rng((seed, count))
        self.indices = draw.choice(looks.indices, count, replace=False, p=chances / chances.sum()).tolist()
        self.place = {i: place for place, i in enumerate(self.indices)}
        self.tokens = np.zeros((count, tokens), dtype=np.int32)

    def draw(self, model: LlamaGenTransformer) -> None:
        """Fill `tokens`. The model is not needed, nor looked at, where all files are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, len(self.indices), _AT_ONCE)
        for start in tqdm([start for start in starts if not self._read(start)], desc="drawings", disable=None, mininterval=5):
            self._draw(model, start)

    def _file(self, start: int) -> Path:
        return self.folder / f"own-{start:05d}.npz"

    def _read(self, start: int) -> bool:
        path = self._file(start)
        if not path.is_file():
            return False
        kept = read_arrays(path, "made_of", "tokens")
        if str(kept["made_of"]) != self.made_of:
            raise ValueError(f"{path} was drawn by {kept['made_of']}, and this run is of {self.made_of}: remove the file")
        self.tokens[start : start + _AT_ONCE] = kept["tokens"]
        return True

    @torch.inference_mode()
    def _draw(self, model: LlamaGenTransformer, start: int) -> None:
        part = self.indices[start : start + _AT_ONCE]
        model.eval()
        texts = [sample_caption(self.records[i], random.Random(f"own {self.seed} {i}")) for i in part]
        condition = left_padded(self.bank(texts))
        seeds = torch.tensor([self.seed * (1 << 44) + (1 << 43) + i for i in part])
        target = LlamaGenTokens(model, self.recipe.guidance_scale, device=model.device)
        sampling = Sampling(self.recipe.temperature)
        drawn = decode(target, condition, seeds, "ar", sampling).tokens
        self.tokens[start : start + _AT_ONCE] = drawn.cpu().numpy()
        with whole_file(self._file(start)) as temporary, open(temporary, "wb") as file:
            np.savez(file, tokens=self.tokens[start : start + _AT_ONCE], made_of=np.array(self.made_of))

    def started(self, given_BN: Tensor, indices: Sequence[int], variants: Sequence[int], captioned: Tensor) -> Tensor:
        """Input tokens whose beginnings, up to a random place or to the end, are the model's own.

        Args:
            given_BN: input tokens as they would be. indices, variants: the pictures; only a picture itself has drawings.
            captioned: bool `[B]`; nothing tells the others what to return to.
        """
        (B, N), device = given_BN.shape, given_BN.device
        there = torch.tensor([v == 0 and i in self.place for i, v in zip(indices, variants, strict=True)], device=device)
        own = self.tokens[[self.place.get(i, 0) for i in indices]].astype(np.int64)
        chosen = there & captioned.to(device) & (torch.rand(B, device=device) < self.recipe.share)
        before = torch.arange(N, device=device) < 2 * torch.rand(B, 1, device=device) * N
        return torch.where(chosen[:, None] & before, torch.from_numpy(own).to(device), given_BN)
