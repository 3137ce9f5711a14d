"""The direction of imports: the tree is the design, and this file is where that is enforced.

`app -> demo -> {serving, pipelines, decoding}`; `cli -> serving -> {pipelines, decoding}`;
`cli -> pipelines -> {adapters, models, decoding, scoring, convert} -> kernels`; `adapters -> {models, decoding}`;
`evaluation, training -> pipelines, adapters, models, decoding, scoring`, and `evaluation -> kernels`;
`recipes -> anything`, and nothing imports recipes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vargen

# Part -> the parts it may import. Everything may also import itself and what _COMMON lists.
_ALLOWED: dict[str, set[str]] = {
    "app": {"pipelines", "demo", "scoring"},
    "demo": {"serving", "pipelines", "decoding", "scoring"},  # the methods that it lists are data of decoding
    "cli": {"pipelines", "models", "decoding", "scoring", "convert", "kernels", "evaluation", "training", "serving"},
    "serving": {"pipelines", "decoding"},
    "pipelines": {"adapters", "models", "decoding", "scoring", "convert"},
    "adapters": {"models", "decoding"},  # the only part that sees both
    "evaluation": {"pipelines", "adapters", "models", "decoding", "scoring", "kernels"},  # it times the kernels
    "training": {"pipelines", "adapters", "models", "decoding", "scoring"},
    "models": {"kernels"},
    "decoding": {"kernels", "device_profiles"},
    "scoring": {"models", "kernels"},  # a scorer is a network with a measure on top
    "convert": {"models", "kernels"},  # adapters from official parameter names
    "kernels": {"device_profiles"},
    "assets": set(),
    "compat": set(),
    "device": {"device_profiles"},
    "device_profiles": set(),
    "files": set(),
    "image_metadata": set(),
    "model_files": set(),
    "mp4": set(),
    "options": {"values"},
    "reading": {"files"},
    "specs": {"values"},
    "values": set(),
    "weight_files": {"files", "values"},
}
_ALLOWED["recipes"] = set(_ALLOWED)
_COMMON = {
    "vargen", "assets", "compat", "deprecation", "device", "device_profiles", "files", "image_metadata", "model_files",
    "mp4", "options", "reading", "specs", "values", "weight_files",
}  # fmt: skip
_ROOT_FOLDERS = ("pipelines", "kernels", "assets")


def module_name(path: Path, root: Path) -> tuple[str, bool]:
    """Import name of a source file of the repository, and whether it is a package's `__init__`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[0] in _ROOT_FOLDERS:
        parts.insert(0, "vargen")
    package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if package else parts), package


def imported(tree: ast.AST, module: str, package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, at any depth, relative imports resolved.

    `from vargen import X` counts as an import of the module that X lives in: the lazy root is no way around.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")
            base = above[: len(above) - node.level + package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin != "vargen":
                yield node.lineno, origin
                continue
            for alias in node.names:
                names = vargen._HOMES if alias.name == "*" else [alias.name]
                for name in names:
                    is_part = name in _ALLOWED
                    yield node.lineno, vargen._HOMES.get(name, f"vargen.{name}" if is_part else "vargen")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def part_of(name: str) -> str:
    """The part of the tree a dotted name of ours belongs to: its second component, or the root itself."""
    first, *rest = name.split(".")
    return first if first != "vargen" or not rest else rest[0]


def violations(source: str, module: str, package: bool = False) -> list[str]:
    """Every import in a source text that the direction of imports forbids, as readable lines."""
    part = part_of(module)
    found = []
    for line, name in imported(ast.parse(source), module, package):
        if name.split(".")[0] in _ROOT_FOLDERS:
            found.append(f"{module}:{line} imports {name} bare: its name is vargen.{name}")
        elif name.split(".")[0] == "app" and part != "app":
            found.append(f"{module}:{line} imports {name}: nothing imports the app")
        elif name.split(".")[0] == "recipes" and part != "recipes":
            found.append(f"{module}:{line} imports {name}: nothing imports recipes, which are not in the wheel")
        elif name.split(".")[0] == "vargen" and part != "vargen":
            if part not in _ALLOWED:
                found.append(f"{module}:{line} is in no known part of the tree: {part!r}")
                break
            # kernels stands alone; its one exception is the way around its shadowed name.
            common = {"compat"} if part == "kernels" else _COMMON
            if (target := part_of(name)) not in {part} | common | _ALLOWED[part]:
                found.append(f"{module}:{line} imports {name}: {part} may not import {target}")
    return found


def sources(root: Path) -> list[Path]:
    folders = ("vargen", "recipes", *_ROOT_FOLDERS)
    found = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return found + [path for path in [root / "app.py"] if path.exists()]


def test_direction_of_imports(repo_root: Path) -> None:
    paths = sources(repo_root)
    assert len(paths) > 10
    found = [v for p in paths for v in violations(p.read_text("utf-8"), *module_name(p, repo_root))]
    assert not found, "\n".join(found)


def test_tests_import_the_installed_package(repo_root: Path) -> None:
    """Bare names would be a second copy of the modules, with classes that are not the same classes."""
    found = []
    for path in sorted((repo_root / "tests").rglob("*.py")):
        for line, name in imported(ast.parse(path.read_text("utf-8")), "tests", False):
            if name.split(".")[0] in _ROOT_FOLDERS:
                found.append(f"{path.name}:{line} imports {name} bare")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vargen.models.tokenizers.vq", "from vargen.decoding import loop"),
        ("vargen.models.tokenizers.vq", "import vargen.decoding.next_token.loop as d"),
        ("vargen.models.tokenizers.vq", "from vargen import decoding"),
        ("vargen.models.tokenizers.vq", "from ...decoding import loop"),
        ("vargen.models.tokenizers.vq", "from ... import decoding"),
        ("vargen.models.tokenizers.vq", "from vargen import Accelerator"),
        ("vargen.models.tokenizers.vq", "from vargen import *"),
        ("vargen.models.tokenizers.vq", "def f():\n    if True:\n        from vargen.decoding import loop"),
        ("vargen.models.tokenizers.vq", "import importlib\nimportlib.import_module('vargen.decoding.next_token.loop')"),
        ("vargen.models.tokenizers.vq", "if TYPE_CHECKING:\n    from vargen.decoding import Draft"),
        ("vargen.decoding.next_token.loop", "from vargen.models.llamagen import LlamaGenTransformer"),
        ("vargen.decoding.next_token.loop", "from vargen import LlamaGenTransformer"),
        ("vargen.decoding.next_token.loop", "import vargen.pipelines"),
        ("vargen.scoring.clip", "import vargen.pipelines.llamagen"),
        ("vargen.convert.llamagen", "from vargen.pipelines import llamagen"),
        ("vargen.kernels.attention", "from vargen.models import vq"),
        ("vargen.kernels.attention", "from vargen import assets"),
        ("vargen.kernels.attention", "from ..decoding import loop"),
        ("vargen.pipelines.llamagen", "from vargen.evaluation import fid"),
        ("vargen.pipelines.llamagen", "from vargen.cli.main import main"),
        ("vargen.evaluation.fid", "from vargen.training import generator"),
        ("vargen.training.generator", "from vargen.convert import llamagen"),
        ("vargen.cli.main", "import kernels"),
        ("vargen.cli.main", "from pipelines.llamagen import LlamaGenPipeline"),
        ("vargen.cli.main", "import app"),
        ("vargen.training.generator", "import recipes.train_var"),
        ("recipes.train_var", "from pipelines import checks"),
        ("recipes.train_var", "import app"),
        ("vargen.compat", "from vargen.models import vq"),
        ("vargen.helpers", "import vargen.compat"),
        ("vargen", "import assets"),
        ("app", "from vargen.models import vq"),
        ("vargen.demo.image_service", "from vargen.models import vq"),
        ("vargen.demo.image_service", "from vargen.training import dataset"),
        ("vargen.pipelines.llamagen", "from vargen.demo import page"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vargen.models.tokenizers.vq", "from vargen.kernels import dispatch\nfrom vargen.compat import x"),
        ("vargen.models.tokenizers.vq", "from .llamagen import x\nfrom . import llamagen\nimport torch, kernels_x"),
        ("vargen.models.tokenizers.vq", "from vargen import __version__"),
        ("vargen.pipelines.llamagen", "from vargen.models.tokenizers.vq import x\nfrom vargen import decoding, assets"),
        ("vargen.pipelines.llamagen", "from ..convert import llamagen"),
        ("vargen.evaluation.fid", "from vargen import LlamaGenPipeline"),
        ("vargen.convert.llamagen", "from vargen.models.llamagen import LlamaGenTransformer"),
        ("vargen.cli.main", "def f():\n    from vargen.training import tokenizer"),
        ("vargen", "from vargen.pipelines.llamagen import LlamaGenPipeline"),
        ("vargen.demo.image_service", "from vargen.decoding import PRESETS\nfrom vargen.pipelines import checks"),
        ("app", "from vargen.demo import page"),
        ("app", "from vargen import LlamaGenPipeline\nfrom vargen.assets import packaged_models"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_in_an_init_start_at_the_package() -> None:
    assert violations("from .llamagen import x", "vargen.models", package=True) == []
    assert violations("from ..decoding import x", "vargen.models", package=True)


def test_root_folders_have_one_import_name(tmp_path: Path) -> None:
    assert module_name(tmp_path / "pipelines/llamagen.py", tmp_path) == ("vargen.pipelines.llamagen", False)
    assert module_name(tmp_path / "kernels/__init__.py", tmp_path) == ("vargen.kernels", True)
    assert module_name(tmp_path / "vargen/models/tokenizers/vq.py", tmp_path) == ("vargen.models.tokenizers.vq", False)
