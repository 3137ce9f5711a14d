"""The images of each visitor, newest first, so that a reloaded page shows them again."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vargen.demo.request import PageRequest

MAX_IMAGES_KEPT = 24  # of a visitor
_MAX_VISITORS = 512


@dataclass(frozen=True)
class PastImage:
    """One image of a visitor.

    Attributes:
        file: the PNG. request: that generates this image alone. passes: of its generation.
        seconds: of its generation, with the images beside it. score: empty without a scorer.
    """

    file: str
    request: PageRequest
    passes: int
    seconds: float
    score: str = ""


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
        """Return the images whose files still exist."""
        with self._lock:
            kept = list(self._visits.get(visit, ())) if isinstance(visit, str) else []
        return [each for each in kept if Path(each.file).is_file()]

    def add(self, visit: object, images: Sequence[PastImage]) -> None:
        """Put new images first; the oldest ones go."""
        with self._lock:
            if isinstance(visit, str) and visit in self._visits:
                self._visits[visit] = [*reversed(images), *self._visits[visit]][:MAX_IMAGES_KEPT]
