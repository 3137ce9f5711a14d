"""Tiny pipeline folders with random weights, and a way to call the command."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import class_pipeline, infinity_pipeline, text_pipeline, text_var_pipeline
from typer.testing import CliRunner, Result

from vargen.cli.main import app
from vargen.pipelines.llamagen import LlamaGenPipeline

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("generate", ...)` in an empty current folder, as a user would call it; `.stdout` and `.stderr` are apart."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    runner = CliRunner()
    return lambda *words: runner.invoke(app, [str(word) for word in words])


@pytest.fixture
def full_disk(run: Run) -> Callable[[int], Run]:
    """`full_disk(size)` is `run` while no file may grow beyond `size` bytes: the kernel itself refuses, as on a full disk."""
    resource = pytest.importorskip("resource")

    def limited(size: int) -> Run:
        def call(*words: object) -> Result:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            try:
                return run(*words)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        return call

    return limited


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder that generates 8 x 8 images of text."""
    folder = tmp_path_factory.mktemp("models") / "tiny-text"
    LlamaGenPipeline(**text_pipeline(cls_token_num=16).components, defaults={"guidance_scale": 2.0}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder of ten classes, two of them named."""
    folder = tmp_path_factory.mktemp("models") / "tiny-class"
    id2label = {0: "tench, Tinca tinca", 1: "goldfish"}
    LlamaGenPipeline.from_pipe(class_pipeline(), id2label=id2label).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def scale_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A next-scale pipeline folder that generates 8 x 8 images of text, with a smaller model to draft with."""
    folder = tmp_path_factory.mktemp("models") / "tiny-scales"
    text_var_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder of Infinity that generates 12 x 12 images of text, with a smaller model to draft with."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bits"
    infinity_pipeline().save_pretrained(folder)
    return folder
