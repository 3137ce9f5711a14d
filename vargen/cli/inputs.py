"""Inputs of a command: prompts, class labels, and the source images of `--image` and `--mask-image`."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.cli.console import print_status
from vargen.files import expand_user
from vargen.reading import STDIN, read_text

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

MAX_IMAGES = 1_000_000  # per command: more than any published evaluation has, and small enough for memory
_MAX_BYTES = 2**26  # size limit of a prompt file


@dataclass(frozen=True)
class SourceFiles:
    """Input files as named by the user, and a strength; all None for generation from scratch."""

    image: Path | None
    mask: Path | None
    strength: float | None

    @classmethod
    def expand(cls, image: Path | None, mask: Path | None, strength: float | None) -> SourceFiles:
        """Create it from a command's options, with `~` in paths expanded."""
        return cls(image and expand_user(image, "image"), mask and expand_user(mask, "mask_image"), strength)

    def files(self) -> dict[str, Sequence[Path | None]]:
        """Return the files by option name, for messages."""
        return {"image": [self.image], "mask_image": [self.mask]}

    def load(self, model: VisualPipeline) -> dict[str, Any]:
        """Return the arguments for a pipeline call; none if no file was given."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not given:
            return {}
        if model.image_size is None:
            raise ValueError(f"{next(iter(given))} must be left out: only next-scale models start from an image")
        from diffusers.image_processor import VaeImageProcessor

        from vargen.pipelines.images import validate_source

        images = {"image": read_source(self.image, "image")} if self.image else {}
        if self.mask:
            images["mask_image"] = read_source(self.mask, "mask_image", keep_alpha=True)
        validate_source(images.get("image"), images.get("mask_image"), self.strength, model.image_size, VaeImageProcessor())
        return {**images, **({} if self.strength is None else {"strength": self.strength})}

    def metadata(self) -> dict[str, Any]:
        """Return what an image's PNG records about its source: file names without their folders."""
        values = {"image": self.image and self.image.name, "mask": self.mask and self.mask.name, "strength": self.strength}
        return {name: value for name, value in values.items() if value is not None}


def read_source(path: Path, name: str, keep_alpha: bool = False) -> Any:
    """Read an image file as RGB, with its EXIF orientation applied.

    Args:
        name: the option that gave the path. keep_alpha: keep the mode of the file, in which a mask may be transparent.
    """
    from vargen.reading import apply_orientation, on_white, open_image

    with open_image(path, name) as opened:
        return apply_orientation(opened).copy() if keep_alpha else on_white(opened)


def report_emoji_names(pipe: Any, prompts: list[str]) -> None:
    """Print a line to stderr about the characters in prompts that the model reads as names, if there are any."""
    read = {typed: name for prompt in prompts for typed, name in pipe.normalize_prompt(prompt).names.items()}
    if read:
        print_status("read " + ", ".join(f'"{typed}" as "{name}"' for typed, name in read.items()))


def collect_prompts(prompts: list[str] | None, prompt_file: Path | None, class_label: list[str] | None) -> list[str]:
    """Return the prompts (from standard input for `-`), or the class labels as typed."""
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
    words = prompts or []
    if len(words) > 1 and not any(" " in word for word in words):
        hint = shlex.quote(" ".join(words)[:40])
        print_status(f"{len(words)} prompts of one word each. Quote a prompt of several words: vargen generate {hint}")
    return listed


def read_prompts(path: Path, name: str = "prompt_file") -> list[str]:
    """Read one prompt per line from a UTF-8 text file, or from standard input for `-`.

    Args:
        name: the option's name, for errors.
    """
    lines = [line.strip() for line in read_text(path, name, _MAX_BYTES).split("\n")]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{name} {str(path)!r} contains no prompt; write one per line, without a leading #")
    if len(found) > MAX_IMAGES:
        raise ValueError(f"{name} {str(path)!r} must contain at most {MAX_IMAGES:,} prompts, got {len(found):,}")
    return found


def packaged_prompts() -> Path:
    """Return the file of the 64 packaged prompts, the default of `vargen eval`."""
    import vargen.assets

    return Path(vargen.assets.__file__).parent / "prompts.txt"


def parse_class_labels(labels: list[str], model: VisualPipeline) -> list[int]:
    """Return the class numbers of labels given by number or name."""
    from vargen.pipelines import validation

    # Python does not parse integers of thousands of digits; no class label has more than nine.
    typed = [int(label) if label.strip().lstrip("-").isdecimal() and len(label) < 1000 else label for label in labels]
    return validation.resolve_class_labels(typed, model.num_classes, model.class_names)
