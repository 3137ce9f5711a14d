"""A folder by which transformers samples image tokens in fewer passes, without vargen: `vargen export custom-generate`.

Its `generate.py` is the module `vargen.in_place.custom_generate`. The functions of vargen that it imports are in a file beside
it, as they are except for branches for NumPy, which only save time on a CPU.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import resources
from pathlib import Path
from types import GenericAlias
from typing import Any

from vargen import __version__
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.methods import resolve_method
from vargen.decoding.rules import shared_noise
from vargen.decoding.speculative import Sequential
from vargen.files import atomic_folder
from vargen.in_place import custom_generate
from vargen.values import short_repr

_LIBRARY = "vargen_functions"
_NUMPY_TESTS = {"uses_numpy", "is_eager_cpu"}
_IMPORTS = re.compile(r"^from vargen\S* import (.*)\n", re.MULTILINE)
_REQUIREMENTS = "torch\ntransformers>=4.56\n"  # the first whose `generate` takes a function as custom_generate


def export_custom_generate(output: Path, method: Any = "gumbel") -> Path:
    """Write a folder for `model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)`; returns its path.

    Args:
        output: a folder that does not exist, or is empty.
        method: `"ar"`, or `"gumbel"` with or without a window, which the folder has as its default.

    Raises:
        ValueError: for other methods.
        FileExistsError: if the folder is not empty.
    """
    window = _read_window(method)
    readme = resources.files("vargen.in_place").joinpath("custom_generate.md").read_text(encoding="utf-8")
    code, library = render_code(window)
    files = {
        "README.md": readme.replace("{version}", __version__).replace("{window}", str(window)),
        "custom_generate/generate.py": code,
        f"custom_generate/{_LIBRARY}.py": library,
        "custom_generate/requirements.txt": _REQUIREMENTS,
    }
    with atomic_folder(output) as folder:
        (folder / "custom_generate").mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return output


def _read_window(method: Any) -> int:
    """Return the number of tokens that a pass of a method feeds; ValueError unless it is `ar`, or `gumbel` with a window."""
    chosen = resolve_method(method)
    drafter, window = chosen.drafter, getattr(chosen.drafter, "window", None)
    if chosen.acceptance is shared_noise and type(drafter) is Sequential:
        return 1
    if chosen.acceptance is shared_noise and isinstance(window, int) and drafter == Jacobi(window, "gumbel"):
        return window
    raise ValueError(f"method must be ar or gumbel, which run without vargen, got {short_repr(chosen.name)}")


def render_code(window: int) -> tuple[str, str]:
    """Return the texts of `generate.py`, which feeds `window` tokens per pass by default, and of the file beside it."""
    text = inspect.getsource(custom_generate)
    names = sorted(name for found in _IMPORTS.findall(text) for name in found.split(", "))
    parts = _Parts()
    for name in names:
        parts.add(name, vars(custom_generate))
    listed = "".join(f"    {name},\n" for name in names)
    first, *others = _IMPORTS.split(text)
    rest = others[-1]
    code = f"{first}from .{_LIBRARY} import (\n{listed})\n{rest}"
    assert "WINDOW = 16\n" in code
    return code.replace("WINDOW = 16\n", f"WINDOW = {window}\n"), parts.render()


class _Parts:
    """Functions, classes and constants of vargen, with what they need, in an order in which they can be executed."""

    def __init__(self) -> None:
        self.constants, self.definitions = dict[str, str](), dict[str, str]()
        self.imports: dict[str, list[str]] = {}  # names by module; none: the module itself

    def add(self, name: str, names: dict[str, Any]) -> None:
        """Add what a name stands for in a module that has these names."""
        value = names[name]
        if name in self.constants or name in self.definitions:
            return
        if inspect.ismodule(value):
            self.imports.setdefault(f"import {name}", [])
        elif isinstance(value, int | float | str | tuple | GenericAlias):
            self.constants[name] = f"{name} = {value!r}"
        elif not value.__module__.startswith("vargen"):
            known = self.imports.setdefault(f"from {value.__module__} import ", [])
            known += [] if name in known else [name]
        else:
            source = _read_source(value)
            module = vars(inspect.getmodule(inspect.unwrap(value)))
            used = {each.id for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Name)}
            for each in sorted(used - {name}):
                if each in module:
                    self.add(each, module)
            self.definitions[name] = source

    def render(self) -> str:
        """Return the text of the file."""
        title = (
            f'"""Functions of vargen {__version__}, copied by `vargen export custom-generate` without branches for NumPy."""'
        )
        imports = [line + ", ".join(sorted(names)) for line, names in self.imports.items()]
        standard = [line for line in sorted(imports) if line.split()[1].split(".")[0] in sys.stdlib_module_names]
        others = sorted(set(imports) - {*standard}, key=lambda line: (line.startswith("from"), line))
        blocks = [["from __future__ import annotations"], standard, others, [*self.constants.values()]]
        head = "\n\n".join([title, *("\n".join(block) for block in blocks)])
        return "\n\n\n".join([head, *self.definitions.values()]) + "\n"


def _read_source(value: Any) -> str:
    """Return the source of a function or class, without decorators and branches for NumPy."""
    lines = inspect.getsource(value).splitlines()
    top = ast.parse("\n".join(lines)).body[0]
    left_out = set(range(1, top.lineno))
    for node in ast.walk(top):
        if isinstance(node, ast.If) and any(
            isinstance(each, ast.Name) and each.id in _NUMPY_TESTS for each in ast.walk(node.test)
        ):
            assert not node.orelse
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in left_out).rstrip()
