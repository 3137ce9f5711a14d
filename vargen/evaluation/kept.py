"""On-disk cache of measurements of image chunks, each with its digest: damaged or modified entries are ignored."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vargen.evaluation.run_directory import cannot_write, file_slug
from vargen.files import atomic_file
from vargen.reading import open_regular

if TYPE_CHECKING:
    from vargen.evaluation.measurement import Chunk, Instruments

Rows = dict[str, np.ndarray]  # columns of numbers of a chunk or a group, each with `items`
DRIFT = "drift"
_MADE_OF, _DIGEST = "made_of", "digest"


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return sixty-four hexadecimal digits that change with any name, dtype, shape or value of the arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Kept:
    """The cache of chunks, keyed by what they were computed from. Instruments without an identity are not cached.

    Opens the instruments for their names and identities, so instruments that cannot be opened fail early.
    """

    def __init__(self, folder: Path | None, instruments: Instruments):
        self.folder, self.resize = folder, instruments.resize
        self.names, self.identities = {DRIFT: DRIFT}, {DRIFT: DRIFT}
        for key, instrument in instruments.opened().items():
            self.names[key] = instrument.name
            if isinstance(identity := getattr(instrument, "identity", None), str):
                self.identities[key] = identity

    def _file(self, chunk: Chunk, name: str) -> Path | None:
        if self.folder is None or name not in self.identities:
            return None
        return self.folder / file_slug(self.names[name]) / file_slug(chunk.group) / f"{chunk.number:05d}.npz"

    def _made_of(self, chunk: Chunk, name: str) -> str:
        pictures = [(p.item, p.sha256, p.text, p.against) for p in chunk.pictures]
        return hashlib.sha256(json.dumps([self.identities[name], self.resize, pictures]).encode()).hexdigest()

    def held(self, chunk: Chunk, name: str) -> Rows | None:
        """Return the cached measurements of exactly these images; None if there are none, or the entry was modified."""
        file = self._file(chunk, name)
        if file is None:
            return None
        try:
            with open_regular(file) as opened, np.load(io.BytesIO(opened.read()), allow_pickle=False) as held:
                columns = {column: held[column] for column in held}
            digest = str(columns.pop(_DIGEST))
            if str(columns[_MADE_OF]) != self._made_of(chunk, name) or digest != arrays_digest(columns):
                return None
        except Exception:  # damaged: numpy, zipfile and zlib each raise their own types; measured again
            return None
        del columns[_MADE_OF]
        count = len(chunk.pictures)
        right = all(len(array) == count and (name == DRIFT or np.isfinite(array).all()) for array in columns.values())
        return columns if right else None

    def keep(self, chunk: Chunk, name: str, arrays: Rows) -> None:
        """Cache measurements. Raises OSError if the disk is full, or the file cannot be written for another reason."""
        file = self._file(chunk, name)
        if file is None:
            return
        columns: dict[str, Any] = {_MADE_OF: np.array(self._made_of(chunk, name)), **arrays}
        columns[_DIGEST] = np.array(arrays_digest(columns))
        try:
            with atomic_file(file) as temporary, open(temporary, "wb") as opened:
                np.savez(opened, **columns)
        except OSError as error:
            raise cannot_write(str(file), error) from error
