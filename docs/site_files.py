"""The hook of mkdocs.yml: which files the site has, and from where. Pages lie there as they do in the repository, so that the
links between them work in both; those of the API are made from `__all__` of the packages."""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "*.md", "CITATION.cff", "LICENSE", "Makefile", "docs/*.md", "examples/*.py", "examples/extending/*.py",
    "benchmarks/*.md", "benchmarks/*.json", "benchmarks/*.png", "benchmarks/*.py", "benchmarks/*.txt",
    "assets/**/*.md", "assets/**/*.png", "assets/**/*.webp", "assets/*.txt", "recipes/**/*.md",
)  # fmt: skip
# Page of the API -> the package whose public names it shows. The folders of the root are imported as parts of vargen.
PACKAGES = {"vargen": "vargen", "decoding": "vargen.decoding", "scoring": "vargen.scoring"}
FOLDERS = {"vargen": "vargen", "pipelines": "vargen/pipelines", "kernels": "vargen/kernels", "assets": "vargen/assets"}
SOURCES = ROOT / "build/api"
# The address of the repository, once there is one.
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {}).get("Source")
# Scripts, images, frames, style sheets and fonts of other servers; links that a reader may follow are none.
_FETCHED = re.compile(r"""<(?:[^>]*\ssrc|link(?![^>]*rel=["']?canonical)[^>]*\shref)=["']?(?:https?:)?//[^>]*>""")


def on_startup(command: str, dirty: bool) -> None:
    """Lay the sources out as they are installed: mkdocstrings reads them there, and imports nothing."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    for folder, place in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            target = SOURCES / place / path.relative_to(ROOT / folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def on_files(files: Files, config: Any) -> Files:
    """The pages and what they show, instead of those of `docs_dir` alone; of the theme's own files, all."""
    kept = [file for file in files if file.generated_by is not None or not _is_ours(file)]
    paths = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file()})
    ours = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in paths]
    api = [File.generated(config, f"api/{page}.md", content=make_page(package)) for page, package in PACKAGES.items()]
    return Files([*kept, *ours, *api])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to sources and folders, which the site does not have, lead to the repository; without an address, they are text."""
    folder = (ROOT / page.file.src_uri).parent

    def resolve(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        if files.get_file_from_path(path):
            return match[0]
        return f"[{match[1]}]({SOURCE}/blob/main/{path}{match[3] or ''})" if SOURCE else match[1]

    return re.sub(r"(?<!!)\[([^\[\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)", resolve, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Check that a page fetches nothing from other servers when it is viewed.

    Raises:
        PluginError: naming what it would fetch.
    """
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} would fetch from another server: {found[0][:200]}")
    return output


def make_page(package: str) -> str:
    """Markdown with a directive for each public name of a package."""
    names = [name for name in public_names(package) if not name.startswith("_")]
    return "\n".join([f"# `{package}`", "", *(f"::: {package}.{name}\n" for name in names)])


def public_names(package: str) -> list[str]:
    """`__all__` of a package, read without importing it."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{package} has no __all__")


def _is_ours(file: File) -> bool:
    return file.abs_src_path is not None and Path(file.abs_src_path).is_relative_to(ROOT / "docs")
