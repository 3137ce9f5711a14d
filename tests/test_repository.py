"""What the repository says of itself agrees: addresses, workflows, hooks and the rule for commit subjects."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_repository_has_one_address(repo_root: Path) -> None:
    urls = tomllib.loads((repo_root / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert read_yaml(repo_root / "CITATION.cff")["repository-code"] == urls["Source"]
    assert all(url.startswith("https://") for url in urls.values())
    assert {"Documentation", "Source", "Issues", "Changelog"} <= set(urls)


def test_workflows_run_what_any_machine_can_run(repo_root: Path) -> None:
    runs = {}
    for path in (repo_root / ".github/workflows").glob("*.yml"):
        workflow = read_yaml(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        runs[path.stem] = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in runs["ci"]
    assert "make test-gpu" in runs["gpu"] and "\ntest-gpu:" in (repo_root / "Makefile").read_text("utf-8")


def test_templates_and_hooks_are_well_formed(repo_root: Path) -> None:
    for name in ("bug_report", "feature_request"):
        form = read_yaml(repo_root / f".github/ISSUE_TEMPLATE/{name}.yml")
        ids = [field["id"] for field in form["body"] if "id" in field]
        assert form["name"] and len(ids) == len(set(ids)) > 1
    (local,) = read_yaml(repo_root / ".pre-commit-config.yaml")["repos"]
    for hook in local["hooks"]:
        assert hook["language"] == "system", "a hook fetches nothing"


@pytest.mark.parametrize(
    ("message", "is_good"),
    [
        ("Add a drafter", True),
        ("Add a drafter\n\nIt is fast.", True),
        ("# a comment of git's\nAdd a drafter", True),
        ("Merge branch 'a very long name' into another very long name of a branch, by git itself", True),
        ("A" * 72, True),
        ("A" * 73, False),
        ("add a drafter", False),
        ("Add a drafter.", False),
        ("Add a drafter\nIt is fast.", False),
        ("", False),
    ],
)
def test_the_subject_of_a_commit_is_checked(repo_root: Path, tmp_path: Path, message: str, is_good: bool) -> None:
    (tmp_path / "message").write_text(message + "\n")
    done = subprocess.run([repo_root / ".ci/check_subject", tmp_path / "message"], capture_output=True, text=True)
    assert (done.returncode == 0) == is_good, done.stderr
    assert is_good or len(done.stderr.splitlines()) == 1
