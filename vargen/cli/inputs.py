"""Input images and prompts of a command: `--image`, `--mask` and `--strength` are checked before any weight is read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.cli.console import say
from vargen.files import expand_user
from vargen.reading import STDIN, read_text

if TYPE_CHECKING:
    from vargen.pipelines.model_info import ModelInfo


@dataclass(frozen=True)
class Source:
    """Input files as named by the user, and a strength; all None for generation from scratch."""

    image: Path | None
    mask: Path | None
    strength: float | None

    @classmethod
    def of(cls, image: Path | None, mask: Path | None, strength: float | None) -> Source:
        """Create a source from a command's options, with paths expanded."""
        return cls(image and expand_user(image, "image"), mask and expand_user(mask, "mask"), strength)

    def files(self) -> dict[str, Sequence[Path | None]]:
        """Return the files by option name, for messages."""
        return {"image": [self.image], "mask": [self.mask]}

    def opened(self, model: ModelInfo) -> dict[str, Any]:
        """Return the arguments for a pipeline call; none if no file was given.

        Raises:
            ValueError: for a model that does not support an input image, a file that is not an image, or input that
                `check_source` rejects.
        """
        given = {"image": self.image, "mask": self.mask, "strength": self.strength}
        named = {name: value for name, value in given.items() if value is not None}
        if not named:
            return {}
        if model.image_size is None:
            raise ValueError(f"{next(iter(named))} must be left out: this model starts from no picture; next-scale models do")
        from diffusers.image_processor import VaeImageProcessor

        from vargen.pipelines.images import check_source

        pictures = {name: read_source(path, name) for name, path in (("image", self.image), ("mask", self.mask)) if path}
        check_source(pictures.get("image"), pictures.get("mask"), self.strength, model.image_size, VaeImageProcessor())
        return {**pictures, **({} if self.strength is None else {"strength": self.strength})}

    def told(self) -> dict[str, Any]:
        """Return what an image's PNG records about its source: file names without their folders."""
        said = {"image": self.image and self.image.name, "mask": self.mask and self.mask.name, "strength": self.strength}
        return {name: value for name, value in said.items() if value is not None}


def read_source(path: Path, name: str) -> Any:
    """Read an image file as RGB, with its EXIF orientation applied.

    Args:
        name: the option that gave the path.

    Raises:
        ValueError: with option and path, if the file is not a readable image.
    """
    from PIL import ImageOps

    from vargen.reading import on_white, open_image

    with open_image(path, name) as opened:
        return on_white(ImageOps.exif_transpose(opened))


if TYPE_CHECKING:
    from vargen.pipelines.model_info import ModelInfo


MOST_PICTURES = 1_000_000  # per command: more than any published evaluation has, and small enough for memory
_MOST_BYTES = 2**26  # size limit of a prompt file


def say_names(pipe: Any, prompts: list[str]) -> None:
    """Print a line to stderr about the characters in prompts that the model reads as names, if there are any."""
    read = {typed: name for prompt in prompts for typed, name in pipe.normalize_prompt(prompt).names.items()}
    if read:
        say("read " + ", ".join(f'"{typed}" as "{name}"' for typed, name in read.items()))


def subjects_of(prompts: list[str] | None, prompt_file: Path | None, class_label: list[str] | None) -> list[str]:
    """Return the prompts (from standard input for `-`), or the class labels as typed.

    Raises:
        ValueError: if none or both are given, or if standard input is named twice.
    """
    from vargen.pipelines import validation as checks

    if class_label:
        if prompts or prompt_file:
            raise ValueError("give prompts or --class-label, not both")
        return class_label
    if [*(prompts or []), str(prompt_file)].count(STDIN) > 1:
        raise ValueError("prompts can come from standard input once, and '-' is given twice")
    parts = [read_prompts(Path(STDIN), "prompt") if prompt == STDIN else [prompt] for prompt in prompts or []]
    listed = [*itertools.chain.from_iterable(parts), *(read_prompts(prompt_file) if prompt_file else [])]
    if not listed:
        raise ValueError('give a prompt, for example: vargen generate "a red apple"')
    return checks.check_prompts(listed)


def read_prompts(path: Path, name: str = "prompt_file") -> list[str]:
    """Read one prompt per line from a UTF-8 text file, or from standard input for `-`.

    Args:
        name: the option's name, for errors.

    Raises:
        ValueError: if it is not a regular file, is too long or not UTF-8, or contains no prompt.
        FileNotFoundError, IsADirectoryError, PermissionError: with the option's name.
    """
    lines = [line.strip() for line in read_text(path, name, _MOST_BYTES).split("\n")]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{name} {str(path)!r} holds no prompt; write one a line, without # in front")
    if len(found) > MOST_PICTURES:
        raise ValueError(f"{name} {str(path)!r} must hold at most {MOST_PICTURES:,} prompts, got {len(found):,}")
    return found


def class_numbers(labels: list[str], model: ModelInfo) -> list[int]:
    from vargen.pipelines import validation as checks

    # Python does not parse integers of thousands of digits; no class label has more than nine.
    typed = [int(label) if label.strip().lstrip("-").isdecimal() and len(label) < 1000 else label for label in labels]
    return checks.check_class_labels(typed, model.num_classes, model.id2label)
