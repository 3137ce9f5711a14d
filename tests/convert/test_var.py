"""Official VAR files to a pipeline folder: what comes out is what went in, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vargen.convert.var import convert_var, detect_transformer
from vargen.models.guidance import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var.network import VARTransformer, is_derived_buffer, official_config

State = dict[str, Tensor]

_GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "var"


def _golden(name: str) -> State:
    return load_file(_GOLDEN / f"{name}.safetensors")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """As the authors save them: plain state dicts."""
    transformer, vae = tmp_path / "var_d2.pth", tmp_path / "vae.pth"
    torch.save(_golden("var"), transformer)
    torch.save(_golden("vae"), vae)
    return transformer, vae


def _save(path: Path, **changes: Any) -> Path:
    """The golden transformer with some tensors replaced, or, where None, left out."""
    state = {**_golden("var"), **changes}
    torch.save({name: value for name, value in state.items() if value is not None}, path)
    return path


@torch.inference_mode()
def test_what_comes_out_gives_the_official_logits_and_tokens(files: tuple[Path, Path], tmp_path: Path) -> None:
    folder = convert_var(*files, tmp_path / "out", dtype=torch.float32)
    io = _golden("io")
    model = VARTransformer.from_pretrained(folder / "transformer")
    logits = model(io["var_input"], Condition(class_labels=io["class_labels"])).logits
    torch.testing.assert_close(logits, io["teacher_forced_logits"], atol=1e-4, rtol=0)
    vae = MultiScaleVQModel.from_pretrained(folder / "vqvae").float()
    tokens = vae.encode(io["pixels"])
    assert all(torch.equal(found.flatten(1), io[f"encoded_scale{k}"]) for k, found in enumerate(tokens))
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "VARPipeline" and "text_encoder" not in index
    assert index["transformer"] == ["vargen.models.var.network", "VARTransformer"]
    assert "top_k" not in index["defaults"], "there are fewer codes than the official filter keeps"


def test_the_file_keeps_its_type_and_training_checkpoints_are_read(files: tuple[Path, Path], tmp_path: Path) -> None:
    both = tmp_path / "ar-ckpt-best.pth"
    torch.save({"epoch": 3, "trainer": {"var_wo_ddp": _golden("var"), "vae_local": _golden("vae")}}, both)
    plain, nested = convert_var(*files, tmp_path / "plain"), convert_var(both, both, tmp_path / "nested")
    for part in ("transformer", "vqvae"):
        one, other = (load_file(f / part / "diffusion_pytorch_model.safetensors") for f in (plain, nested))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    transformer = load_file(plain / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in transformer.values()} == {torch.float16}
    assert not any(map(is_derived_buffer, transformer))


@pytest.mark.parametrize(("depth", "pixels"), [(16, 256), (30, 256), (36, 512)])
@pytest.mark.parametrize("buffers", [True, False])
def test_official_sizes_are_reported_by_their_shapes(depth: int, pixels: int, buffers: bool) -> None:
    """With the level buffer of official files and without, as CoDe's could be."""
    with torch.device("meta"):
        model = VARTransformer(**official_config(depth, pixels))
    state = dict(model.state_dict())
    if buffers:
        sides = torch.tensor(model.scales)
        state["lvl_1L"] = torch.arange(len(sides)).repeat_interleave(sides**2)[None]
        state["blocks.0.attn.zero_k_bias"] = torch.zeros(1)
    config = detect_transformer(state, Path("x.pth"))
    assert {name: config[name] for name in ("depth", "scales", "shared_aln")} == official_config(depth, pixels)
    assert [config[name] for name in ("dim", "n_head", "num_classes", "code_dim")] == [64 * depth, depth, 1000, 32]
    assert config["mlp_ratio"] == 4 and config["attn_l2_norm"] and not any(map(is_derived_buffer, state))


def test_what_is_wrong_is_named_and_nothing_is_left(files: tuple[Path, Path], tmp_path: Path) -> None:
    transformer, vae = files
    other, narrow = tmp_path / "other.pth", tmp_path / "narrow.pth"
    torch.save({"tok_embeddings.weight": torch.zeros(2, 2)}, other)
    codes = _golden("vae")
    torch.save({**codes, "quantize.embedding.weight": codes["quantize.embedding.weight"][:, :8]}, narrow)
    cases = [
        ((vae, transformer), "vae.pth is not a VAR transformer: it has no pos_1LC"),
        ((vae, vae), "vae.pth is not a VAR transformer: it has no pos_1LC"),
        ((transformer, transformer), "var_d2.pth is not a VAR image tokenizer: it has no encoder.conv_in.weight"),
        ((other, vae), "other.pth is not a VAR transformer: it has no pos_1LC"),
        ((transformer, narrow), "do not belong together: they have 16 and 8 columns of codes"),
        ((_save(tmp_path / "a.pth", **{"lvl_1L": None}), vae), "it has 30 positions, and official tables have 680"),
        ((_save(tmp_path / "b.pth", **{"pos_1LC": None}), vae), "b.pth is not a VAR transformer: it has no pos_1LC"),
        ((_save(tmp_path / "c.pth", **{"lvl_1L": torch.zeros(1, 30).long()}), vae), "lvl_1L does not describe 30 positions"),
        ((_save(tmp_path / "d.pth", **{"blocks.1.ffn.fc2.bias": None}), vae), "missing: 1 (blocks.1.ffn.fc2.bias)"),
        ((tmp_path / "none.pth", vae), "none.pth' does not exist"),
    ]
    for given, message in cases:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            convert_var(*given, tmp_path / "out")
        assert message in str(error.value)
        assert not (tmp_path / "out").exists()


def test_labels_are_checked_against_the_classes(files: tuple[Path, Path], tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text('{"0": "cat", "9": "dog, puppy"}')
    folder = convert_var(*files, tmp_path / "out", id2label=labels)
    assert json.loads((folder / "model_index.json").read_text())["id2label"] == {"0": "cat", "9": "dog, puppy"}
    labels.write_text('{"10": "fox"}')
    with pytest.raises(ValueError, match="names class 10, but the transformer has classes 0 to 9"):
        convert_var(*files, tmp_path / "more", id2label=labels)
