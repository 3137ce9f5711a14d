"""Seeds of images and videos from torch generators, such that each seed reproduces its image on its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ImageSeeds(NamedTuple):
    """Seeds of the images of a call.

    Attributes:
        seeds, devices: per image, of a generator that reproduces this image on its own.
        noise_seeds: int64 `[images]`, the key of the image's counter-based noise: the first number from such a generator.
    """

    seeds: list[int]
    noise_seeds: Tensor
    devices: list[torch.device]

    def select_rows(self, rows: slice) -> ImageSeeds:
        """Return the seeds of some images."""
        return ImageSeeds(self.seeds[rows], self.noise_seeds[rows], self.devices[rows])

    def for_candidates(self, count: int) -> ImageSeeds:
        """Return the seeds of `count` candidates per image: its own, and 32-bit ones that follow from it."""
        sources = []
        for seed, device in zip(self.seeds, self.devices, strict=True):
            source = torch.Generator().manual_seed(seed)
            more = [_next_int64(source) % 2**32 for _ in range(count - 1)]
            sources += [torch.Generator(device).manual_seed(each) for each in (seed, *more)]
        return resolve_seeds(sources, len(sources))


def resolve_seeds(generator: Any, images: int) -> ImageSeeds:
    """Return one seed per image such that `torch.Generator(device).manual_seed(seeds[i])` reproduces image i on its own.

    A list has one generator per image. A single generator, None for torch's global one, is used for all images in turn. An
    unused generator contributes its initial seed; from one that has produced numbers already, a new 32-bit seed is sampled.
    """
    if isinstance(generator, list | tuple) and len(generator) != images:
        raise ValueError(f"generator must be one, or one per image of all prompts, got {len(generator)} for {images}")
    sources = list(generator) if isinstance(generator, list | tuple) else [generator] * images
    sources = [torch.default_generator if source is None else source for source in sources]
    seeds, noise = [], []
    for each in sources:
        if not isinstance(each, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, a list of them, or None, got {type(each).__name__}")
        seed, number = next_seeds(each)
        seeds.append(seed)
        noise.append(number)
    return ImageSeeds(seeds, torch.tensor(noise, dtype=torch.int64), [each.device for each in sources])


def next_seeds(source: torch.Generator) -> tuple[int, int]:
    """Return the seed of the next image of a generator, and the key of its noise."""
    seed, number = source.initial_seed(), _next_int64(source)
    if number != _next_int64(torch.Generator(source.device).manual_seed(seed)):  # not its first number
        seed = number % 2**32  # CPU generators use only the low 32 bits of a seed
        number = _next_int64(torch.Generator(source.device).manual_seed(seed))
    return seed, number


def _next_int64(source: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=source, device=source.device, dtype=torch.int64))
