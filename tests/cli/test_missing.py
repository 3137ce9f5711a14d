"""What is missing is one sentence: a package, with a command that installs it; a closed standard output."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiny_video_folder import video_folder


def installs(stderr: str, repo_root: Path, extra: str) -> None:
    """One line: a sentence without class or hint, whose command installs what pyproject.toml asks for."""
    (line,) = stderr.strip().splitlines()
    assert line.startswith("error: ") and "ImportError" not in line and "VARGEN_DEBUG" not in line, line
    asked = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    command = re.search(r'pip install "([^"]+)"', line)
    assert command and command[1] in asked, line


def test_mp4_without_pyav(run: Any, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    done = run("generate", "a cat", "--model", video_folder(tmp_path), "-o", "a.mp4", "-q", "--threads", 1)
    assert done.exit_code == 1 and not Path("a.mp4").exists()
    installs(done.stderr, repo_root, "video")


def test_clip_without_open_clip(run: Any, repo_root: Path, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vargen.scoring.clip.installed_version", lambda name: None)
    done = run("eval", "--model", text_model, "-o", "out", "--scorers", "clip:model=ViT-B-32", "--threads", 1)
    assert done.exit_code == 1 and not Path("out").exists()
    installs(done.stderr, repo_root, "eval")


def test_engine_ray_without_ray(run: Any, repo_root: Path, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vargen.evaluation.ray_backend.installed_version", lambda name: None)
    done = run("eval", "--generate-only", "--model", text_model, "-o", "out", "--backend", "ray", "--threads", 1)
    assert done.exit_code == 1 and not Path("out").exists()
    installs(done.stderr, repo_root, "ray")


@pytest.mark.skipif(sys.platform == "win32", reason="closes a file of POSIX")
@pytest.mark.parametrize("closed", ["1", "0 1 2", "2"])
def test_closed_standard_streams_are_reported_in_a_line(closed: str, tmp_path: Path) -> None:
    code = "import os, sys; [os.close(int(n)) for n in sys.argv[1].split()]; "
    code += "os.execv(sys.executable, [sys.executable, '-c', sys.argv[2]])"
    words = ["info", "presets"] if closed == "1" else ["--version"]
    main = f"import sys; sys.argv = ['vargen', *{words}]; from vargen.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, closed, main], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == (1 if "1" in closed else 0)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == ("1" in closed and "2" not in closed), done.stderr
    assert all(line.startswith("error: standard output was not written") for line in lines)
