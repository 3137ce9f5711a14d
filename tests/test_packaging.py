"""One import name, wherever it is installed and wherever Python starts."""

import importlib.resources
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import vargen
from vargen.assets import packaged_model_path, packaged_models

# Folder of the repository -> its place in an installed package.
_FOLDERS = {"vargen": "vargen", "pipelines": "vargen/pipelines", "kernels": "vargen/kernels", "assets": "vargen/assets"}


def python(*args: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    env.pop("PYTHONPATH", None)
    env.pop("PYTHONSAFEPATH", None)  # it keeps the current folder off sys.path: the case under test
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600)


def project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text("utf-8"))


def test_importing_the_root_is_cheap(tmp_path: Path) -> None:
    code = (
        "import sys, time; start = time.process_time(); import vargen, vargen.assets, vargen.compat;"
        "print(time.process_time() - start); assert 'torch' not in sys.modules"
    )
    best = float("inf")
    for _ in range(5):  # time of this process, and the best: a busy machine only ever makes it slower
        done = python("-c", code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        best = min(best, float(done.stdout))
        if best < 0.3:
            return
    pytest.fail(f"import vargen took {best:.2f} s of processor time at best")


def test_the_package_is_found_in_the_folder_that_holds_the_clone(repo_root: Path, tmp_path: Path) -> None:
    """There the clone, a folder of the package's name, comes before the installed package."""
    (tmp_path / "vargen").symlink_to(repo_root, target_is_directory=True)
    code = (
        "import vargen, vargen.pipelines.prompts, vargen.kernels, vargen.assets, vargen.cli.main;"
        "print(vargen.__version__, vargen.assets.packaged_models()[0])"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [vargen.__version__, packaged_models()[0]]


@pytest.mark.parametrize("name", sorted(vargen._HOMES))
def test_public_names_exist(name: str) -> None:
    assert getattr(vargen, name).__name__ == name


def test_every_part_imports_from_elsewhere(tmp_path: Path) -> None:
    code = "import vargen.pipelines, vargen.kernels, vargen.assets; print(vargen.assets.__file__)"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code = "import importlib.util as u; print([name for name in ('pipelines', 'kernels', 'assets') if u.find_spec(name)])"
    assert python("-c", code, cwd=tmp_path).stdout.strip() == "[]", "importable bare"


def test_packages_are_listed_in_full(repo_root: Path) -> None:
    """setuptools takes the list as it is: a folder left out would be missing from the wheel."""
    found = set()
    for folder, mapped in _FOLDERS.items():
        for path in (repo_root / folder).rglob("*.py"):
            inside = path.parent.relative_to(repo_root / folder)
            found.add(".".join([*mapped.split("/"), *inside.parts]))
    assert set(project(repo_root)["tool"]["setuptools"]["packages"]) == found


def test_all_extra_is_the_union(repo_root: Path) -> None:
    extras = project(repo_root)["project"]["optional-dependencies"]
    names = {
        extra: {line.split(";")[0].split("[")[0].split("=")[0].split(">")[0].split("<")[0] for line in lines}
        for extra, lines in extras.items()
    }
    assert names.pop("all") == set().union(
        *(names[extra] for extra in names if extra not in ("ray", "docs", "quantization", "reward"))
    )


def test_core_needs_neither_torchvision_nor_triton(repo_root: Path) -> None:
    core = " ".join(project(repo_root)["project"]["dependencies"])
    assert "torchvision" not in core and "triton" not in core


def test_packaged_models() -> None:
    for name in packaged_models():
        assert (packaged_model_path(name) / "model_index.json").is_file()
        assert importlib.resources.files("vargen.assets").joinpath(name, "model_index.json").is_file()


@pytest.mark.parametrize("name", ["no-such-model", "", "..", "../assets", "/"])
def test_an_unknown_model_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="unknown packaged model"):
        packaged_model_path(name)


# -- The folder kernels/ and a distribution of that name


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for sys.path that holds a distribution called `kernels`, as Hugging Face's is."""
    package = tmp_path / "site/kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from kernels.layer import depth\nWHOSE = 'theirs'\n")
    (package / "layer.py").write_text("from . import __name__ as depth\n")
    info = tmp_path / "site/kernels-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
    return tmp_path / "site"


_THEIRS = """
import importlib.metadata, sys
assert importlib.metadata.version("kernels") == "9.9"
{first}
import kernels, kernels.layer
assert kernels.WHOSE == "theirs" and kernels.layer.depth == "kernels", kernels
assert kernels.__spec__.origin == kernels.__file__ and "site" in kernels.__file__, kernels.__spec__
import vargen.kernels
assert vargen.kernels is not kernels
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_kernels_is_not_shadowed_in_the_root(repo_root: Path, site: Path) -> None:
    # `python -c` puts the current folder first on the path, as `python app.py` does.
    codes = [_THEIRS.format(first=f"import {name}") for name in ("kernels", "kernels.layer", "sys; from kernels import layer")]
    code = (
        f"import os, sys; assert sys.path[0] == ''\nfor code in {codes!r}:\n"
        "    if (child := os.fork()) == 0: exec(code, {}); os._exit(0)\n"  # an error ends the child with status 1
        "    assert os.waitpid(child, 0)[1] == 0"
    )
    done = python("-c", code, cwd=repo_root, path=site)
    assert done.returncode == 0, done.stderr


def test_a_bare_name_that_nobody_owns_is_an_empty_package(repo_root: Path) -> None:
    code = """
from importlib import import_module, util
for name in ("kernels", "pipelines", "assets"):
    bare, ours = import_module(name), import_module(f"vargen.{name}")
    assert bare is not ours and list(bare.__path__) == [] and hasattr(ours, "__path__")
    assert not hasattr(bare, "__version__") and util.find_spec(f"{name}.llamagen") is None
"""
    done = python("-c", code, cwd=repo_root)
    assert done.returncode == 0, done.stderr


# -- The wheel


# Images of the pages, and prompts that only training and blind ratings use.
_LEFT_OUT = (
    "assets/**/*.png", "assets/**/*.webp", "assets/sheet.txt", "assets/everyday.txt", "assets/everyday_second.txt",
    "assets/motion.txt", "assets/moving.txt",
)  # fmt: skip
_MOST_BYTES = 102_000_000  # not compressed, which saves 10 MB and takes seconds; 90 MB are weights


def wanted_files(repo_root: Path) -> set[str]:
    """Every file of the four folders that users need, under the name it has in an installed package."""
    left_out = {path for pattern in _LEFT_OUT for path in repo_root.glob(pattern)}
    assert left_out
    return {
        f"{mapped}/{path.relative_to(repo_root / folder).as_posix()}"
        for folder, mapped in _FOLDERS.items()
        for path in (repo_root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".") and path not in left_out
    }


@pytest.mark.slow
def test_the_wheel_holds_what_users_need_and_works(repo_root: Path, tmp_path: Path) -> None:
    # Built from a copy: setuptools leaves build/ behind, and takes deleted modules from an old one.
    source = tmp_path / "source"
    source.mkdir()
    for folder in _FOLDERS:
        shutil.copytree(repo_root / folder, source / folder)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(repo_root / name, source)
    # What must not get in.
    (source / "assets/__pycache__").mkdir(exist_ok=True)
    (source / "assets/__pycache__/stale.cpython-311.pyc").write_bytes(b"")
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    build = ("--no-build-isolation", "--config-settings=--build-option=--compression=stored", "-w", "wheels", source)
    done = python("-m", "pip", "wheel", *offline, *build, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = (tmp_path / "wheels").glob("vargen-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted_files(repo_root)
    assert "vargen/py.typed" in names
    assert wheel.stat().st_size <= _MOST_BYTES

    done = python("-m", "pip", "install", *offline, "--target", "installed", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    code = """
import importlib.metadata
import vargen, vargen.pipelines, vargen.kernels
from vargen import assets
for part in (vargen, vargen.pipelines, vargen.kernels, assets):
    assert "installed" in part.__file__, part
assert importlib.metadata.version("vargen") == vargen.__version__
for name in assets.packaged_models():
    assert (assets.packaged_model_path(name) / "model_index.json").is_file()
    print(name)
"""
    done = python("-c", code, cwd=tmp_path, path=tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == packaged_models()
