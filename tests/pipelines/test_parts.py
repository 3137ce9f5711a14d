"""A folder whose parts are damaged, absurd or do not belong together gets one clear error before a weight is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import class_pipeline, text_pipeline, tiny_transformer, tiny_vq
from transformers import T5Config, T5EncoderModel

from vargen import LlamaGenPipeline
from vargen.pipelines.base import DiffusionPipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A pipeline of classes, one of text, and one of text with a T5 encoder, all with draft models."""
    root = tmp_path_factory.mktemp("saved")
    t5 = T5EncoderModel(T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=16, num_layers=2, num_heads=2))
    changed: dict[str, dict[str, Any]] = {"class": {}, "text": {}, "t5": {"text_encoder": t5}}
    for kind, others in changed.items():
        pipe = class_pipeline() if kind == "class" else text_pipeline()
        draft = tiny_transformer(pipe.transformer.config.condition, n_layer=1)
        pipe = LlamaGenPipeline(**{**pipe.components, "draft_transformer": draft, **others})
        pipe.save_pretrained(root / kind)
    return {kind: root / kind for kind in changed}


@pytest.fixture
def copied(saved, tmp_path, monkeypatch) -> Callable[[str], Path]:
    """A fresh copy of one of them, with a tripwire on loading weights."""

    def reached(cls: type, *args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were about to be loaded")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", classmethod(reached))
    return lambda kind: shutil.copytree(saved[kind], tmp_path / kind)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaGenPipeline.from_pretrained(folder)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_untouched_folders_pass(copied):
    for kind in ("class", "text", "t5"):
        with pytest.raises(pytest.fail.Exception, match="about to be loaded"):
            LlamaGenPipeline.from_pretrained(copied(kind))


# -- damaged files -------------------------------------------------------------------------------------------------------

PARTS = [
    ("class", "transformer"), ("class", "vqvae"), ("class", "draft_transformer"), ("text", "text_encoder"),
    ("t5", "text_encoder"),
]  # fmt: skip
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "truncated header": lambda file: file.write_bytes(file.read_bytes()[:300]),
    "garbage": lambda file: file.write_bytes(b"\xff" * 200),
    "foreign": lambda file: save_file({"stranger": torch.zeros(1)}, file),
    "no config": lambda file: file.with_name("config.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_damaged_part_is_named(copied, kind: str, part: str, damage: str) -> None:
    if (kind, damage) == ("t5", "foreign"):
        pytest.skip("transformers itself compares the names of its tensors")
    folder = copied(kind)
    (file,) = (folder / part).glob("*.safetensors")
    DAMAGES[damage](file)
    expected = {"missing": "is missing", "no config": "is missing", "foreign": "unexpected|hold 0"}.get(damage, "damaged")
    refused(folder, rf"{part}.*({expected})")


# -- absurd sizes: known from the headers, before a network of that size is built ---------------------------------------


@pytest.mark.parametrize(
    ("kind", "part", "change_to", "said"),
    [
        ("class", "transformer", {"n_layer": 100_000}, "n_layer: 100000, but the weights in its folder hold 2"),
        ("class", "draft_transformer", {"n_layer": 2}, "n_layer: 2, but the weights in its folder hold 1"),
        ("class", "vqvae", {"num_res_blocks": 100_000}, "num_res_blocks: 100000, but .* hold 1"),
        ("class", "vqvae", {"encoder_ch_mult": [1] * 50_000}, "50000 numbers in encoder_ch_mult, but .* hold 2"),
        ("class", "vqvae", {"decoder_ch_mult": [1] * 50_000}, "50000 numbers in decoder_ch_mult, but .* hold 2"),
        ("text", "text_encoder", {"num_hidden_layers": 100_000}, "num_hidden_layers: 100000, but .* hold 1"),
        ("t5", "text_encoder", {"num_layers": 100_000}, "num_layers: 100000, but .* hold 2"),
    ],
)
def test_more_layers_than_the_weights_hold(copied, monkeypatch, kind, part, change_to, said):
    folder = copied(kind)
    change(folder / part / "config.json", **change_to)
    for layer in (torch.nn.Linear, torch.nn.Conv2d):

        def counting(self, *words, build=layer.__init__, **options):
            built.append(1)
            if len(built) > 1000:
                pytest.fail("a network of that size was being built")
            build(self, *words, **options)

        monkeypatch.setattr(layer, "__init__", counting)
    built: list[int] = []
    refused(folder, rf"{part}.config\.json has {said}")


def test_foreign_weights_do_not_let_an_absurd_size_through(copied):
    folder = copied("class")
    save_file({"stranger": torch.zeros(1)}, folder / "transformer" / WEIGHTS)
    change(folder / "transformer" / "config.json", n_layer=100_000)
    refused(folder, r"n_layer: 100000, but the weights in its folder hold 0")


@pytest.mark.parametrize("grid", [100_000, 257, 0, -4, 4.5, "4", True])
def test_a_grid_that_no_memory_holds(copied, grid):
    folder = copied("class")
    change(folder / "transformer" / "config.json", grid_size=grid)
    refused(folder, rf"config\.json does not describe .*grid_size must be a whole number from 1 to 256, got {grid!r}")


# -- parts that do not belong together, in a folder and in memory --------------------------------------------------------

MISFITS = [
    ("class", "draft_transformer", {"vocab_size": 32}, "vocab_size"),
    ("class", "draft_transformer", {"grid_size": 8}, "grid_size"),
    ("class", "draft_transformer", {"num_classes": 7}, "num_classes"),
    ("class", "draft_transformer", {"condition": "text"}, "condition"),
    ("text", "draft_transformer", {"condition": "class"}, "condition"),
    ("text", "draft_transformer", {"cls_token_num": 5}, "cls_token_num"),
    ("text", "draft_transformer", {"caption_dim": 48}, "caption_dim"),
    ("text", "transformer", {"caption_dim": 48}, "caption_dim"),
    ("class", "transformer", {"vocab_size": 65}, "vocab_size"),
]


@pytest.mark.parametrize(("kind", "part", "sizes", "setting"), MISFITS)
def test_networks_that_do_not_belong_together(copied, saved, kind, part, sizes, setting):
    odd = tiny_transformer(**{"condition": kind, "n_layer": 1, **sizes})
    pipe = class_pipeline() if kind == "class" else text_pipeline()
    parts = {name: component for name, component in pipe.components.items() if name != part}
    with pytest.raises(ValueError, match=f"do not belong together: .*{setting} of"):
        LlamaGenPipeline(**parts, **{part: odd})
    folder = copied(kind)
    shutil.rmtree(folder / part)
    odd.save_pretrained(folder / part)
    refused(folder, rf"model_index\.json: .* do not belong together: .*{setting} of")


@pytest.mark.parametrize("codes", [32, 63])
def test_a_codebook_smaller_than_the_vocabulary(copied, codes):
    vq = tiny_vq().__class__(
        codebook_size=codes, ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), num_res_blocks=1, z_channels=32
    )
    said = rf"codebook_size of vqvae is {codes}, and vocab_size of transformer is 64"
    with pytest.raises(ValueError, match=said):
        LlamaGenPipeline(vqvae=vq, transformer=tiny_transformer("class"))
    folder = copied("class")
    vq.save_pretrained(folder / "vqvae")
    refused(folder, said)


def test_a_t5_encoder_of_another_width(copied):
    folder = copied("t5")
    T5EncoderModel(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(
        folder / "text_encoder"
    )
    refused(folder, "d_model of text_encoder is 16, and caption_dim of transformer is 32")
    change(folder / "text_encoder" / "config.json", model_type="clip")
    refused(folder, r"text_encoder.config\.json has model_type: 'clip', expected 't5'")


# -- what the pipeline keeps beside its networks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], r"defaults must be a dict of guidance_scale, temperature, top_k, top_p, or None, got \[1\]"),
        ("hot", "defaults must be a dict"),
        ({"seed": 1}, "defaults must be a dict of guidance_scale, .* got .'seed': 1."),
        ({"temperature": "hot"}, "defaults: temperature must be a finite number .* got 'hot'"),
        ({"guidance_scale": [2]}, r"defaults: guidance_scale must be .* got \[2\]"),
        ({"top_p": 2}, "defaults: top_p must be in .* got 2"),
        ({"top_k": 65}, "defaults: top_k must be at most the vocabulary of 64 tokens, got 65"),
        ({"top_k": 1.5}, "defaults: top_k must be a whole number .* got 1.5"),
    ],
)
def test_defaults_that_no_call_could_use(copied, value, said):
    with pytest.raises(ValueError, match=said):
        LlamaGenPipeline(vqvae=tiny_vq(), transformer=tiny_transformer("class"), defaults=value)
    folder = copied("class")
    change(folder / "model_index.json", defaults=value)
    refused(folder, rf"model_index\.json: {said}")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["a"], r"id2label must be a mapping of class numbers to names, .* got \['a'\]"),
        ({"one": "cat"}, "id2label must be .* got 'one': 'cat'"),
        ({"1": ["cat"]}, r"id2label must be .* got '1': \['cat'\]"),
        ({"-1": "cat"}, "id2label must be .* got '-1'"),
        ({"10": "cat"}, "id2label names class 10; the classes are 0 to 9"),
    ],
)
def test_class_names_that_name_no_class(copied, value, said):
    with pytest.raises(ValueError, match=said):
        LlamaGenPipeline(vqvae=tiny_vq(), transformer=tiny_transformer("class"), id2label=value)
    folder = copied("class")
    change(folder / "model_index.json", id2label=value)
    refused(folder, rf"model_index\.json: {said}")


# -- files that cannot be used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder), r"tokenizer.tokenizer\.json is missing, and so is vocab\.txt"),
        (lambda folder: [f.unlink() for f in folder.glob("*o*.*")], r"tokenizer\.json is missing, and so is vocab\.txt"),
        (lambda folder: (folder / "vocab.txt").write_text("\n"), r"vocab\.txt is empty"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"ver'), r"tokenizer\.json is not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff" * 9), r"tokenizer\.json is not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000), r"tokenizer\.json is not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": 5}'), r"tokenizer\.json is damaged"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json is not valid JSON"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[1]"), r"tokenizer_config\.json must hold a JSON"),
    ],
    ids=range(9),
)
def test_a_tokenizer_that_is_missing_or_damaged(copied, damage, said):
    folder = copied("text")
    damage(folder / "tokenizer")
    refused(folder, said)


@pytest.mark.parametrize(("kind", "part"), [("class", "transformer"), ("class", "vqvae"), ("text", "text_encoder")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_weights_of_a_dtype_that_no_network_computes_in(copied, kind, part, dtype):
    folder = copied(kind)
    file = folder / part / WEIGHTS
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if name.endswith("orm.weight") and tensor.dtype != torch.int8)
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    refused(folder, rf"the weights in .*{part} cannot be used: {name} is \S+, expected F")


def test_t5_weights_too(copied):
    folder = copied("t5")
    file = folder / "text_encoder" / "model.safetensors"
    save_file({name: tensor.to(torch.float8_e5m2) for name, tensor in load_file(file).items()}, file)
    refused(folder, r"text_encoder cannot be used: \S+ is F8_E5M2, expected F64 or F32 or F16 or BF16")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_that_is_allowed_generates(saved, tmp_path, dtype):
    folder = shutil.copytree(saved["class"], tmp_path / "model")
    for part in ("transformer", "vqvae"):
        file = folder / part / WEIGHTS
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    pipe = LlamaGenPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert len(pipe(class_labels=3).images) == 1
