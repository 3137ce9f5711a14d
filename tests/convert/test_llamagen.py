"""Official LlamaGen files to a pipeline folder: what comes out is what went in, and what is wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file
from tiny_t5 import save_text_encoder
from torch import Tensor

from vargen import LlamaGenPipeline
from vargen.convert import llamagen
from vargen.convert.llamagen import convert_llamagen, detect_transformer, detect_vq
from vargen.convert.state_dicts import read_labels
from vargen.models.llamagen.blocks import build_rotary_2d
from vargen.models.llamagen.network import SIZES, LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import read_model_folder

State = dict[str, Tensor]

_GOLDEN = Path(__file__).resolve().parent.parent / "golden"
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_TEXT_HEADS = 2


def _golden(name: str) -> State:
    return load_file(_GOLDEN / f"llamagen_{name}" / "model.safetensors")


def _io(name: str) -> State:
    return load_file(_GOLDEN / f"llamagen_{name}" / "io.safetensors")


@pytest.fixture(autouse=True)
def official_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden class model stands for an official size; the text model does not."""
    monkeypatch.setitem(llamagen.HEADS, (64, 3), 4)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The class model and its image tokenizer, as the authors save them."""
    gpt, vq = tmp_path / "c2i.pt", tmp_path / "vq.pt"
    torch.save({"model": _golden("c2i")}, gpt)
    torch.save({"model": _golden("vq")}, vq)
    return gpt, vq


@pytest.fixture
def text_files(tmp_path: Path) -> tuple[Path, Path]:
    """The text model, and an image tokenizer of as many codes."""
    gpt, vq = tmp_path / "t2i.pt", tmp_path / "vq48.pt"
    torch.save({"model": _golden("t2i")}, gpt)
    torch.manual_seed(0)
    tokenizer = VQModel(48, 8, 32, (1, 1), (1, 1), num_res_blocks=1, z_channels=32)
    torch.save({"model": tokenizer.state_dict()}, vq)
    return gpt, vq


def _open(folder: Path) -> LlamaGenPipeline:
    return LlamaGenPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def _left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- what comes out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "interval", "case"), [(1.0, None, "cfg1"), (3.0, None, "cfg3"), (3.0, 5, "cfg3_interval")])
def test_a_converted_class_model_samples_the_official_greedy_tokens(
    files: tuple[Path, Path], tmp_path: Path, scale: float, interval: int | None, case: str
) -> None:
    assert convert_llamagen(*files, tmp_path / "out", grid_size=4) == tmp_path / "out"
    io = _io("c2i")
    result = _open(tmp_path / "out")(
        class_labels=io["class_labels"], guidance_scale=scale, guidance_interval=interval, temperature=0.0, output_type="latent"
    )
    assert torch.equal(result.images.flatten(1), io[f"greedy_tokens_{case}"])


@pytest.mark.parametrize(("scale", "case"), [(1.0, "cfg1"), (3.0, "cfg3")])
def test_a_converted_text_model_samples_the_official_greedy_tokens(
    text_files: tuple[Path, Path], tmp_path: Path, scale: float, case: str
) -> None:
    convert_llamagen(*text_files, tmp_path / "out", grid_size=4, n_head=_TEXT_HEADS)
    io = _io("t2i")
    result = _open(tmp_path / "out")(
        prompt_embeds=io["caption_embeds"],
        prompt_mask=io["caption_mask"],
        guidance_scale=scale,
        temperature=0.0,
        output_type="latent",
    )
    assert torch.equal(result.images.flatten(1), io[f"greedy_tokens_{case}"])


def test_the_folder_is_the_one_that_the_pipeline_itself_saves(files: tuple[Path, Path], tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps({"0": "tench", "3": "shark, great white"}))
    convert_llamagen(*files, tmp_path / "out", grid_size=4, id2label=labels)
    pipe = _open(tmp_path / "out")
    pipe.save_pretrained(tmp_path / "again")
    ours, theirs = (json.loads((tmp_path / f / "model_index.json").read_text()) for f in ("out", "again"))
    assert ours == {k: v for k, v in theirs.items() if k != "_name_or_path" and v != [None, None]}
    assert ours["defaults"] == {"guidance_scale": 4.0, "temperature": 1.0, "top_p": 1.0}, "there are fewer codes than top_k"
    for part, network in (("transformer", pipe.transformer), ("vqvae", pipe.vqvae)):
        kept = [json.loads((tmp_path / f / part / "config.json").read_text()) for f in ("out", "again")]
        kept[1].pop("_name_or_path", None)
        assert kept[0] == kept[1]
        again = load_file(tmp_path / "again" / part / _WEIGHTS)
        assert all(torch.equal(v, again[k]) for k, v in network.state_dict().items())
    generated = [
        opened(class_labels=label, generator=torch.Generator().manual_seed(0), output_type="pt").images
        for opened, label in ((pipe, 3), (_open(tmp_path / "again"), "great white"))
    ]
    assert torch.equal(*generated)
    assert pipe.config.id2label == {"0": "tench", "3": "shark, great white"}


def test_weights_arrive_unchanged_in_their_own_type(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Of the image tokenizer the averaged ones, of the transformer those that were trained."""
    torch.save({"model": _golden("c2i"), "ema": {"x": torch.zeros(1)}}, files[0])
    torch.save({"model": {"x": torch.zeros(1)}, "ema": _golden("vq")}, files[1])
    convert_llamagen(*files, tmp_path / "out", grid_size=4)
    for part, name in (("transformer", "c2i"), ("vqvae", "vq")):
        written, given = load_file(tmp_path / "out" / part / _WEIGHTS), _golden(name)
        assert written.keys() == given.keys()
        assert all(torch.equal(written[k], v) and written[k].dtype == v.dtype for k, v in given.items())


def test_dtype_is_that_of_the_transformer(files: tuple[Path, Path], tmp_path: Path) -> None:
    convert_llamagen(*files, tmp_path / "out", grid_size=4, dtype=torch.bfloat16)
    written = load_file(tmp_path / "out" / "transformer" / _WEIGHTS)
    assert all(torch.equal(written[k], v.bfloat16()) for k, v in _golden("c2i").items())
    assert {v.dtype for v in load_file(tmp_path / "out" / "vqvae" / _WEIGHTS).values()} == {torch.float16}
    rejects(lambda: convert_llamagen(*files, tmp_path / "out2", grid_size=4, dtype=torch.int8), "dtype")


def test_a_missing_usage_counter_is_no_fault(files: tuple[Path, Path], tmp_path: Path) -> None:
    state = _golden("vq")
    del state["quantize.codebook_used"]
    torch.save(state, files[1])
    convert_llamagen(*files, tmp_path / "out", grid_size=4)
    read_model_folder(tmp_path / "out", LLAMAGEN)


# -- what the shapes tell ------------------------------------------------------------------------------------------


def _manifest() -> dict[str, Any]:
    return json.loads((_GOLDEN / "llamagen_manifest.json").read_text())


def _meta(tensors: dict[str, list[int]]) -> State:
    return {name: torch.empty(shape, device="meta") for name, shape in tensors.items()}


@pytest.mark.parametrize("name", [k for k in _manifest() if k.startswith("GPT")])
def test_official_transformers_are_recognised(name: str) -> None:
    size, kind, tokens = name.split("/")
    side = int(int(tokens) ** 0.5)
    state = _meta(_manifest()[name]["tensors"])
    config = detect_transformer(state, Path(f"{kind}_{size[4:]}_{side * 16}.pt"), 16)
    expected = {**SIZES[size[4:]], "vocab_size": 16384, "grid_size": side, "multiple_of": 256}
    if kind == "c2i":
        expected |= {"condition": "class", "num_classes": 1000}
    else:
        expected |= {"condition": "text", "cls_token_num": 120, "caption_dim": 2048}
    assert config == expected


@pytest.mark.parametrize(("name", "mult"), [("VQ-16", [1, 1, 2, 2, 4]), ("VQ-8", [1, 2, 2, 4])])
def test_official_image_tokenizers_are_recognised(name: str, mult: list[int]) -> None:
    config = detect_vq(_meta(_manifest()[name]["tensors"]), Path("vq.pt"))
    assert config == {
        "codebook_size": 16384,
        "codebook_embed_dim": 8,
        "ch": 128,
        "encoder_ch_mult": mult,
        "decoder_ch_mult": mult,
        "num_res_blocks": 2,
        "z_channels": 256,
    }


@pytest.mark.parametrize(
    "config",
    [
        {"dim": 96, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "multiple_of": 128},
        {"dim": 80, "n_layer": 1, "n_head": 2, "multiple_of": 1},
        {"dim": 64, "n_layer": 11, "n_head": 1, "multiple_of": 96, "num_classes": 1},
        {"dim": 64, "n_layer": 1, "n_head": 2, "condition": "text", "caption_dim": 7, "cls_token_num": 3},
    ],
)
def test_any_transformer_is_recognised_up_to_its_heads_and_grid(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        network = LlamaGenTransformer(vocab_size=50, grid_size=3, **config)
    state = network.state_dict()
    found = detect_transformer(dict(state), Path("x.pt"), 4, n_head=config["n_head"], grid_size=3)
    with torch.device("meta"):
        rebuilt = LlamaGenTransformer(**found)
    assert {k: v.shape for k, v in rebuilt.state_dict().items()} == {k: v.shape for k, v in state.items()}
    asked = {k: v for k, v in config.items() if k != "multiple_of"}  # several give the same width
    assert {k: found[k] for k in asked if k in found} == {k: v for k, v in asked.items() if k in found}
    assert found["grid_size"] == 3 and found.get("n_kv_head", found["n_head"]) == config.get("n_kv_head", config["n_head"])


@pytest.mark.parametrize(
    ("name", "downsampling", "grid"),
    [
        ("c2i_B_256", 16, 16), ("c2i_XL_384", 16, 24), ("t2i_XL_stage2_512", 16, 32), ("c2i_L_256", 8, 32),
    ],
)  # fmt: skip
def test_the_grid_comes_from_the_file_name(name: str, downsampling: int, grid: int) -> None:
    assert detect_transformer(_golden("c2i"), Path(f"{name}.pt"), downsampling)["grid_size"] == grid
    given = detect_transformer(_golden("c2i"), Path(f"{name}.pt"), downsampling, grid_size=5)
    assert given["grid_size"] == 5, "the caller knows better than a name"


@pytest.mark.parametrize("name", ["model.pt", "step_1384.pt", "384_from_256.pt", "256/model.pt"])
def test_an_unknown_grid_is_asked_for(name: str) -> None:
    rejects(lambda: detect_transformer(_golden("c2i"), Path(name), 4), "grid")


@pytest.mark.parametrize(("kind", "prefix", "heads"), [("c2i", 1, 4), ("t2i", 120, 2)])
def test_a_stray_rotary_table_tells_grid_and_heads_and_is_dropped(
    kind: str, prefix: int, heads: int, files: tuple[Path, Path], text_files: tuple[Path, Path], tmp_path: Path
) -> None:
    table = torch.cat([torch.zeros(prefix, 64 // heads // 2, 2), build_rotary_2d(4, 64 // heads)])
    _, vq = files if kind == "c2i" else text_files
    file = tmp_path / "a_256.pt"  # a name that says otherwise
    torch.save({"model": {**_golden(kind), "freqs_cis": table}}, file)
    convert_llamagen(file, vq, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())
    assert (config["grid_size"], config["n_head"]) == (4, heads)
    assert "freqs_cis" not in load_file(tmp_path / "out" / "transformer" / _WEIGHTS)
    rejects(lambda: convert_llamagen(file, vq, tmp_path / "out2", grid_size=5), "grid_size")
    rejects(lambda: convert_llamagen(file, vq, tmp_path / "out2", n_head=8), "n_head")


# -- what is wrong is named ----------------------------------------------------------------------------------------


def _put(name: str, *shape: int) -> Callable[[State], Any]:
    return lambda state: state.update({name: torch.zeros(shape)})


def _without(prefix: str) -> Callable[[State], Any]:
    return lambda state: [state.pop(name) for name in list(state) if name.startswith(prefix)]


# The file, a change of its tensors, and what the error names.
FAULTS: list[tuple[str, Callable[[State], Any], str]] = [
    ("c2i", _without("norm.weight"), "norm.weight"),
    ("c2i", _without("tok_embeddings.weight"), "tok_embeddings.weight"),
    ("c2i", _put("tok_embeddings.weight", 3), "tok_embeddings.weight"),
    ("c2i", _put("output.weight", 64, 32), "output.weight"),
    ("c2i", _put("layers.0.attention.wqkv.weight", 100, 64), "wqkv.weight"),
    ("c2i", _put("layers.0.feed_forward.w1.weight", 100, 64), "feed-forward"),
    ("c2i", _without("cls_embedding"), "c2i.pt"),
    ("c2i", _put("cls_embedding.embedding_table.weight", 1, 64), "c2i.pt"),
    ("c2i", _put("freqs_cis", 17, 0, 2), "freqs_cis"),
    ("c2i", _put("freqs_cis", 1, 8, 2), "c2i.pt"),
    ("c2i", _put("freqs_cis", 17, 64, 2), "freqs_cis"),
    ("vq", _without("decoder.norm_out.bias"), "decoder.norm_out.bias"),
    ("vq", _without("quantize.embedding.weight"), "quantize.embedding.weight"),
    ("vq", _put("quant_conv.weight", 8, 32, 1, 1), "quant_conv.weight"),
    ("vq", _put("encoder.conv_blocks.1.res.0.conv1.weight", 40, 32, 3, 3), "vq.pt"),
    ("vq", _without("encoder.conv_blocks"), "vq.pt"),
    ("vq", _put("encoder.conv_in.weight", 32, 4, 3, 3), "vq.pt"),
]


@pytest.mark.parametrize(("name", "change", "said"), FAULTS)
def test_a_wrong_file_is_refused_and_nothing_is_written(
    name: str, change: Callable[[State], Any], said: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    state = _golden(name)
    change(state)
    torch.save(state, files[name == "vq"])
    before = _left(tmp_path)
    rejects(lambda: convert_llamagen(*files, tmp_path / "out", grid_size=4), said, ValueError)
    assert _left(tmp_path) == before


# -- names of classes, text encoders -------------------------------------------------------------------------------


def test_class_names_come_from_json(tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    for content in (["a, b", "c"], {"0": "a, b", "1": "c"}, {"0": ["a", "b"], "1": ["c"]}):
        labels.write_text(json.dumps(content))
        assert read_labels(labels, 10) == {0: "a, b", 1: "c"}
    for text in ("{", "3", '{"x": "y"}', '{"0": 3}'):
        labels.write_text(text)
        with pytest.raises(ValueError, match=r"labels\.json is not JSON of the form"):
            read_labels(labels, 10)
    labels.write_text('{"10": "the null class has no name"}')
    with pytest.raises(ValueError, match="names class 10, but the transformer has classes 0 to 9"):
        read_labels(labels, 10)


def test_a_text_model_takes_its_encoder_along(text_files: tuple[Path, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"grid_size": 4, "n_head": _TEXT_HEADS}
    encoder = save_text_encoder(tmp_path / "t5", 24)
    convert_llamagen(*text_files, tmp_path / "out", text_encoder=encoder, **options)
    pipe = _open(tmp_path / "out")
    embeds, mask = pipe.encode_prompt(["a red apple"])
    assert mask.sum() == 3 and embeds.shape == (1, 120, 24)
    images = pipe("a red apple", temperature=0.0, output_type="latent").images
    same = pipe(prompt_embeds=embeds, prompt_mask=mask, temperature=0.0, output_type="latent").images
    assert torch.equal(images, same)

    convert_llamagen(*text_files, tmp_path / "bare", **options)
    with pytest.raises(ValueError, match="without a text encoder: pass prompt_embeds"):
        _open(tmp_path / "bare")("a red apple")


def test_files_and_options_that_do_not_belong_together_are_refused(
    files: tuple[Path, Path], text_files: tuple[Path, Path], tmp_path: Path
) -> None:
    (gpt, vq), text = files, {"n_head": _TEXT_HEADS}
    wide, right = save_text_encoder(tmp_path / "wide", 16), save_text_encoder(tmp_path / "right", 24)
    none, empty, labels = tmp_path / "none.pt", tmp_path / "empty", tmp_path / "labels.json"
    empty.mkdir()
    labels.write_text("[]")
    before = _left(tmp_path)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((vq, gpt), {}, "c2i.pt is not a LlamaGen image tokenizer: it has no quantize.embedding.weight"),
        ((vq, vq), {}, "vq.pt"),
        ((gpt, gpt), {}, "c2i.pt"),
        ((gpt, text_files[1]), {}, "codes"),
        ((none, vq), {}, "none.pt"),
        ((gpt, none), {}, "none.pt"),
        (files, {"id2label": none}, "none.pt"),
        (text_files, {}, "n_head"),
        (text_files, {"n_head": 3}, "n_head"),
        (text_files, {"n_head": 32}, "t2i.pt"),
        (text_files, {**text, "text_encoder": wide}, "wide"),
        (files, {"text_encoder": wide}, "class-conditional"),
        (text_files, {**text, "tokenizer": wide}, "tokenizer"),
        (text_files, {**text, "text_encoder": right, "tokenizer": empty}, "empty"),
        (text_files, {**text, "text_encoder": empty}, "empty"),
        (text_files, {**text, "id2label": labels}, "text-conditional"),
    ]
    for given, options, said in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            convert_llamagen(*given, tmp_path / "out", grid_size=4, **options)
    assert _left(tmp_path) == before
