"""The text encoder: its int8 file format, loading as a pipeline component, the packaged MiniLM weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

import vargen.assets
from vargen.models.storage import dequantize_rows, quantize_rows
from vargen.models.text_encoder import MiniLMTextEncoder

_PACKAGED = Path(vargen.assets.__file__).parent / "emoji"
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 12,
}


@pytest.fixture
def tiny() -> MiniLMTextEncoder:
    torch.manual_seed(0)
    return MiniLMTextEncoder(**_TINY).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("groups", [1, 4])
def test_quantization_error_is_within_half_a_step_and_repeating_it_changes_nothing(groups: int) -> None:
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0
    values, scale = quantize_rows(weight, groups)
    assert values.dtype == torch.int8 and scale.shape == (50, groups) and scale.dtype == torch.float32
    assert values.min() >= -127 and (scale > 0).all()
    back = dequantize_rows(values, scale)
    bound = (scale / 2).repeat_interleave(64 // groups, dim=1) * (1 + 1e-5)
    assert ((back - weight).abs() <= bound).all()
    assert (back[7] == 0).all()
    again = quantize_rows(back, groups)
    assert torch.equal(again[0], values)
    assert torch.equal(again[1][torch.arange(50) != 7], scale[torch.arange(50) != 7])


@pytest.mark.parametrize(
    ("weight", "groups"),
    [
        (torch.ones(3), 1),
        (torch.ones(2, 2, dtype=torch.int64), 1),
        (torch.full((2, 2), torch.nan), 1),
        (torch.ones(2, 6), 4),
        (torch.ones(2, 6), 0),
    ],
)
def test_quantization_refuses_what_it_cannot_hold(weight: Tensor, groups: int) -> None:
    with pytest.raises(ValueError, match=r"finite floating matrix|do not divide"):
        quantize_rows(weight, groups)


@pytest.mark.parametrize(("weight_format", "tolerance"), [("int8", 0.05), ("float16", 2e-2), ("float32", 0.0)])
def test_round_trip(tmp_path: Path, tiny: MiniLMTextEncoder, ids: Tensor, weight_format: str, tolerance: float) -> None:
    model = MiniLMTextEncoder(**_TINY, weight_format=weight_format).eval()
    model.load_state_dict(tiny.state_dict())
    model.save_pretrained(tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", _WEIGHTS]
    loaded = MiniLMTextEncoder.from_pretrained(tmp_path / "a")
    assert not loaded.training and loaded.config.weight_format == weight_format
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids), tiny(ids), atol=tolerance, rtol=0)
        assert torch.equal(loaded(ids), loaded(ids))
    loaded.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / _WEIGHTS).read_bytes() == (tmp_path / "b" / _WEIGHTS).read_bytes()
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()


def test_inputs_are_checked_and_padding_is_ignored(tiny: MiniLMTextEncoder, ids: Tensor) -> None:
    padded = torch.cat([ids, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    mask = (torch.arange(11) < 7).long().expand(3, -1)
    with torch.inference_mode():
        torch.testing.assert_close(tiny(padded, mask)[:, :7], tiny(ids), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="T <= 12"):
        tiny(torch.zeros(1, 13, dtype=torch.int64))
    rejects(lambda: tiny(ids[0]), "input_ids")
    rejects(lambda: tiny(ids, torch.ones(3, 6)), "attention_mask")


def test_packaged_encoder_gives_the_features_of_the_original() -> None:
    """Every token's features point where those of the published float32 weights do, as transformers' BertModel runs them."""
    golden = load_file(Path(__file__).parents[1] / "golden" / "minilm.safetensors")
    mask = golden["attention_mask"].bool()
    encoder = MiniLMTextEncoder.from_pretrained(_PACKAGED / "text_encoder")
    with torch.inference_mode():
        features = encoder(golden["input_ids"].long(), golden["attention_mask"].long())
    # Known ids: a change of tokenizer files would silently change every prompt.
    assert AutoTokenizer.from_pretrained(_PACKAGED / "tokenizer")("A red apple").input_ids == [101, 1037, 2417, 6207, 102]
    assert mask.sum() > 100
    assert torch.cosine_similarity(features, golden["features"].float(), dim=-1)[mask].min() >= 0.999
