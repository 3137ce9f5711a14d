"""Tiny pipeline folders with random weights, and a way to call the command."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from vargen.cli.main import app

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


def tiny_transformer(condition: str) -> "torch.nn.Module":
    from vargen.models.llamagen import LlamaGenTransformer

    model = LlamaGenTransformer(
        condition=condition, dim=32, n_layer=2, n_head=2, vocab_size=64, grid_size=4, num_classes=10, caption_dim=48,
        cls_token_num=16, multiple_of=16,
    )  # fmt: skip
    # It starts at zero, which would make every token equally likely whatever the prompt.
    torch.nn.init.normal_(model.output.weight, std=1.0)
    return model


def tiny_vqvae() -> "torch.nn.Module":
    from vargen.models.tokenizers.vq import VQModel

    return VQModel(
        codebook_size=64, codebook_embed_dim=8, ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), num_res_blocks=1,
        z_channels=32,
    )  # fmt: skip


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A pipeline folder that draws 8 x 8 pictures of text."""
    from transformers import AutoTokenizer

    from vargen.models.text_encoder import MiniLMTextEncoder
    from vargen.pipelines.llamagen import LlamaGenPipeline

    folder = tmp_path_factory.mktemp("models") / "tiny-text"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = MiniLMTextEncoder(
            hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, weight_format="float32"
        )
        pipe = LlamaGenPipeline(
            vqvae=tiny_vqvae(),
            transformer=tiny_transformer("text"),
            text_encoder=encoder,
            tokenizer=AutoTokenizer.from_pretrained(repo_root / "assets/emoji/tokenizer"),
            defaults={"guidance_scale": 2.0},
        )
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder that draws ten classes, two of them named."""
    from vargen.pipelines.llamagen import LlamaGenPipeline

    folder = tmp_path_factory.mktemp("models") / "tiny-class"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = LlamaGenPipeline(
            vqvae=tiny_vqvae(), transformer=tiny_transformer("class"), id2label={0: "tench, Tinca tinca", 1: "goldfish"}
        )
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def scale_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A next-scale pipeline folder that draws 8 x 8 pictures of text, with a smaller model to draft with."""
    from tiny_models import text_var_pipeline

    folder = tmp_path_factory.mktemp("models") / "tiny-scales"
    pipe = text_var_pipeline()
    pipe.save_pretrained(folder)
    return folder
