"""The npm packages of the emoji data sets: pinned versions, checksums, fetching, reading."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One npm package: its name, version, tarball SHA-256 and the style it contains ("" for the names)."""

    name: str
    version: str
    sha256: str
    style: str

    @property
    def tarball(self) -> str:
        """The file name that ``npm pack`` gives the package."""
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"


SOURCES: tuple[Source, ...] = (
    Source(
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        "3d",
    ),
    Source(
        "@lobehub/fluent-emoji-flat",
        "1.1.0",
        "8f9113c027c7c20eced0070354715a4093a459b8bef6332b91d45f38c9bdb147",
        "flat",
    ),
    Source(
        "@twemoji/svg",
        "15.0.0",
        "1d2907557a422c7c4e3feca50ef915c39da1db3d76b4a4d7e73fb59bce4403c3",
        "twemoji",
    ),
    Source(
        "@iconify-json/noto",
        "1.2.9",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        "noto",
    ),
    Source("emojibase-data", "17.0.0", "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a", ""),
)

# One set of animations in four packages, each WebP file a sequence of code points; emojibase names them.
ANIMATION_SOURCES: tuple[Source, ...] = (
    Source(
        "@lobehub/fluent-emoji-anim-1",
        "1.0.0",
        "4c03ac178c1eabf2e2a16dd498f3cc2b92dc30ec3466ae38fdc497d4774c99ea",
        "anim-1",
    ),
    Source(
        "@lobehub/fluent-emoji-anim-2",
        "1.0.0",
        "e431da8172e394036c330faa77648d6fbbae1fd3b0be95637c4497c9075019c0",
        "anim-2",
    ),
    Source(
        "@lobehub/fluent-emoji-anim-3",
        "1.0.0",
        "3624d0c34c819c1794b74ccf6ae9034adff7c4cb6318dd2a645145f0196feb43",
        "anim-3",
    ),
    Source(
        "@lobehub/fluent-emoji-anim-4",
        "1.0.0",
        "3d4c08f1e321f70808ef4996aba0ab575a9d97b6c56ffffc92cf6161a7836aa3",
        "anim-4",
    ),
    SOURCES[-1],
)


def _verify(path: Path, source: Source) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ValueError(
            f"{path} has SHA-256 {digest}, expected {source.sha256} for {source.name}@{source.version}; "
            "remove the file to fetch it again"
        )


def fetch_sources(cache: Path, sources: tuple[Source, ...] = SOURCES) -> dict[str, Path]:
    """Return the verified tarball of each source in ``cache/npm``, fetching missing ones with ``npm pack``.

    Returns:
        Tarball paths by style ("" for the names).

    Raises:
        ValueError: a tarball does not have its pinned SHA-256 (a fresh download is deleted).
        OSError: npm is missing or fails.
    """
    folder = cache / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    for source in sources:
        path = folder / source.tarball
        if path.exists():
            _verify(path, source)
        else:
            _fetch(source, path)
        found[source.style] = path
    return found


def _fetch(source: Source, path: Path) -> None:
    npm = shutil.which("npm")
    package = f"{source.name}@{source.version}"
    if npm is None:
        raise OSError(f"npm is not installed; install it or put {source.tarball} ({package}) into {path.parent}")
    # A temporary folder: an interrupted or wrong download never gets the final name.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
        command = [npm, "pack", package, "--pack-destination", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"`npm pack {package}` failed with status {done.returncode}: {done.stderr.strip()[-500:]}")
        fetched = Path(scratch) / source.tarball
        if not fetched.exists():
            raise OSError(f"`npm pack {package}` did not write {source.tarball}")
        _verify(fetched, source)
        os.replace(fetched, path)


def read_tarball(path: Path) -> dict[str, bytes]:
    """Read the regular files of a tarball, sorted by their path without the leading folder."""
    members: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                handle = archive.extractfile(member)
                assert handle is not None  # isfile() holds
                members[member.name.partition("/")[2]] = handle.read()
    return dict(sorted(members.items()))
