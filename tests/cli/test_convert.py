"""`vargen convert`: options reach the converter; what is wrong with a file is said in a line."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_t5 import save_text_encoder

from vargen.pipelines.families import FAMILIES
from vargen.pipelines.llamagen import LLAMAGEN


def test_options_reach_the_converter(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def convert(
        files: Sequence[Path], output: Path, *, id2label: Path | None = None, dtype: torch.dtype | None = None, n_head: int = 2
    ) -> Path:
        """Convert files.

        Args:
            files: parts of
                a model.
            output: folder.
        """
        seen.update(files=files, id2label=id2label, dtype=dtype, n_head=n_head)
        return output

    monkeypatch.setitem(FAMILIES, "Tiny", replace(LLAMAGEN, name="tiny", convert=convert))
    result = run("convert", "tiny", "--files", "a.pt", "--files", "b.pt", "-o", "out/b", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert result.stdout == "out/b\n"
    assert seen == {"files": [Path("a.pt"), Path("b.pt")], "id2label": None, "dtype": torch.bfloat16, "n_head": 2}
    assert "tiny" in run("convert", "--help").stdout and "parts of a model" in run("convert", "tiny", "--help").stdout
    assert run("convert", "tiny", "-o", "out").exit_code == run("convert", "nothing").exit_code == 2


GOLDEN = Path(__file__).parents[1] / "golden"
VAR = ("convert", "var", "--transformer", GOLDEN / "var/var.safetensors", "--vae", GOLDEN / "var/vae.safetensors")


def test_checkpoints_of_training_programs(run: Any) -> None:
    """A transformer with averaged weights beside it, and a tokenizer that was saved with its discriminator."""
    state, codes = (load_file(GOLDEN / f"var/{name}.safetensors") for name in ("var", "vae"))
    torch.save({"state_dict": {f"gpt.{k}": v for k, v in state.items()}, "ema": state, "best": np.float64(1)}, "var.CKPT")
    torch.save({f"generator.{k}": v for k, v in codes.items()} | {"discriminator.0.weight": torch.ones(2)}, "vae.ckpt")
    result = run("convert", "var", "--transformer", "var.CKPT", "--vae", "vae.ckpt", "--output", "out")
    assert result.exit_code == 0, result.output
    assert "var.CKPT holds weights under state_dict, which are converted, and under ema" in result.stderr
    assert run(*VAR, "--output", "plain").exit_code == 0
    for part in ("transformer", "vqvae"):
        file = f"{part}/diffusion_pytorch_model.safetensors"
        assert Path("out", file).read_bytes() == Path("plain", file).read_bytes()


@pytest.mark.parametrize("size", [0, 3000, 40_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(full_disk: Any, run: Any, size: int) -> None:
    result = full_disk(size)(*VAR, "--output", "out")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "out was not written: File too large" in result.stderr
    assert not list(Path().iterdir())


def test_infinity_with_its_text_encoder(run: Any, tmp_path: Path) -> None:
    """The folder generates images, which are generated again from their files."""
    encoder = save_text_encoder(tmp_path / "t5", 256)
    files = ["--transformer", GOLDEN / "infinity_a/infinity.safetensors", "--vae", GOLDEN / "infinity_a/vae.safetensors"]
    result = run("convert", "infinity", *files, "--text-encoder", encoder, "--pn", "0.06M", "-o", "model")
    assert result.exit_code == 0, result.output
    made = run("generate", "a red apple", "--model", "model", "--seed", "3", "--device", "cpu", "-o", "a.png")
    assert made.exit_code == 0, made.output
    assert run("regenerate", "a.png", "--model", "model", "--device", "cpu").exit_code == 0
    assert "flan-t5-xl" in run("convert", "infinity", "--help").stdout
