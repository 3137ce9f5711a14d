"""A folder is data: nothing in it runs, no value in it is a path or a class, and what was stored is what is loaded.

Each case opens a folder in a process with 10 seconds and 2 GB: it generates the tokens of the folder before the attack, or is
refused in one line that names a file of the folder.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_process import open_and_sample, run_limited
from safetensors.torch import load_file, save_file
from tiny_language_models import has_release, make_chameleon, make_emu3, make_janus, needs_janus
from tiny_models import t5_pipeline

import vargen
from vargen.compat import installed_version
from vargen.folders.processors import reduce_template
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.text_encoder import TEXT_ENCODERS

MARKER = "code-ran"
CODE = f"open(__file__ + '.{MARKER}', 'w').close()\ngenerate = None\n"


def save_language_model(folder: Path, make: Callable[..., Any] = make_janus, **changed: Any) -> tuple[Any, Any]:
    model, processor = make(**changed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("saved") / "janus"
    save_language_model(folder)
    return folder, open_and_sample(str(folder))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A pipeline of ours whose text encoder is a T5."""
    folder = tmp_path_factory.mktemp("saved") / "t5"
    t5_pipeline().save_pretrained(folder)
    return folder, open_and_sample(str(folder))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))


def change_part(file: Path, part: str, **values: Any) -> None:
    change(file, **{part: {**json.loads(file.read_text())[part], **values}})


def attack(saved: tuple[Path, list[int]], folder: Path, how: Callable[[Path], Any]) -> tuple[str, Any]:
    """Return what opening a copy of a folder after an attack does; nothing of it may have run."""
    shutil.copytree(saved[0], folder)
    how(folder)
    found = run_limited(open_and_sample, str(folder))
    assert not list(folder.rglob(f"*{MARKER}")), "code of the folder ran"
    return found


def add_code(folder: Path, *parts: str) -> None:
    place = folder.joinpath(*parts, "custom_generate")
    place.mkdir(parents=True)
    (place / "generate.py").write_text(CODE)


def add_second_folder(folder: Path) -> None:
    """A model within the model, with code."""
    shutil.copytree(folder, folder.parent / "second")
    shutil.move(folder.parent / "second", folder / "second")
    add_code(folder, "second")


AUDIO = {"audio_tokenizer_class": "JanusForConditionalGeneration", "audio_tokenizer_name_or_path": "second"}


def name_audio_tokenizer(folder: Path, file: str, absolute: bool) -> None:
    add_second_folder(folder)
    value = {**AUDIO, "audio_tokenizer_name_or_path": str(folder / "second")} if absolute else AUDIO
    change(folder / file, **(value if file == "audio_tokenizer_config.json" else {"audio_tokenizer": value}))


AUTO_MAP = {"AutoModel": "modeling.Evil", "AutoProcessor": "processing.Evil", "AutoTokenizer": ["tokens.Evil", None]}
ATTENTION = {"_attn_implementation": "flash_attention_2", "_attn_implementation_internal": "flash_attention_3"}


def edit_weights(file: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def drop_weight(file: str, name: str) -> Callable[[Path], Any]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        del weights[next(each for each in weights if name in each)]

    return lambda folder: edit_weights(folder / file, edit)


def in_part(part: str, **values: Any) -> Callable[[Path], Any]:
    return lambda folder: change_part(folder / "config.json", part, **values)


def in_file(file: str, **values: Any) -> Callable[[Path], Any]:
    return lambda folder: change(folder / file, **values)


# By model: attacks, and what the line that refuses them names besides the folder.
REFUSED: dict[str, list[tuple[Callable[[Path], Any], str]]] = {
    "janus": [
        (lambda folder: name_audio_tokenizer(folder, "processor_config.json", False), "audio_tokenizer"),
        (lambda folder: name_audio_tokenizer(folder, "processor_config.json", True), "audio_tokenizer"),
        *((in_file(file, auto_map=AUTO_MAP), "auto_map")
          for file in ("config.json", "processor_config.json", "tokenizer_config.json")),
        (lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}'), "adapter_config"),
        (in_file("config.json", quantization_config={"quant_method": "torchao"}), "quantization_config"),
        (in_part("text_config", auto_map=AUTO_MAP), "auto_map"),
        (in_part("text_config", model_type="gemma3"), "text_config"),
        (in_part("text_config", hidden_act="../evil"), "hidden_act"),
        # Weights that are missing.
        *((drop_weight("model.safetensors", name), name)
          for name in ("layers.1.mlp.up_proj", "lm_head", "embed_tokens", "generation_head", "quantize.embedding")),
        # Sizes, before a network is built.
        (in_part("text_config", num_hidden_layers=1000), ""), (in_part("vision_config", depth=10**6), ""),
        (in_part("text_config", rope_scaling={"rope_type": "yarn", "factor": [[[[1]]]]}), ""),
        (in_part("text_config", rope_parameters={"rope_type": "default", "mrope_section": [2, 1, -2.5]}), ""),
        (in_part("text_config", max_position_embeddings=True), ""), (in_part("vq_config", channel_multiplier=[1] * 10**5), ""),
        (in_part("vq_config", channel_multiplier=[1] * 64, num_res_blocks=100), "channel_multiplier"),  # each alone is allowed
    ],
    "t5": [
        *((drop_weight("text_encoder/model.safetensors", name), name)
          for name in ("block.1.layer.0.SelfAttention.q", "shared", "final_layer_norm")),
        (in_file("text_encoder/config.json", feed_forward_proj="gated-evil"), "text_encoder/config.json"),
        (in_file("text_encoder/config.json", quantization_config={"quant_method": "quanto"}), "text_encoder/config.json"),
        (in_file("tokenizer/tokenizer_config.json", extra_ids=10**6), "tokenizer_config.json"),
        (in_file("tokenizer/tokenizer_config.json", added_tokens_decoder={"4000000000": {"content": "x"}}), "tokenizer_config"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "number"), [(model, number) for model, rows in REFUSED.items() for number in range(len(rows))]
)
def test_an_attack_is_refused_in_a_line_that_names_it(
    model: str, number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not has_release(model):
        pytest.skip("needs a newer transformers")
    how, said = REFUSED[model][number]
    kind, message = attack(request.getfixturevalue(model), tmp_path / "model", how)
    assert kind == "ValueError" and str(tmp_path / "model") in message and said in message, (kind, message)
    assert "\n" not in message and len(message) < 600


@needs_janus
@pytest.mark.parametrize(
    "how",
    [
        add_code,
        lambda folder: name_audio_tokenizer(folder, "audio_tokenizer_config.json", False),
        lambda folder: change(folder / "tokenizer_config.json", tokenizer_file="/dev/zero", vocab_file="/etc/passwd"),
        lambda folder: change(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", processor_class="Evil"),
        lambda folder: change(folder / "config.json", transformers_weights="../other.safetensors", torchscript=True),
        lambda folder: change_part(folder / "config.json", "text_config", **ATTENTION),
        lambda folder: change(folder / "config.json", **ATTENTION),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ 'a' * 500000000 }}"),
        lambda folder: change(folder / "tokenizer_config.json", chat_template="{{ 'a' * 500000000 }}"),
        lambda folder: change(folder / "tokenizer_config.json", extra_ids=0, max_len_single_sentence=10**9),
    ],
    ids=range(10),
)
def test_values_that_name_files_classes_and_programs_have_no_effect(janus: Any, tmp_path: Path, how: Any) -> None:
    assert attack(janus, tmp_path / "model", how) == ("returned", janus[1])


@needs_janus
def test_the_attention_of_a_folder_is_ours_to_choose(janus: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(janus[0], tmp_path / "model"))
    change(folder / "config.json", _attn_implementation="flash_attention_2")
    change_part(folder / "config.json", "text_config", _attn_implementation="flash_attention_2")
    assert vargen.open_pipeline(folder).model.config.get_text_config()._attn_implementation == "sdpa"


# -- weights ------------------------------------------------------------------------------------------------------------------


@needs_janus
@pytest.mark.parametrize("make", [make_janus, make_emu3, make_chameleon])
def test_no_tie_replaces_stored_weights(tmp_path: Path, make: Any) -> None:
    """transformers 4 drops the head, which is refused; transformers 5 keeps both."""
    model, _ = save_language_model(tmp_path / "model", make)
    change(tmp_path / "model" / "config.json", tie_word_embeddings=True)
    if make is not make_chameleon:
        change_part(tmp_path / "model" / "config.json", "text_config", tie_word_embeddings=True)
    size = {"size": (4, 5)} if make is make_emu3 else {}
    if installed_version("transformers") < "5":
        with pytest.raises(ValueError, match=r"stores a lm_head\.weight that the loaded network does not have"):
            vargen.open_pipeline(tmp_path / "model", **size)
        return
    opened = vargen.open_pipeline(tmp_path / "model", **size).model.state_dict()
    assert all(torch.equal(value, opened[name]) for name, value in model.state_dict().items())


@needs_janus
@pytest.mark.parametrize("make", [make_janus, make_emu3, make_chameleon])
@pytest.mark.parametrize("kept", ["both", "embed_tokens", "lm_head"])
def test_tied_weights_open_whichever_of_their_names_is_stored(tmp_path: Path, make: Any, kept: str) -> None:
    model, processor = make()
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = True
    model.tie_weights()
    size = {"size": (4, 5)} if make is make_emu3 else {}
    pipe = vargen.accelerate(model, processor, **size)
    pipe.save_pretrained(tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tied = {name for name in weights if name == "lm_head.weight" or name.endswith("model.embed_tokens.weight")}
    own = {name: value for name, value in weights.items() if name not in tied or kept == "both" or kept in name}
    assert len(tied) > 1 and len(own) >= len(weights) - len(tied) + 1
    if kept != "both":
        save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    opened = vargen.open_pipeline(tmp_path, **size)
    for name, value in opened.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    ids = [each.encode_condition("a red apple")[0].ids for each in (pipe, opened)]
    assert torch.equal(*ids)


@needs_janus
def test_two_values_of_one_weight_are_refused(tmp_path: Path) -> None:
    """Under an earlier name beside the present one, and in a file beside those of an index."""
    save_language_model(tmp_path / "names", make_emu3)
    weights = load_file(tmp_path / "names" / "model.safetensors")
    name = next(name for name in weights if name.endswith("lm_head.weight"))
    other = "lm_head.weight" if name != "lm_head.weight" else "text_model.lm_head.weight"
    save_file({**weights, other: weights[name] + 1}, tmp_path / "names" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"stores .*lm_head\.weight twice"):
        vargen.open_pipeline(tmp_path / "names", size=(4, 5))
    save_language_model(tmp_path / "files")
    weights = load_file(tmp_path / "files" / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "files" / "b.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "b.safetensors")}
    (tmp_path / "files" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors beside the index"):
        vargen.open_pipeline(tmp_path / "files")


def test_one_narrow_tensor_does_not_round_the_others(t5: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(t5[0] / "text_encoder", tmp_path / "t5"))
    edit_weights(folder / "model.safetensors", lambda weights: weights.update({min(weights): weights[min(weights)].half()}))
    stored = StoredNetwork(folder, TEXT_ENCODERS["T5EncoderModel"])
    network, weights = stored.load(), load_file(folder / "model.safetensors")
    assert all(torch.equal(network.state_dict()[name], value.float()) for name, value in weights.items())
    edit_weights(folder / "model.safetensors", lambda weights: weights.update({name: weights[name].half() for name in weights}))
    assert StoredNetwork(folder, TEXT_ENCODERS["T5EncoderModel"]).load().dtype == torch.float16


@needs_janus
@pytest.mark.parametrize("old", [False, True])
def test_names_of_earlier_releases_are_loaded(tmp_path: Path, old: bool) -> None:
    model, _ = save_language_model(tmp_path, make_emu3)
    former = {"lm_head.": "text_model.lm_head.", "model.text_model.": "text_model.model.", "model.vqmodel.": "vqmodel."}

    def rename(name: str) -> str:
        prefix = next(each for each in former if name.startswith(each))
        return former[prefix] + name.removeprefix(prefix) if old else name

    state = model.state_dict()
    save_file({rename(name): value for name, value in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    opened = vargen.open_pipeline(tmp_path, size=(4, 5)).model.state_dict()
    assert all(torch.equal(value, opened[name]) for name, value in state.items())


def index_of(*names: str) -> Callable[[Path], Any]:
    """Name other files in an index."""

    def write(folder: Path) -> None:
        weights = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        os.mkfifo(folder / "pipe.safetensors")
        named = {weight: names[number % len(names)] for number, weight in enumerate(weights)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))

    return write


def put_fifo(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def link_to_device(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")


LM_FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@needs_janus
@pytest.mark.parametrize(
    "how",
    [index_of("pipe.safetensors"), index_of("../outside.safetensors"), index_of("/etc/passwd"), index_of("weights.bin")]
    + [index_of("a\0b.safetensors"), index_of("\ud800.safetensors")]
    + [lambda folder, name=name: put_fifo(folder, name) for name in LM_FILES]
    + [lambda folder, name=name: link_to_device(folder, name) for name in LM_FILES],
    ids=range(6 + 2 * len(LM_FILES)),
)
def test_pipes_devices_and_files_elsewhere_are_not_read(janus: Any, tmp_path: Path, how: Any) -> None:
    kind, message = attack(janus, tmp_path / "model", how)
    if kind == "returned":  # settings that need not be there
        assert message == janus[1]
    else:
        assert kind == "ValueError" and str(tmp_path / "model") in message and len(message) < 600, (kind, message)


@needs_janus
@pytest.mark.parametrize("values", [{"image_seq_length": 3 * 10**8}, {"image_seq_length": [1]}, {"image_seq_length": -1}])
def test_lengths_of_a_processor_are_bounded(tmp_path: Path, values: dict[str, Any]) -> None:
    save_language_model(tmp_path, make_chameleon)
    change(tmp_path / "processor_config.json", **values)
    with pytest.raises(ValueError, match=r"processor_config\.json has image_seq_length"):
        vargen.open_pipeline(tmp_path)


# -- tokenizers ---------------------------------------------------------------------------------------------------------------


def edit_tokenizer(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        edit(content)
        file.write_text(json.dumps(content))

    return write


def replace(pattern: dict[str, str], content: str, times: int = 1) -> dict[str, Any]:
    return {"normalizers": [{"type": "Replace", "pattern": pattern, "content": content}] * times, "type": "Sequence"}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


TABLE = base64.b64encode((4).to_bytes(4, "little") + b"\0\0\0\0" + b"a" * 30_000 + b"\0").decode()
BOMB = {"type": "Precompiled", "precompiled_charsmap": TABLE}


@needs_janus
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda content: content.update(normalizer=replace({"String": "a"}, "aa", 24)), "times as long"),
        (lambda content: content.update(normalizer=replace({"Regex": ""}, "a" * 1000)), "times as long"),
        (lambda content: content.update(normalizer={"type": "Prepend", "prepend": "a" * 10**6}), "times as long"),
        (lambda content: content.update(normalizer=BOMB), "times as long"),
        (lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "tokenizer"),
        (lambda content: content.update(normalizer={"type": "Evil"}), "Evil"),
        (lambda content: content.update(pre_tokenizer=split("(")), "tokenizer"),
        (lambda content: content.update(pre_tokenizer=split(r"^(a|\1|[^x])*(a|a)*(.|a)*$" * 3 + "x")), ""),
        (lambda content: content.update(padding={"strategy": {"Fixed": 4_000_000_000}, "direction": "Left", "pad_id": 0,
                                                 "pad_type_id": 0, "pad_token": "x"}), "padding: 4000000000"),
        (lambda content: content["model"]["vocab"].update(evil=4_000_000_000), "token id: 4000000000"),
        (lambda content: content["model"]["vocab"].update(evil=-1), "token id: -1"),
        (lambda content: content["added_tokens"][0].update(id=4_000_000_000), "token id: 4000000000"),
        (lambda content: content.update(model={"type": "Unigram", "unk_id": 77, "vocab": [["a", 0.0]]}), ""),
        (lambda content: content["model"].update(dropout=0.5), "dropout"),
        (lambda content: content["added_tokens"].extend([{"id": 9, "content": "a" * 5000}]), "added_tokens"),
        (lambda content: content.update(more=[[]] * 5_000_000), "values"),
    ],
    ids=range(16),
)  # fmt: skip
def test_tokenizers_cannot_multiply_abort_or_panic(janus: Any, tmp_path: Path, edit: Any, said: str) -> None:
    """Where nothing is said, the tokenizer may work, too."""
    kind, message = attack(janus, tmp_path / "model", edit_tokenizer(edit))
    assert kind == "ValueError" or (kind == "returned" and not said), (kind, message)
    assert kind == "returned" or (said in message and "\n" not in message and len(message) < 600), message


# -- chat templates ---------------------------------------------------------------------------------------------------------

GLM = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (GLM, "'a  b' "),
        ("[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% else %}"
         "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
         "{{ bos_token }}\u2581\"'{# no #}", "[gMASK]<sop><|user|>\n'a  b'<s>\u2581\"'"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{{ m['content'][0]['text'] ~ '!' }}{% endfor %}", "'a  b' !"),
    ],
)  # fmt: skip
def test_a_chat_template_becomes_one_of_ours_with_the_same_text(template: str, expected: str, tmp_path: Path) -> None:
    from jinja2 import Environment

    own = reduce_template(template, tmp_path, {"bos_token": "<s>"})
    message = {"role": "user", "content": [{"type": "text", "text": "'a  b' "}]}
    assert Environment().from_string(own).render(messages=[message]) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 500000000 }}" + GLM,
        "{{ '%500000000s' % 'a' }}" + GLM,
        "{{ '{:500000000}'.format('a') }}" + GLM,
        "{% for i in range(100000000) %}a{% endfor %}" + GLM,
        "{% set a = 'aaaaaaaa' %}" + "{% set a = a ~ a %}" * 30 + "{{ a }}" + GLM,
        "{% set ns = namespace(a='a') %}{% for m in messages %}{% set ns.a = ns.a + ns.a %}{% endfor %}" + GLM,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + GLM,
        "{% include 'x' %}" + GLM,
        "{{ ''.__class__.__mro__ }}",
        "{{ messages | tojson(indent=500000000) }}" + GLM,
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}" + GLM,
        "{{ raise_exception('x') }}" + GLM,
        "{% set a = ['x'] %}" + "{% set a = [a, a] %}" * 25 + "{{ a }}" + GLM,
        "{% set a = 'xxxxxxxx' %}" + "{% set a = (a, a) | string %}" * 24 + GLM,
        "".join(f"{{% for {name} in '{'c' * 3000}' %}}" for name in "abc") + "{% endfor %}" * 3 + GLM,
        "{% for a in messages[0].content[0].text %}{{ 'b' * 1 }}{% endfor %}" + GLM,
        "no text", GLM + GLM, "{% for", "a" * 70_000 + GLM, "a" * 2000 + GLM,
    ],
    ids=range(21),
)  # fmt: skip
def test_a_chat_template_that_computes_is_refused(template: str) -> None:
    kind, message = run_limited(reduce_template, template, Path("chat_template.jinja"), {})
    assert kind == "ValueError" and message.startswith("chat_template.jinja") and "\n" not in message, (kind, message)
