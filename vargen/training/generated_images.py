"""What a drafter is trained on: pictures that its target drew, as tokens, by the guidance and sampling it will be used with.

On the target's own pictures, because a drafter meets no others. Only tokens are kept; features are made again when they are
needed, which costs a pass of teacher forcing and saves gigabytes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from vargen.decoding import Sampling, decode
from vargen.files import atomic_file
from vargen.models.condition import Condition
from vargen.pipelines import validation as checks
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.training.dataset import CaptionedImages
from vargen.training.heads_config import HeadConfig
from vargen.weight_files import load_npz, weights_digest

logger = logging.getLogger("vargen")


class PromptSource(Protocol):
    """What pictures are drawn of: a function of the picture's number, and of whether it is held out."""

    name: str

    def __call__(self, numbers: Sequence[int], held_out: bool) -> Condition: ...


class Prompts:
    """Captions that the pipeline's text encoder reads; those of held-out pictures are others."""

    def __init__(self, pipe: LlamaGenPipeline, train: Sequence[str], held_out: Sequence[str], name: str):
        self.pipe, self.texts, self.name = pipe, {False: list(train), True: list(held_out)}, name

    @classmethod
    def of_data(cls, pipe: LlamaGenPipeline, data: CaptionedImages, count: int) -> Prompts:
        """Captions of the data set's two splits, as training samples them."""
        texts = {}
        for split in ("train", "validation"):
            rng, indices = random.Random(f"drafter {split}"), data.indices(split).tolist()
            weights = [data.records[i].get("weight", 1.0) for i in indices]
            texts[split] = [data.sample_caption(i, rng) for i in rng.choices(indices, weights, k=count)]
        return cls(pipe, texts["train"], texts["validation"], "captions of the data set")

    @classmethod
    def of_file(cls, pipe: LlamaGenPipeline, path: Path) -> Prompts:
        """A prompt a line; every tenth is for held-out pictures."""
        lines = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
        if len(lines) < 2:
            raise ValueError(f"prompts file {str(path)!r} must hold at least two prompts, one a line, and holds {len(lines)}")
        kept = lines[::10]
        return cls(pipe, [line for i, line in enumerate(lines) if i % 10], kept, f"prompts of {path.name}")

    def __call__(self, numbers: Sequence[int], held_out: bool) -> Condition:
        texts = self.texts[held_out]
        return self.pipe.condition([texts[number % len(texts)] for number in numbers])[0]


class Classes:
    """Classes in turn."""

    def __init__(self, pipe: LlamaGenPipeline):
        self.pipe, self.name = pipe, "classes"

    def __call__(self, numbers: Sequence[int], held_out: bool) -> Condition:
        count = self.pipe.transformer.config.num_classes
        return self.pipe.condition(class_labels=[(number * 7919) % count for number in numbers])[0]  # a prime: all in turn


class CaptionFile:
    """Caption features `embeds` `[n, P, C]` and their `mask` `[n, P]` of a `.npz` file, for models without a text encoder."""

    def __init__(self, pipe: LlamaGenPipeline, path: Path):
        held = load_npz(path, "embeds", "mask")
        self.pipe, self.name = pipe, f"features of {path.name}"
        self.embeds, self.mask = torch.from_numpy(held["embeds"]), torch.from_numpy(held["mask"]).bool()
        if len(self.embeds) < 2:
            raise ValueError(f"features file {str(path)!r} must hold at least two captions, and holds {len(self.embeds)}")
        self.kept = max(1, len(self.embeds) // 10)  # the last ones, for held-out pictures

    def __call__(self, numbers: Sequence[int], held_out: bool) -> Condition:
        first, count = (len(self.embeds) - self.kept, self.kept) if held_out else (0, len(self.embeds) - self.kept)
        rows = torch.tensor([first + number % count for number in numbers])
        return self.pipe.condition(prompt_embeds=self.embeds[rows], prompt_mask=self.mask[rows])[0]


def select_prompt_source(
    pipe: LlamaGenPipeline,
    count: int,
    data: Callable[[], CaptionedImages] | None,
    prompts: Path | None = None,
    features: Path | None = None,
) -> PromptSource:
    """What to draw of: classes for a model of classes; else caption features, or prompts, or captions of the data set.

    Args:
        count: how many. data: opens a data set, of which only the captions are used.

    Raises:
        ValueError: for files that the model takes none of, both, or none, or prompts without a text encoder.
    """
    if pipe.by_class:
        if prompts or features:
            raise ValueError("this model draws classes: leave prompts and features out")
        return Classes(pipe)
    if prompts and features:
        raise ValueError("give prompts or features, not both")
    if features:
        return CaptionFile(pipe, features)
    if pipe.text_encoder is None:
        raise ValueError("this model has no text encoder: give features, a .npz file with embeds [n, P, C] and mask [n, P]")
    if prompts is not None:
        return Prompts.of_file(pipe, prompts)
    if data is None:
        raise ValueError("this model draws from text: give prompts, a file with one a line, or a data set with captions")
    return Prompts.of_data(pipe, data(), count)


class GeneratedImages:
    """Pictures of a target, drawn batch by batch as they are first needed, each batch a file of its own.

    A run that is killed goes on behind the last whole file.

    Args:
        folder: where they are kept. subjects: what they are of.

    Raises:
        ValueError: for a folder that holds pictures of another target, sampling or subjects.
    """

    def __init__(self, folder: Path, pipe: LlamaGenPipeline, subjects: PromptSource, recipe: HeadConfig):
        self.folder, self.pipe, self.subjects, self.recipe = folder, pipe, subjects, recipe
        self.scale, self.sampling = checks.check_sampling({**pipe.default_sampling, **recipe.sampling})
        self.sampling.check_vocabulary(pipe.vocab)
        self.made_of = (
            f"transformer {weights_digest(pipe.transformer)}, guidance {self.scale}, {self.sampling}, {subjects.name}, "
            f"seed {recipe.seed}, {recipe.draw_batch} at once, {recipe.hot_share} hot, {recipe.held_out} held out"
        )
        self.training = recipe.pictures - recipe.held_out
        self.tokens = np.zeros((recipe.pictures, pipe.tokens), dtype=np.int32)

    def hot(self, number: int) -> bool:
        """Whether a picture is drawn at temperature 1; all of a batch are, or none."""
        batch, share = self._batch(number), self.recipe.hot_share
        return int((batch + 1) * share) > int(batch * share)

    def temperature(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """By which pictures were drawn, float32 `[B]`."""
        usual = self.sampling.temperature
        return torch.tensor([1.0 if self.hot(number) else usual for number in numbers], device=device)

    def condition(self, numbers: Sequence[int]) -> Condition:
        """Of pictures that are all held out, or none."""
        return self.subjects(numbers, numbers[0] >= self.training)

    def draw(self) -> None:
        """Fill `tokens`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        size, parts = self.recipe.draw_batch, (range(self.training), range(self.training, self.recipe.pictures))
        batches = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
        missing = [numbers for numbers in batches if not self._read(numbers)]
        for numbers in tqdm(missing, desc="pictures", disable=None, mininterval=5):
            self._draw(list(numbers))

    def _batch(self, number: int) -> int:
        """The batch that a picture is drawn in; those held out have numbers of their own."""
        late = number >= self.training
        return (number - self.training if late else number) // self.recipe.draw_batch

    def _file(self, first: int) -> Path:
        return self.folder / f"{'held' if first >= self.training else 'drawn'}-{self._batch(first):05d}.npz"

    def _read(self, numbers: Sequence[int]) -> bool:
        path = self._file(numbers[0])
        if not path.is_file():
            return False
        kept = load_npz(path, "made_of", "tokens")
        if str(kept["made_of"]) != self.made_of:
            raise ValueError(
                f"{path} holds pictures of {kept['made_of']}, and these are to be of {self.made_of}; give another folder for "
                "drawn pictures, or remove it"
            )
        if kept["tokens"].shape != (len(numbers), self.tokens.shape[1]):
            return False  # of a run of another length: its last batch was shorter
        self.tokens[list(numbers)] = kept["tokens"]
        return True

    def _draw(self, numbers: list[int]) -> None:
        sampling: Sampling = replace(self.sampling, temperature=1.0) if self.hot(numbers[0]) else self.sampling
        # Held-out pictures get seeds of their own, whatever the number of pictures.
        first = (1 << 40) if numbers[0] >= self.training else 0
        base = numbers[0] - (self.training if first else 0)
        seeds = torch.arange(len(numbers)) + base + first + self.recipe.seed * (1 << 44)
        drawn = decode(self.pipe.token_model(self.scale), self.condition(numbers), seeds, "auto", sampling).tokens
        self.tokens[numbers] = drawn.cpu().numpy()
        with atomic_file(self._file(numbers[0])) as temporary, open(temporary, "wb") as file:
            np.savez(file, tokens=self.tokens[numbers], made_of=np.array(self.made_of))
