"""What the pages' code asks for."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder of random weights that draws 16 tokens of text, with a small model beside it."""
    from tiny_models import text_pipeline

    folder = tmp_path_factory.mktemp("models") / "tiny"
    text_pipeline(grid_size=6).save_pretrained(folder)
    return folder
