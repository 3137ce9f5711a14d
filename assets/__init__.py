"""Packaged checkpoints, their data cards, sample prompts. Imported as `vargen.assets`.

A folder in here that holds a `model_index.json` is a packaged model; its name is its path in here ("emoji").
"""

from difflib import get_close_matches
from pathlib import Path

if __name__ == "assets":  # found bare through sys.path: this name may belong to another distribution
    from vargen.compat import defer_to_installed_package

    defer_to_installed_package(__name__, __path__[0])

__all__ = ["packaged_model_path", "packaged_models"]

_FOLDER = Path(__file__).parent


def packaged_models() -> list[str]:
    """Names of the models that come with the library, sorted."""
    found = _FOLDER.rglob("*/model_index.json")
    return sorted(index.parent.relative_to(_FOLDER).as_posix() for index in found)


def packaged_model_path(name: str) -> Path:
    """Folder of a packaged model, for `from_pretrained`.

    Raises:
        ValueError: no packaged model has that name; the message gives the nearest names, or all.
    """
    names = packaged_models()
    if name not in names:
        near = get_close_matches(name, names) or names
        choice = ", ".join(map(repr, near)) if near else "none is packaged"
        raise ValueError(f"unknown packaged model {name!r}: expected {choice}")
    return _FOLDER / name
