"""Pictures that a drawing starts from: `--image`, `--mask` and `--strength`, checked before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.files import expand_user

if TYPE_CHECKING:
    from vargen.pipelines.description import ModelInfo


@dataclass(frozen=True)
class Source:
    """Files as they were named, and a strength; all None where a drawing starts from nothing."""

    image: Path | None
    mask: Path | None
    strength: float | None

    @classmethod
    def of(cls, image: Path | None, mask: Path | None, strength: float | None) -> Source:
        """Of a command's options, paths expanded."""
        return cls(image and expand_user(image, "image"), mask and expand_user(mask, "mask"), strength)

    def files(self) -> dict[str, Sequence[Path | None]]:
        """By option, for messages."""
        return {"image": [self.image], "mask": [self.mask]}

    def opened(self, model: ModelInfo) -> dict[str, Any]:
        """Arguments of a pipeline's call; none where nothing was named.

        Raises:
            ValueError: for a model that starts from no picture, a file that is none, or what `check_source` refuses.
        """
        given = {"image": self.image, "mask": self.mask, "strength": self.strength}
        named = {name: value for name, value in given.items() if value is not None}
        if not named:
            return {}
        if model.image_size is None:
            raise ValueError(f"{next(iter(named))} must be left out: this model starts from no picture; next-scale models do")
        from diffusers.image_processor import VaeImageProcessor

        from vargen.pipelines.redraw import check_source

        pictures = {name: read_source(path, name) for name, path in (("image", self.image), ("mask", self.mask)) if path}
        check_source(pictures.get("image"), pictures.get("mask"), self.strength, model.image_size, VaeImageProcessor())
        return {**pictures, **({} if self.strength is None else {"strength": self.strength})}

    def told(self) -> dict[str, Any]:
        """What a picture's PNG says of it: names of files without their folders."""
        said = {"image": self.image and self.image.name, "mask": self.mask and self.mask.name, "strength": self.strength}
        return {name: value for name, value in said.items() if value is not None}


def read_source(path: Path, name: str) -> Any:
    """The picture in a file, upright, in RGB.

    Args:
        name: of the option that gave it.

    Raises:
        ValueError: naming both, if it is none that can be read.
    """
    from PIL import ImageOps

    from vargen.picture_files import on_white, opened_picture

    with opened_picture(path, name) as opened:
        return on_white(ImageOps.exif_transpose(opened))
