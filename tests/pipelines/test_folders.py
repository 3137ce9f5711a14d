"""A folder is checked before a weight is loaded: damaged, absurd or foreign parts get one error, and no file of it runs."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rejects import rejects
from safetensors.torch import load_file, save_file
from tiny_models import class_pipeline, text_pipeline, text_var_pipeline, tiny_transformer, tiny_var, tiny_vq
from transformers import T5Config, T5EncoderModel

import vargen.assets
from vargen import LlamaGenPipeline
from vargen.folders import networks
from vargen.folders.networks import NetworkFolder
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.text_encoder import ImageTextModel
from vargen.pipelines import loading
from vargen.pipelines.loading import SHARED_FILE, inspect_model, list_families, open_pipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"
Spoil = Callable[[Path], Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline of classes, one of text, and one of text with a T5 encoder, all with draft models."""
    root = tmp_path_factory.mktemp("saved")
    t5 = T5EncoderModel(T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=16, num_layers=2, num_heads=2))
    changed: dict[str, dict[str, Any]] = {"class": {}, "text": {}, "t5": {"text_encoder": t5}}
    for kind, others in changed.items():
        pipe = class_pipeline() if kind == "class" else text_pipeline()
        draft = tiny_transformer(pipe.transformer.config.condition, n_layer=1)
        LlamaGenPipeline(**{**pipe.components, "draft_transformer": draft, **others}).save_pretrained(root / kind)
    return {kind: root / kind for kind in changed}


@pytest.fixture
def copied(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A fresh copy of one of them; it fails if weights are read, and if very many layers are built."""

    def reached(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were about to be loaded")

    def counting(build: Callable[..., None]) -> Callable[..., None]:
        def made(self: Any, *words: Any, **options: Any) -> None:
            built.append(1)
            if len(built) > 2000:
                pytest.fail("a network of that size was being built")
            build(self, *words, **options)

        return made

    built: list[int] = []
    for layer in (torch.nn.Linear, torch.nn.Conv2d):
        monkeypatch.setattr(layer, "__init__", counting(layer.__init__))
    monkeypatch.setattr(loading, "load_network", reached)
    monkeypatch.setattr(StoredNetwork, "load", reached)
    return lambda kind: Path(shutil.copytree(saved[kind], tmp_path / "model"))


def refused(folder: Any, said: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        LlamaGenPipeline.from_pretrained(folder, **options)
    assert "trust_remote_code" not in str(caught.value) or "trust_remote_code" in options, "nothing advises it"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def index(**values: Any) -> Spoil:
    return lambda folder: change(folder / "model_index.json", **values)


def config(part: str, **values: Any) -> Spoil:
    return lambda folder: change(folder / part / "config.json", **values)


def write(place: str, content: str | bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def weights(part: str, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        (file,) = (folder / part).glob("*.safetensors")
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)

    return spoil


def leave_out(component: str) -> Spoil:
    def spoil(folder: Path) -> None:
        names = json.loads((folder / "model_index.json").read_text())
        del names[component]
        (folder / "model_index.json").write_text(json.dumps(names))

    return spoil


def test_the_untouched_folders_pass(copied: Any, tmp_path: Path) -> None:
    for kind in ("class", "text", "t5"):
        with pytest.raises(pytest.fail.Exception, match="about to be loaded"):
            LlamaGenPipeline.from_pretrained(copied(kind))
        shutil.rmtree(tmp_path / "model")


# -- damaged files -------------------------------------------------------------------------------------------------------

PARTS = [
    ("class", "transformer"), ("class", "vqvae"), ("class", "draft_transformer"), ("text", "text_encoder"),
    ("t5", "text_encoder"),
]  # fmt: skip
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda file: file.unlink(), "is missing"),
    "empty": (lambda file: file.write_bytes(b""), "damaged"),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]), "damaged"),
    "truncated header": (lambda file: file.write_bytes(file.read_bytes()[:300]), "damaged"),
    "garbage": (lambda file: file.write_bytes(b"\xff" * 200), "damaged"),
    "foreign": (lambda file: save_file({"stranger": torch.zeros(1)}, file), "unexpected|hold 0"),
    "no config": (lambda file: file.with_name("config.json").unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_damaged_part_is_named(copied: Any, kind: str, part: str, damage: str) -> None:
    if (kind, damage) == ("t5", "foreign"):
        pytest.skip("transformers itself compares the names of its tensors")
    folder, (spoil, said) = copied(kind), DAMAGES[damage]
    (file,) = (folder / part).glob("*.safetensors")
    spoil(file)
    refused(folder, rf"{part}.*({said})")


def replace_weights(folder: Path) -> None:
    save_file({"stranger": torch.zeros(1)}, folder / "transformer" / WEIGHTS)
    config("transformer", n_layer=100_000)(folder)


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["tok_embeddings.weight"] = torch.zeros(70, 32)
    del tensors["norm.weight"]
    tensors["stranger"] = torch.zeros(1)


def cast(part: str, dtype: torch.dtype) -> Spoil:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name, tensor in tensors.items() if "orm" in name and tensor.dtype != torch.int8)
        tensors[name] = tensors[name].to(dtype)

    return weights(part, edit)


SPOILT: list[tuple[str, Spoil, str]] = [
    ("class", write("model_index.json", "{"), "is not valid JSON"),
    ("class", index(_class_name="StableDiffusionPipeline"), "describes a 'StableDiffusionPipeline'"),
    ("class", index(_class_name="VARPipeline"), "describes a 'VARPipeline'"),
    *(("class", spoil, f"'{part}'") for part in ("transformer", "vqvae")
      for spoil in (leave_out(part), index(**{part: None}), index(**{part: [None, None]}))),
    *(("text", index(**{part: None}), f"'{part}': None; its class must be")
      for part in ("text_encoder", "tokenizer", "draft_transformer", "eagle", "upsampler")),
    *(("text", index(vqvae=value), r"has 'vqvae': .*; its class must be VQModel")
      for value in (5, "vargen.models.tokenizers.vq", ["vargen.models.tokenizers.vq"], {"a": 1}, [["vargen"], {}],
                    ["torch.nn", None])),
    ("class", config("transformer", n_head=3), "does not describe a LlamaGenTransformer"),
    ("class", weights("transformer", misshape),
     r"missing: 1 \(norm.weight\).*unexpected: 1 \(stranger\).*tok_embeddings.weight is \[70, 32\]"),
    # Absurd sizes are known from the headers.
    ("class", config("transformer", n_layer=100_000), "n_layer: 100000, but the weights in its folder hold 2"),
    ("class", config("draft_transformer", n_layer=2), "n_layer: 2, but the weights in its folder hold 1"),
    ("class", config("vqvae", encoder_ch_mult=[1] * 50_000), "50000 numbers in encoder_ch_mult, but .* hold 2"),
    ("class", config("vqvae", decoder_ch_mult=[1] * 50_000), "50000 numbers in decoder_ch_mult, but .* hold 2"),
    ("class", replace_weights, "n_layer: 100000, but the weights in its folder hold 0"),
    *(("class", config("transformer", grid_size=grid), rf"grid_size: {grid!r}, expected a whole number from 1 to 256")
      for grid in (257, 4.5, True)),
    ("t5", config("text_encoder", model_type="clip"), r"text_encoder.config\.json has model_type: 'clip', expected 't5'"),
    # Tokenizers.
    ("text", lambda folder: shutil.rmtree(folder / "tokenizer"), r"tokenizer\.json is missing, and so is vocab\.txt"),
    ("text", lambda folder: [file.unlink() for file in (folder / "tokenizer").glob("*o*.*")], r"tokenizer\.json is missing"),
    ("text", write("tokenizer/vocab.txt", "\n"), r"vocab\.txt is empty"),
    *(("text", write("tokenizer/tokenizer.json", text), r"tokenizer\.json is not valid JSON")
      for text in ('{"ver', b"\xff" * 9, "[" * 100_000)),
    ("text", write("tokenizer/tokenizer.json", '{"model": 5}'), r"tokenizer\.json is damaged"),
    ("text", write("tokenizer/tokenizer_config.json", "{"), r"tokenizer_config\.json is not valid JSON"),
    ("text", write("tokenizer/tokenizer_config.json", "[1]"), r"tokenizer_config\.json must hold a JSON"),
    # Dtypes that no network computes in.
    *((kind, cast(part, dtype), rf"the weights in .*{part} cannot be used: \S+ is \S+, expected F")
      for kind, part in (("class", "transformer"), ("class", "vqvae"), ("text", "text_encoder"), ("t5", "text_encoder"))
      for dtype in (torch.float8_e4m3fn, torch.int8, torch.complex64)),
    # Classes that are not ours to choose, in a library, a module, a pipeline within, or one more component.
    *(("text", index(**{name: entry}), name) for name, entry in (
        ("tokenizer", ["transformers", "Evil"]), ("transformer", ["vargen.evil", "Evil"]), ("vqvae", ["stranger", "Evil"]),
        ("tokenizer", ["diffusers", "DiffusionPipeline"]), ("extra", ["evil", "Evil"]), ("extra", ["evil", None]))),
    # Code that a configuration asks for, and weights that are left to another library or model.
    *(("text", lambda folder, file=file, values=values: change(folder / file, **values), f"{file} has '{next(iter(values))}'")
      for file, values in (
        ("model_index.json", {"custom_pipelines": {"evil": "evil.py"}}),
        ("transformer/config.json", {"auto_map": {"AutoModel": "evil.Evil"}}),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "evil--evil.Evil"}}),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
        ("tokenizer/tokenizer_config.json", {"trust_remote_code": True}),
        ("text_encoder/config.json", {"attn_implementation": "owner/kernel"}),
        ("text_encoder/config.json", {"_attn_implementation_internal": {"": "owner/kernel"}}))),
    ("t5", write("text_encoder/adapter_config.json", '{"base_model_name_or_path": "owner/name"}'), "the adapter of another"),
    ("text", config("vqvae", quantization_config={"quant_method": "modelopt"}), r"config\.json has a quantization_config"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SPOILT)))
def test_a_spoilt_folder_is_refused(copied: Any, number: int) -> None:
    kind, spoil, said = SPOILT[number]
    folder = copied(kind)
    spoil(folder)
    if "trust_remote_code" in said:
        with pytest.raises(ValueError, match=said):
            LlamaGenPipeline.from_pretrained(folder)
    else:
        refused(folder, said)


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
    ("class", "vqvae", {"codebook_size": 63}, "codebook_size"),
    ("t5", "text_encoder", {"d_model": 16}, "d_model"),
]


@pytest.mark.parametrize(("kind", "part", "sizes", "setting"), MISFITS)
def test_networks_that_do_not_belong_together(copied: Any, kind: str, part: str, sizes: Any, setting: str) -> None:
    odd: Any
    if part == "text_encoder":
        odd = T5EncoderModel(T5Config(**{"vocab_size": 40, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, **sizes}))
    elif part == "vqvae":
        odd = type(tiny_vq())(**{**tiny_vq().config, **sizes})
    else:
        odd = tiny_transformer(**{"condition": kind, "n_layer": 1, **sizes})
    pipe = class_pipeline() if kind == "class" else text_pipeline()
    said = f"{setting} of .* is .*, and .* is|do not belong together: .*{setting} of"
    with pytest.raises(ValueError, match=said):
        LlamaGenPipeline(**{**pipe.components, part: odd})
    folder = copied(kind)
    shutil.rmtree(folder / part)
    odd.save_pretrained(folder / part)
    refused(folder, rf"model_index\.json: .*({said})")


VALUES: list[tuple[dict[str, Any], str]] = [
    *(({"defaults": value}, said) for value, said in (
        ([1], "defaults must be a dict"), ("hot", "defaults must be a dict"), ({"seed": 1}, "defaults must be a dict"),
        ({"temperature": "hot"}, "defaults: temperature"), ({"guidance_scale": [2]}, "defaults: guidance_scale"),
        ({"top_p": 2}, "defaults: top_p"), ({"top_k": 65}, "defaults: top_k"), ({"top_k": 1.5}, "defaults: top_k"))),
    *(({"id2label": value}, "id2label") for value in (
        ["a"], {"one": "cat"}, {"1": ["cat"]}, {"-1": "cat"}, {"10": "cat"})),
    *(({"prompt_styles": value}, "prompt_styles") for value in ("flat", ["3d", 4], ["", "flat"], {"3d": 1})),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_stored_values_that_no_call_could_use(copied: Any, number: int) -> None:
    values, said = VALUES[number]
    rejects(lambda: LlamaGenPipeline(vqvae=tiny_vq(), transformer=tiny_transformer("class"), **values), said)
    folder = copied("class")
    change(folder / "model_index.json", **values)
    refused(folder, rf"model_index\.json: {said}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_that_is_allowed_generates(saved: dict[str, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    folder = Path(shutil.copytree(saved["class"], tmp_path / "model"))
    for part in ("transformer", "vqvae"):
        weights(part, lambda tensors: tensors.update({name: each.to(dtype) for name, each in tensors.items()}))(folder)
    pipe = LlamaGenPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    assert len(pipe(class_labels=3).images) == 1


# -- code ----------------------------------------------------------------------------------------------------------------

CODE = """
open({marker!r}, "w").close()
class Evil:
    @classmethod
    def from_pretrained(cls, *words, **options):
        open({marker!r}, "w").close()
LlamaGenTransformer = VQModel = DiffusionPipeline = T5Tokenizer = Evil
"""


def test_a_pickle_in_place_of_weights_is_not_opened(copied: Any, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    folder = copied("class")
    (folder / "transformer" / WEIGHTS).unlink()
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    refused(folder, r"diffusion_pytorch_model.bin may run code when opened and is not read")
    assert not (tmp_path / "ran").exists()


def test_files_beside_those_of_a_model_are_not_read(saved: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Neither code nor anything else; and a class is known by its name, whatever place the index says it has."""
    folder = Path(shutil.copytree(saved["text"], tmp_path / "model"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for place in ("pipeline.py", "tokenizer/transformers.py", "vqvae/VQModel.PY", "transformer/x.so", "../stranger.py"):
        write(place, CODE.format(marker=str(tmp_path / "ran")))(folder)
    (folder / "vqvae" / "loop").symlink_to(folder)
    index(vqvae=["stranger", "VQModel"])(folder)
    call = {"temperature": 0, "output_type": "latent"}
    found, expected = (LlamaGenPipeline.from_pretrained(each)("a red apple", **call) for each in (folder, saved["text"]))
    assert torch.equal(found.images, expected.images) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("option", ["trust_remote_code", "custom_pipeline"])
def test_no_caller_can_ask_for_code_by_mistake(copied: Any, tmp_path: Path, option: str) -> None:
    (tmp_path / "pipeline.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    value: Any = True if option == "trust_remote_code" else str(tmp_path)
    with pytest.raises(ValueError, match=f"{option} must be left out"):
        LlamaGenPipeline.from_pretrained(copied("text"), **{option: value})
    assert not (tmp_path / "ran").exists()


def test_what_a_caller_brings_need_not_be_there(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved["text"], folder, ignore=shutil.ignore_patterns("text_encoder", "tokenizer"))
    brought: dict[str, Any] = {"text_encoder": None, "tokenizer": None}
    pipe = LlamaGenPipeline.from_pretrained(folder, **brought)
    assert pipe.text_encoder is None
    rejects(lambda: LlamaGenPipeline.from_pretrained(folder, vqvae=torch.nn.Linear(2, 2)), "vqvae", TypeError)
    (folder / "vqvae" / "config.json").unlink()
    assert LlamaGenPipeline.from_pretrained(folder, **brought, vqvae=pipe.vqvae).vqvae is pipe.vqvae
    index(transformer=[None, None])(folder)
    assert LlamaGenPipeline.from_pretrained(folder, **brought, vqvae=pipe.vqvae, transformer=None).transformer is None


def test_whatever_a_folder_may_name_exists() -> None:
    strings = [name for component in COMPONENTS for name in component.classes if isinstance(name, str)]
    assert all(hasattr(transformers, name) for name in strings if name != "TokenizersBackend")


# -- parts of another packaged model ---------------------------------------------------------------------------------------


@pytest.fixture
def borrower(tmp_path: Path) -> Path:
    pipe = text_var_pipeline(draft=False)
    pipe.register_modules(transformer=tiny_var("text", caption_dim=384))  # as wide as the encoder of emoji
    pipe.save_pretrained(tmp_path / "model")
    for part in ("text_encoder", "tokenizer"):
        shutil.rmtree(tmp_path / "model" / part)
    shared = dict.fromkeys(("text_encoder", "tokenizer", "prompt_names"), "emoji")
    (tmp_path / "model" / SHARED_FILE).write_text(json.dumps(shared))
    return tmp_path / "model"


def test_borrowed_parts_are_those_of_a_whole_folder(borrower: Path) -> None:
    def generate(pipe: Any) -> torch.Tensor:
        return pipe("a red apple", generator=torch.Generator().manual_seed(1), output_type="latent").images

    pipe = open_pipeline(borrower)
    assert pipe.normalize_prompt("😺").text != "😺", "names come along"
    assert open_pipeline(borrower, text_encoder=None, tokenizer=None).text_encoder is None
    expected = generate(pipe)
    pipe.save_pretrained(borrower)
    assert (borrower / "text_encoder").is_dir() and not (borrower / SHARED_FILE).exists()
    assert torch.equal(generate(open_pipeline(borrower)), expected)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{"text_encoder": "nobody"}', "must name packaged models"), ('{"text_encoder": "../emoji"}', "must name packaged"),
        ('{"transformer": "emoji"}', "must name packaged models"), ('{"text_encoder": 3}', "must name packaged models"),
        ('["text_encoder"]', "must hold a JSON object"), ('{"prompt_names": "emoji"}', "config.json is missing"),
        ("{", SHARED_FILE),
    ],
)  # fmt: skip
def test_what_cannot_be_borrowed_is_refused(borrower: Path, said: str, message: str) -> None:
    (borrower / SHARED_FILE).write_text(said)
    with pytest.raises(ValueError, match=message):
        inspect_model(borrower)


# -- configurations of the packaged models: whatever a value says, opening ends soon ---------------------------------------

ROOT = Path(vargen.assets.__file__).parent
CONFIGS = sorted(file.parent.relative_to(ROOT).as_posix() for file in ROOT.rglob("config.json"))
COMPONENTS = [component for family in list_families().values() for component in family.components.values()]
KINDS = {kind.__name__: kind for component in COMPONENTS for kind in component.classes if not isinstance(kind, str)}
KINDS |= {ImageTextModel.__name__: ImageTextModel}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_checked(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    headers = networks.read_headers([ROOT / name / WEIGHTS])
    monkeypatch.setattr(networks, "find_weight_files", lambda *_: [ROOT / name / WEIGHTS])
    monkeypatch.setattr(networks, "read_headers", lambda _: headers)
    held = json.loads((ROOT / name / "config.json").read_text("utf-8"))
    kind = KINDS[held["_class_name"]]
    NetworkFolder(ROOT / name, kind)
    for field in (field for field in held if not field.startswith("_")):
        for value in (-1, 0, "x", None, math.nan, 10**12):
            (tmp_path / "config.json").write_text(json.dumps({**held, field: value}))
            try:
                NetworkFolder(tmp_path, kind)
            except ValueError as error:
                reported = str(error).replace(str(tmp_path), "")
                possible = value is None or value == 0  # some mean another network, of which the shapes tell
                assert field in reported or (possible and "do not fit the model" in reported), (field, value, reported)
            else:
                assert value is None or value == 0 or field in ("codes", "drafter"), (field, value)  # digests
