"""The images of each visitor, newest first, so that a reloaded page shows them again."""

from __future__ import annotations

import io
import secrets
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vargen.demo.request import PageRequest

MAX_IMAGES_KEPT = 24  # of a visitor, and as many starred ones
_MAX_VISITORS = 512


@dataclass(frozen=True)
class PastImage:
    """One image of a visitor.

    Attributes:
        file: the PNG. request: that generates this image alone. counts: tokens that each pass committed.
        seconds: of its generation, with the images beside it. score: empty without a scorer.
    """

    file: str
    request: PageRequest
    counts: tuple[int, ...]
    seconds: float
    score: str = ""
    starred: bool = False


class VisitStore:
    """The images of the latest visitors, by an unguessable id that their browser keeps."""

    def __init__(self) -> None:
        self._visits: OrderedDict[str, list[PastImage]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, visit: object) -> str:
        """Return the id of a known visit, or that of a new one."""
        with self._lock:
            if isinstance(visit, str) and visit in self._visits:
                self._visits.move_to_end(visit)
                return visit
            made = secrets.token_hex(16)
            self._visits[made] = []
            while len(self._visits) > _MAX_VISITORS:
                self._visits.popitem(last=False)
            return made

    def images(self, visit: object) -> list[PastImage]:
        """Return the images whose files still exist, starred ones first."""
        with self._lock:
            kept = list(self._visits.get(visit, ())) if isinstance(visit, str) else []
        return sorted((each for each in kept if Path(each.file).is_file()), key=lambda each: not each.starred)

    def add(self, visit: object, images: Sequence[PastImage]) -> None:
        """Put new images first; the oldest ones without a star go."""
        with self._lock:
            if not isinstance(visit, str) or visit not in self._visits:
                return
            every = [*reversed(images), *self._visits[visit]]
            plain = [each for each in every if not each.starred][:MAX_IMAGES_KEPT]
            starred = [each for each in every if each.starred][:MAX_IMAGES_KEPT]
            self._visits[visit] = [each for each in every if each in plain or each in starred]

    def toggle_star(self, visit: object, file: str) -> bool:
        """Star an image or remove its star; returns whether it has one now."""
        with self._lock:
            listed = self._visits.get(visit, []) if isinstance(visit, str) else []
            for place, each in enumerate(listed):
                if each.file == file:
                    listed[place] = replace(each, starred=not each.starred)
                    return listed[place].starred
        return False


def zip_images(files: Sequence[str]) -> bytes:
    """Return a ZIP archive of PNG files, numbered in order."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for number, file in enumerate(files, 1):
            opened.write(file, f"{number:02}-{Path(file).name}")
    return archive.getvalue()
