"""The glossary of docs/architecture.md holds in identifiers and pages.

Names of before the glossary remain. Their number may only fall: lower the limits below when it does.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BANNED = frozenset(
    "anew behind chance chances coin coins draw drawing drawn draws elder elders granted halves judge judged lineage picture "
    "pictures stands stood told youngers".split()
)
# Folder -> how many identifiers with a banned word are left in it.
LEFT = {"vargen": 0, "pipelines": 0, "kernels": 0, "recipes": 0, "tests": 24}
PAGES_LEFT = {"README.md": 0, "docs": 5}


def identifiers(file: Path) -> Iterator[str]:
    """Names that a file defines: functions, classes, arguments, and what is assigned to."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def banned_identifiers(root: Path, folder: str) -> set[tuple[str, str]]:
    return {
        (str(file.relative_to(root)), name)
        for file in sorted((root / folder).rglob("*.py"))
        if "build" not in file.parts
        for name in identifiers(file)
        if words(name) & BANNED
    }


@pytest.mark.parametrize("folder", LEFT)
def test_identifiers_use_the_words_of_the_field(repo_root: Path, folder: str) -> None:
    found = banned_identifiers(repo_root, folder)
    assert len(found) <= LEFT[folder], f"use the glossary's words: {sorted(found)[:20]}"


@pytest.mark.parametrize("place", PAGES_LEFT)
def test_pages_use_the_words_of_the_field(repo_root: Path, place: str) -> None:
    path = repo_root / place
    files = [path] if path.is_file() else sorted(path.glob("*.md"))
    lines = [
        f"{file.name}: {line}"
        for file in files
        for line in re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text("utf-8"), flags=re.DOTALL).split("\n")
        if {word.lower() for word in re.findall(r"[A-Za-z]+", line)} & BANNED
    ]
    assert len(lines) <= PAGES_LEFT[place], "use the glossary's words:\n" + "\n".join(lines[:20])


def test_a_banned_word_is_found_in_any_kind_of_name(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "file.py").write_text(
        "def drawn_tokens(coins): ...\nclass JudgedDraft: ...\nx.told = 1\nwithdrawn = 2\n"
    )
    assert {name for _, name in banned_identifiers(tmp_path, "some")} == {"drawn_tokens", "coins", "JudgedDraft", "told"}


SAME_ROLE = {  # public names of two or more modules -> why
    "ImageState": "the state of a batch of images, in the loop of each paradigm",
    "apply_rotary": "rotary positions of two families, whose tables differ",
    "detect_transformer": "the converter of each family",
    "main": "entry point of a program",
    "regenerate": "the command, and what it calls",
    "refuse_swapped_files": "the converters of two families",
    "shared_noise": "the rule of each paradigm that accepts what the image's noise selects",
    "verify_chain": "the rule and its version with kernels",
}


def test_public_names_are_unique(repo_root: Path) -> None:
    homes: dict[str, set[str]] = {}
    for file in (file for folder in ("vargen", "pipelines") for file in (repo_root / folder).rglob("*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(str(file.relative_to(repo_root)))
    repeated = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert repeated.keys() == SAME_ROLE.keys(), {name: repeated.get(name) for name in repeated.keys() ^ SAME_ROLE.keys()}
