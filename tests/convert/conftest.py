"""Fixtures of the tests of video converters."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_wan import SIZE, TARGET, save_wan

from vargen.convert.causal_video import convert_causal_video


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture
def convert(wan: Path, tmp_path: Path) -> Any:
    """Converts files with the tiny heads and size, to a new folder that is returned."""
    numbers = count()

    def run(*files: Path, **options: Any) -> Path:
        output = tmp_path / ("out" if not (tmp_path / "out").exists() else f"out{next(numbers)}")
        given = {"n_head": TARGET["num_heads"], "size": SIZE, "wan": wan, "output": output, **options}
        return convert_causal_video(list(files), **given)

    return run
