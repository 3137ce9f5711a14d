"""Official Infinity files to a pipeline folder: what comes out is what went in, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_infinity import GOLDEN, SETS, official
from safetensors.torch import load_file, save_file
from tiny_t5 import save_text_encoder
from torch import Tensor, nn

from vargen import open_pipeline
from vargen.convert.infinity import (
    convert_infinity,
    detect_tokenizer,
    detect_transformer,
    rename_tokenizer,
    rename_transformer,
)
from vargen.models.infinity.network import SIZES, InfinityTransformer
from vargen.models.tokenizers.bsq import TOKENIZERS, BSQModel

State = dict[str, Any]
_FILE = "diffusion_pytorch_model.safetensors"
_BUFFERS = {
    "lvl_1L": torch.zeros(1, 5).long(),
    "attn_bias_for_masking": torch.zeros(1, 1, 5, 5),
    "Infinity_visible_kvlen": torch.ones(3),
}


def _golden(name: str, part: str) -> State:
    return load_file(GOLDEN / name / f"{part}.safetensors")


def _files(folder: Path, name: str = "infinity_a", **changes: Any) -> tuple[Path, Path]:
    """As the authors save them: a plain state dict, and a tokenizer under `vae`. Tensors that are None are left out."""
    folder.mkdir(exist_ok=True)
    transformer, vae = folder / "infinity_2b_reg.pth", folder / "infinity_vae_d32reg.pth"
    state = {key: value for key, value in {**_golden(name, "infinity"), **changes}.items() if value is not None}
    torch.save(state, transformer)
    torch.save({"vae": _golden(name, "vae"), "args": {"lr": 1.0}}, vae)
    return transformer, vae


@pytest.mark.parametrize("name", SETS)
@torch.inference_mode()
def test_what_comes_out_gives_the_official_logits_and_bits(name: str, tmp_path: Path) -> None:
    folder, golden = convert_infinity(*_files(tmp_path / "in", name), tmp_path / "out", dtype=torch.float32), official(name)
    model = InfinityTransformer.from_pretrained(folder / "transformer")
    cache = model.new_cache(golden.plan, 2, golden.config["text_maxlen"])
    logits = model(golden.io["teacher_input"], golden.condition(), cache=cache).logits
    torch.testing.assert_close(logits, golden.io["teacher_logits"], atol=1e-4, rtol=0)
    vae = BSQModel.from_pretrained(folder / "vqvae").float()
    bits = vae.quantizer(golden.plan.scales).quantize(vae.encode_latent(golden.io["pixels"].float()))
    assert all(torch.equal(part, golden.io[f"encoded_token_bits_scale{k}"].flatten(1).long()) for k, part in enumerate(bits))
    index = json.loads((folder / "model_index.json").read_text())
    scale, temperature = (3.0, 1.0) if vae.config.patchify else (4.0, 0.5)
    assert index["_class_name"] == "InfinityPipeline" and "text_encoder" not in index
    assert index["defaults"] == {"guidance_scale": scale, "temperature": temperature, "top_p": 0.97}
    assert model.config.num_scales == 13 and model.dtype == torch.float32


def _weights(folder: Path) -> list[State]:
    return [load_file(folder / part / _FILE) for part in ("transformer", "vqvae")]


def test_files_of_other_forms_give_the_same_folder(tmp_path: Path) -> None:
    """Training checkpoints, heads in another order of dimensions, buffers, one chunk, plain names, and parts with an index."""
    transformer, vae = _files(tmp_path / "plain")
    state, codes = _golden("infinity_a", "infinity"), _golden("infinity_a", "vae")
    swapped = {key: value.reshape(1, 1, -1, 1) if key.endswith("scale_mul_1H11") else value for key, value in state.items()}
    buffers = {key: torch.zeros(64) for key in state if key.endswith("zero_k_bias")}
    both = {"trainer": {"gpt_fsdp": state, "vae": codes}}
    nested, parts, bare = tmp_path / "ar-ckpt.pth", tmp_path / "infinity_8b_512x512_weights", tmp_path / "bare.pth"
    torch.save({"epoch": 3, "trainer": {"gpt_fsdp": {**swapped, **buffers, **_BUFFERS}, "other": {"a": torch.ones(1)}}}, nested)
    flat = rename_transformer(state)
    parts.mkdir()
    names = sorted(flat)
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({key: flat[key] for key in some}, parts / f"{number}.safetensors")
    weight_map = {key: f"{place % 2}.safetensors" for place, key in enumerate(names)}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save(rename_tokenizer(codes), bare)
    torch.save(both, tmp_path / "both.pth")
    expected = _weights(convert_infinity(transformer, vae, tmp_path / "out0"))
    pairs = [(nested, vae), (parts, bare), (parts / "model.safetensors.index.json", vae), (tmp_path / "both.pth",) * 2]
    for number, (one, other) in enumerate(pairs, 1):
        folder = convert_infinity(one, other, tmp_path / f"out{number}")
        for found, wanted in zip(_weights(folder), expected, strict=True):
            assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
            assert {value.dtype for value in found.values()} == {torch.float16}, "the file's own"
        scales = json.loads((folder / "transformer" / "config.json").read_text())["num_scales"]
        assert scales == (10 if one == parts else 13), "the name of a folder says 512"
    chosen = convert_infinity(transformer, vae, tmp_path / "chosen", pn="0.06M")
    assert open_pipeline(chosen).grid == (16, 16)


def test_a_text_encoder_comes_along(tmp_path: Path) -> None:
    encoder = save_text_encoder(tmp_path / "t5", 256)
    folder = convert_infinity(*_files(tmp_path / "in"), tmp_path / "out", text_encoder=encoder, pn="0.06M")
    pipe = open_pipeline(folder, torch_dtype=torch.float32)
    embeds, mask = pipe.encode_prompt(["a red apple"])
    assert mask.sum() == 3 and embeds.shape == (1, 16, 256)
    image, same = (
        pipe(**given, generator=torch.Generator().manual_seed(0), output_type="latent").images
        for given in ({"prompt": "a red apple"}, {"prompt_embeds": embeds, "prompt_mask": mask})
    )
    assert torch.equal(image, same)


def test_what_is_wrong_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    transformer, vae = _files(tmp_path / "a")
    narrow = _files(tmp_path / "b", "infinity_b")[1]
    empty, wide = tmp_path / "empty", save_text_encoder(tmp_path / "wide", 16)
    empty.mkdir()
    missing, foreign, short = "block_chunks.1.module.1.ca.proj.bias", "block_chunks.0.module.0.ca_gamma", "head.weight"
    head = _golden("infinity_a", "infinity")[short][:-2]
    cases: list[tuple[tuple[Path, Path], dict[str, Any], str]] = [
        ((vae, vae), {}, "infinity_vae_d32reg.pth is not a transformer of Infinity: it has no cfg_uncond"),
        ((transformer, transformer), {}, "is not a tokenizer of Infinity: it has no encoder.conv_in.weight"),
        ((transformer, narrow), {}, "do not belong together: they have 8 and 4 bits"),
        ((_files(tmp_path / "c", **{missing: None})[0], vae), {}, "missing: 1 (blocks.3.ca.proj.bias)"),
        ((_files(tmp_path / "d", **{foreign: torch.ones(64)})[0], vae), {}, "unexpected: 1 (blocks.0.ca_gamma)"),
        ((_files(tmp_path / "e", **{short: head})[0], vae), {}, "head.weight is [14, 64], expected [16, 64]"),
        ((_files(tmp_path / "f", **{"pos_start": torch.full((1, 1, 64), float("nan"))})[0], vae), {}, "pos_start in"),
        ((transformer, tmp_path / "none.pth"), {}, "none.pth' does not exist"),
        ((tmp_path / "none.pth", vae), {}, "none.pth' does not exist"),
        ((empty, vae), {}, "transformer must be a file, or a folder with one .index.json"),
        ((transformer, vae), {"pn": "2M"}, "pn must be 0.06M, 0.25M, 0.60M, 1M"),
        ((transformer, vae), {"tokenizer": wide}, "tokenizer comes with a text_encoder"),
        ((transformer, vae), {"text_encoder": wide}, "expected a T5 encoder of width 256"),
    ]
    for given, options, said in cases:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            convert_infinity(*given, tmp_path / "out", **options)
        assert said in str(error.value), said
        assert not (tmp_path / "out").exists()


# -- official names and sizes, without memory -----------------------------------------------------------------------------


def _manifest(name: str) -> State:
    """The tensors of an official file, on the meta device."""
    recorded = json.loads((GOLDEN / "infinity_manifest.json").read_text())[name]
    shapes = dict(recorded["tensors"])
    for chunk in range(recorded.get("chunks", 0)):
        for block in range(recorded["blocks_of_a_chunk"]):
            shapes |= {f"block_chunks.{chunk}.module.{block}.{key}": shape for key, shape in recorded["block"].items()}
    with torch.device("meta"):
        return {"parameters": recorded["parameters"], **{key: torch.zeros(shape) for key, shape in shapes.items()}}


def _shapes(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {key: list(value.shape) for key, value in state.items()}


@pytest.mark.parametrize("name", ["infinity_2b", "infinity_8b", "infinity_layer12"])
def test_official_transformers_fit_by_name_and_shape(name: str) -> None:
    official = _manifest(name)
    count, state = official.pop("parameters"), rename_transformer(official)
    config = detect_transformer(state, Path("x.pth"))
    assert config == {**SIZES[name.replace("_", "-")], "caption_dim": 2048, "caption_rows": 512}
    with torch.device("meta"):
        model = InfinityTransformer(**config)
    assert _shapes(model.state_dict()) == _shapes(state)
    assert sum(each.numel() for each in model.parameters()) == count


@pytest.mark.parametrize(("name", "bits"), [("vae_d32", 32), ("vae_d56_f8_14_patchify", 56)])
def test_official_tokenizers_fit_by_name_and_shape(name: str, bits: int) -> None:
    official = _manifest(name)
    count, state = official.pop("parameters"), rename_tokenizer(official)
    config = detect_tokenizer(state, Path("x.pth"))
    with torch.device("meta"):
        models: list[nn.Module] = [BSQModel(**config), BSQModel(**TOKENIZERS[bits])]
    for model in models:
        assert _shapes(model.state_dict()) == _shapes(state)
        assert sum(each.numel() for each in model.parameters()) == count
    assert models[1].token_bits == bits and models[1].stride == 16


@pytest.mark.parametrize("name", SIZES)
def test_unpublished_sizes_are_detected(name: str) -> None:
    with torch.device("meta"):
        model = InfinityTransformer(**SIZES[name])
    found = detect_transformer(rename_transformer(dict(model.state_dict())), Path("x.pth"))
    assert {key: found[key] for key in SIZES[name]} == SIZES[name]
