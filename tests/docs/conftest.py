"""What the pages' code asks for."""

from pathlib import Path

import pytest

import vargen
from vargen import LlamaGenPipeline


@pytest.fixture
def open_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vargen.open_pipeline`, where it is still to come: the one family there is."""
    if "open_pipeline" not in vargen.__all__:
        monkeypatch.setattr(vargen, "open_pipeline", LlamaGenPipeline.from_pretrained, raising=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder of random weights that draws 16 tokens of text, with a small model beside it."""
    from tiny_models import text_pipeline

    folder = tmp_path_factory.mktemp("models") / "tiny"
    text_pipeline(grid_size=6).save_pretrained(folder)
    return folder
