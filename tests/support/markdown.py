"""Reads what Markdown pages promise: code blocks, links, headings."""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?:<!-- needs (?P<needs>\S+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. `needs` is the public name without which it cannot run, from a comment before it; `file` the file that
    its first line names."""

    page: str
    language: str
    code: str
    needs: str | None

    @property
    def file(self) -> str | None:
        first = re.match(r"# (\w+\.py)\n", self.code)
        return first[1] if first else None

    @property
    def runs(self) -> bool:
        """Whether what it needs is there."""
        module, _, name = (self.needs or "sys.path").rpartition(".")
        try:
            return hasattr(importlib.import_module(module), name)
        except ImportError:
            return False


def pages(root: Path) -> list[Path]:
    """Every page for readers, beside those of assets/."""
    folders = [root / "docs", root / "benchmarks"]
    return sorted([*root.glob("*.md"), root / "docs/dev/log.md", *(page for folder in folders for page in folder.glob("*.md"))])


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, of one language or all."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    read = [Block(page.name, match["language"], match["code"], match["needs"]) for match in found]
    return [block for block in read if language is None or block.language == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of links and pictures, those of the web left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """What a heading is linked by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path, program: str) -> list[list[str]]:
    """The words behind `program` wherever a shell block of a page runs it, up to a pipe or the next command."""
    found = []
    for block in blocks(page, ""):
        for line in block.code.replace("\\\n", " ").splitlines():
            if f"{program} " not in line:
                continue
            for part in _split(shlex.split(line.removeprefix("$ "), comments=True)):
                while part and (re.match(r"[A-Z_]+=", part[0]) or part[0] == "export"):
                    part = part[1:]
                if part and part[0] == program:
                    found.append(part[1:])
    return found


def _split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("|", "&&", ";", ">"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts
