"""Emu3.5: logits, tokens and pixels of the official program, by every method; folders of the authors, and in NF4; refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_vqgan import official_pixels
from safetensors.torch import load_file, save_file
from summed_model import SummedModel
from tiny_language_models import make_causal, make_vqgan, needs_janus
from torch import Tensor

import vargen
from vargen.compat import installed_version
from vargen.decoding import PRESETS, Sampling, decode, list_methods
from vargen.folders.transformers_networks import StoredNetwork
from vargen.in_place.own_generate import generate_both
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.emu3_5 import OFFICIAL, Emu35
from vargen.pipelines.loading import inspect_model
from vargen.training.generated_images import make_teacher
from vargen.verify.exact_sum import sum_pass

pytestmark = needs_janus
PROMPTS = ["a red apple", "a blue car on the moon", "dog"]
SIZE = (3, 4)
TEXT = "<|extra_203|>You are a helpful assistant for t2i task. USER: {} ASSISTANT: <|extra_100|>"
BLANK = "<|extra_203|>You are a helpful assistant. USER:  ASSISTANT: <|extra_100|>"
GREEDY = {"temperature": 0, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipe() -> Any:
    model, tokenizer = make_causal("emu3.5", max_position_embeddings=5120)  # room for an image of the published size
    return vargen.accelerate(model, tokenizer, size=SIZE, vision_tokenizer=make_vqgan())


# -- the official program -------------------------------------------------------------------------------------------------


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)


def official_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits `[T, V]` of a sequence by the formulas of the official modules, from the weights by their official names."""
    config, weights = model.config, model.state_dict()
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta = config.to_dict().get("rope_theta") or config.rope_parameters["rope_theta"]
    angles = torch.arange(len(ids))[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    def rotate(x: Tensor) -> Tensor:  # [heads, T, width]
        return x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin

    hidden = weights["model.embed_tokens.weight"][ids]
    for number in range(config.num_hidden_layers):
        w = {name.removeprefix(f"model.layers.{number}."): value for name, value in weights.items()}
        normed = rms(hidden, w["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (normed @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (count, width)).transpose(0, 1)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = (
            rotate(rms(each, w[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)) for name, each in (("q", q), ("k", k))
        )
        k, v = (each.repeat_interleave(heads // groups, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        scores = scores + torch.full(scores.shape[1:], -math.inf).triu(1)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        hidden = hidden + attended @ w["self_attn.o_proj.weight"].T
        normed = rms(hidden, w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (normed @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms(hidden, weights["model.norm.weight"], config.rms_norm_eps) @ weights["lm_head.weight"].T


def official_tokens(pipe: Any, prompt: str, scale: float = 5.0, top_k: int = 5120) -> list[int]:
    """Ids that the official loop generates greedily for a given size, from the start of the image to its end.

    Until the image starts, the unconditional row has its prompt alone; then, what the other one has.
    """
    number = pipe.processor.convert_tokens_to_ids
    start, image, end, line = map(number, ("<|image start|>", "<|image token|>", "<|image end|>", "<|extra_200|>"))
    first_code, (height, width) = number("<|visual token 000000|>"), SIZE
    size = pipe.processor(f"{height}*{width}")["input_ids"]
    row, blank = (pipe.processor(each)["input_ids"] for each in (TEXT.format(prompt), BLANK))
    found: list[int] = []
    while not found or found[-1] != end:
        place = len(found) - 1 - len(size)  # 0: the token that begins the codes
        if place <= 0:
            token = [start, *size, image][len(found)]
        elif place == height * (width + 1):
            token = end
        elif place % (width + 1) == 0:
            token = line
        else:
            own, other = (official_logits(pipe.model, [*each, *found])[-1].log_softmax(-1) for each in (row, blank))
            scores = scale * (own - other) + other
            scores[:first_code] = -math.inf
            scores[scores < scores.topk(min(top_k, len(scores)))[0][-1]] = -math.inf
            token = int(scores.argmax())
        found.append(token)
    return found[len(size) + 2 :]


def test_the_network_is_that_of_the_official_modules(pipe: Any) -> None:
    ids = torch.randint(len(pipe.processor), (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = pipe.model(ids).logits
        expected = torch.stack([official_logits(pipe.model, row) for row in ids.tolist()])
    assert (found - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("method", ["ar", "gumbel", "gsd"])
def test_greedy_tokens_are_those_of_the_official_loop(pipe: Any, method: str) -> None:
    """Prompts of different length together, with the guidance of the published model; the ends of rows included."""
    found = pipe(PROMPTS, accelerator=method, **GREEDY).tokens
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert pipe.language_model.ids[tokens].tolist() == official_tokens(pipe, prompt)


def test_the_own_generate_makes_the_same_tokens(pipe: Any) -> None:
    """As `vargen check` calls it; in place, too."""
    own, enabled = generate_both(pipe, PROMPTS[1], pipe.num_tokens)
    assert own.tolist() == enabled.tolist() == pipe(PROMPTS[1], accelerator="ar", **GREEDY).tokens[0].tolist()


def test_defaults_and_prompts_are_the_official_ones(pipe: Any) -> None:
    known = pipe.language_model
    expected = {"guidance_scale": 5.0, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    assert pipe.default_sampling == expected and type(known).top_k == 5120, "tiny models have fewer tokens than top-k"
    assert type(known).published_size == (64, 64)
    rows, begin = pipe.encode_condition("dog")[0], "<|image start|>3*4<|image token|>"
    assert rows.ids[0].tolist() == pipe.processor(TEXT.format("dog") + begin)["input_ids"]
    assert rows.unconditional.ids[0].tolist() == pipe.processor(BLANK + begin)["input_ids"]
    other = pipe.encode_condition("dog", negative_prompt="a red car")[0].unconditional
    assert other.ids[0].tolist() == pipe.processor(BLANK.replace("USER: ", "USER: a red car") + begin)["input_ids"]


@pytest.fixture(scope="module")
def equipped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With all that a method may need: a draft model, draft heads, and a codebook."""
    (model, tokenizer), (small, _) = (make_causal("emu3.5", num_hidden_layers=layers) for layers in (3, 1))
    pipe = vargen.accelerate(model, tokenizer, small, size=SIZE, vision_tokenizer=make_vqgan())
    for cls in (EagleDrafter, MedusaDrafter):
        folder, settings = tmp_path_factory.mktemp("head"), make_teacher(pipe).settings
        cls(**{each: settings[each] for each in cls.target_settings}).save_pretrained(folder)
        pipe.load_drafter(folder)
    return pipe


@pytest.mark.parametrize("name", [each.name for each in list_methods("next-token") if not each.experimental])
def test_every_method_runs_or_says_why_not(equipped: Any, name: str) -> None:
    model, condition = equipped.decoding_model(3.0), equipped.encode_condition(PROMPTS[:2])[0]
    if name in ("mulo", "mulo-exact"):
        with pytest.raises(ValueError, match="low resolution"):
            decode(model, condition, torch.arange(2), PRESETS[name])
        return
    found = decode(model, condition, torch.arange(2), PRESETS[name])
    assert (found.tokens.view(-1, *equipped.grid)[:, :-1, -1] == 24).all() and (found.tokens[:, -1] == 25).all()
    assert found.stats.forced == 2 * 3 and (found.tokens < 24).sum() == 2 * 12
    if PRESETS[name].sequential_tokens:
        assert torch.equal(found.tokens, decode(model, condition, torch.arange(2), "ar").tokens)


def test_drafts_leave_greedy_tokens_as_they_are(equipped: Any) -> None:
    expected = equipped("dog", accelerator="ar", **GREEDY).tokens
    for method in ("speculative", "eagle", "medusa", "gumbel", "scd"):
        assert torch.equal(equipped("dog", accelerator=method, **GREEDY).tokens, expected), method


def test_passes_sum_to_the_model_s_distribution() -> None:
    model, tokenizer = make_causal("emu3.5", codes=3)
    described = Emu35(model, tokenizer, (2, 1))
    summed: Any = SummedModel(TransformersTokenModel(described, 3.0), described.encode_prompts(tokenizer, ["dog"], None))
    found = sum_pass(PRESETS["scd"], summed, passes=2, sampling=Sampling(1.2, top_k=2))
    assert max(found.distance, found.draft_distance) < 1e-5


def test_int8_layers_run_at_any_width(pipe: Any, tmp_path: Path) -> None:
    """In memory and from an official folder, whose layers are read one by one; and near the tokens of the float model."""
    folder = make_official(pipe, tmp_path)
    quantized = vargen.accelerate(pipe.model, pipe.processor, size=SIZE, quantization="int8")
    opened = vargen.open_pipeline(folder, size=SIZE, quantization="int8")
    del pipe.model.int8_network
    expected = quantized(PROMPTS, accelerator="ar", **GREEDY).tokens
    for each in (quantized, opened):
        assert torch.equal(each(PROMPTS, accelerator="gumbel", **GREEDY).tokens, expected)
    assert (expected == pipe(PROMPTS, accelerator="ar", **GREEDY).tokens).float().mean() > 0.5


# -- pixels ---------------------------------------------------------------------------------------------------------------


def test_pixels_are_those_of_the_official_decoder(pipe: Any) -> None:
    result = pipe(PROMPTS, output_type="pt", accelerator="gumbel")
    codes = result.tokens.view(3, 3, 5)[..., :-1]
    with torch.no_grad():
        expected = official_pixels(pipe.vision_tokenizer, codes)
    assert result.images.shape == (3, 3, 6, 8)
    assert torch.allclose(result.images, (expected / 2 + 0.5).clamp(0, 1), atol=1e-5)
    assert expected.std() > 0.01


# -- folders --------------------------------------------------------------------------------------------------------------


def make_official(pipe: Any, folder: Path) -> Path:
    """Write the folders of the authors: another class and type in config.json, the whole image tokenizer with its encoder."""
    pipe.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Emu3ForCausalLM"], "model_type": "Emu3", "pretraining_tp": 1, "boi_token_id": 40}
    config["rope_theta"] = config.pop("rope_parameters", config)["rope_theta"]  # transformers 5 writes it elsewhere
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "vision_tokenizer/model.safetensors"
    save_file({**load_file(file), "encoder.conv_in.weight": torch.ones(2, 3, 3, 3)}, file)
    (folder / "vision_tokenizer/config.json").write_text('{"model_type": "Emu3p5VisionVQ", "auto_map": {"AutoModel": "m.M"}}')
    return folder


def test_official_folders_are_opened(pipe: Any, tmp_path: Path) -> None:
    """Also with the image tokenizer elsewhere, or without it; what is saved opens again."""
    folder, saved = make_official(pipe, tmp_path / "official"), tmp_path / "saved"
    options = {"size": SIZE, "torch_dtype": torch.float32}
    expected = pipe("dog", temperature=0, output_type="np")
    opened = vargen.open_pipeline(folder, **options)
    opened.save_pretrained(saved)
    (folder / "vision_tokenizer").rename(tmp_path / "elsewhere")
    others = [
        vargen.open_pipeline(saved, **options),
        vargen.open_pipeline(folder, vision_tokenizer=tmp_path / "elsewhere", **options),
    ]
    for each in (opened, *others, type(pipe).from_pipe(opened)):
        assert (each("dog", temperature=0, output_type="np").images == expected.images).all()
    assert inspect_model(saved).makes_images
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"], config["rms_norm_eps"]  # which are the defaults of the official class
    (folder / "config.json").write_text(json.dumps(config))
    plain = vargen.open_pipeline(folder, **options)
    assert not plain.makes_images and torch.equal(plain("dog", **GREEDY).tokens, expected.tokens)


def test_an_image_tokenizer_that_does_not_fit_is_refused(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(StoredNetwork, "load", lambda *_: pytest.fail("weights were read"))
    place = tmp_path / "other"

    def refuse(match: str, error: Any = ValueError, **changed: Tensor) -> None:
        made = {name: value for name, value in {**make_vqgan().state_dict(), **changed}.items() if value.numel()}
        place.mkdir(exist_ok=True)
        save_file(made, place / "model.safetensors")
        with pytest.raises(error, match=match):
            vargen.open_pipeline(tmp_path / "model", size=SIZE, vision_tokenizer=place)

    none = torch.empty(0)
    refuse("24 codes .* got 25", **{"quantize.embedding.weight": torch.ones(25, 8)})
    refuse(r"unexpected: 1 \(decoder\.up\.0\.attn\.3\.q\.bias", **{"decoder.up.0.attn.3.q.bias": torch.ones(32)})
    refuse("missing: 1 .decoder.conv_out.bias", **{"decoder.conv_out.bias": none})
    refuse(r"VQGAN image tokenizer: .*post_quant_conv\.weight is \[16, 8\]", **{"post_quant_conv.weight": torch.ones(16, 8)})
    refuse("VQGAN image tokenizer: .*quantize.embedding.weight", **{"quantize.embedding.weight": none})
    refuse("has 34 parts", **{f"decoder.up.{level}.x": torch.ones(1) for level in range(2, 34)})
    refuse("is I64", **{"decoder.conv_out.bias": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(TypeError, match="vision_tokenizer must be None for a Qwen2ForCausalLM"):
        vargen.accelerate(*make_causal("simplear"), size=(4, 4), vision_tokenizer=make_vqgan())


def test_what_emu3_5_cannot_do_is_refused(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"consecutive ids"):
        vargen.accelerate(make_causal("emu3.5", vocab_size=50)[0], pipe.processor, size=SIZE)
    _, tokenizer = make_causal("emu3.5")
    tokenizer.add_tokens(["<|visual token 000025|>", "<|visual token 000024|>"])
    with pytest.raises(ValueError, match=r"consecutive ids"):
        vargen.accelerate(pipe.model, tokenizer, size=SIZE)
    _, tokenizer = make_causal("text")
    tokenizer.add_tokens([*(f"<|visual token {number:06d}|>" for number in range(24)), "<|image start|>", "<|extra_200|>"])
    tokenizer.add_tokens([*(f"more {number}" for number in range(pipe.model.config.vocab_size)), "<|image end|>"])
    with pytest.raises(ValueError, match=r"which embeds \d+ tokens, got one of \d+"):
        vargen.accelerate(pipe.model, tokenizer, size=SIZE)
    folder = make_official(pipe, tmp_path)
    with pytest.raises(ValueError, match="got 64 x 81 tokens"):
        vargen.open_pipeline(folder, size=(64, 80))
    config = json.loads((folder / "config.json").read_text())
    changes = (("auto_map", {"AutoConfig": "c.C"}), ("head_dim", "x"), ("head_dim", 13), ("rope_theta", 0), ("rms_norm_eps", 7),
               ("num_key_value_heads", 3), ("model_type", "emu3"))  # fmt: skip
    for name, value in changes:
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ValueError, match=r"config\.json|[qk]_proj"):
            vargen.open_pipeline(folder, size=SIZE)


def test_layers_on_several_devices_are_refused_in_a_sentence(pipe: Any) -> None:
    model, tokenizer = make_causal("emu3.5")
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"layers of Qwen3ForCausalLM must run on one device, got cpu, meta; .* device_map"):
        vargen.accelerate(model, tokenizer, size=SIZE)


# -- NF4 ------------------------------------------------------------------------------------------------------------------

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
       "bnb_4bit_compute_dtype": "bfloat16"}  # fmt: skip


def quantized_folder(pipe: Any, folder: Path) -> Path:
    """A folder with the names and shapes of weights in NF4, as bitsandbytes stores them; without their values."""
    make_official(pipe, folder)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name] = value
        if ".layers." in name and value.ndim == 2:
            scales = {"absmax": (value.numel() // 64, torch.uint8), "quant_map": (16, torch.float32),
                      "nested_absmax": (1, torch.float32), "nested_quant_map": (256, torch.float32),
                      "quant_state.bitsandbytes__nf4": (90, torch.uint8)}  # fmt: skip
            tensors |= {f"{name}.{each}": torch.zeros(size, dtype=dtype) for each, (size, dtype) in scales.items()}
            tensors[name] = torch.zeros(value.numel() // 2, 1, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": NF4}))
    return folder


def test_a_folder_in_nf4_passes_to_bitsandbytes(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized_folder(pipe, tmp_path)
    stored = StoredNetwork(folder, OFFICIAL["Emu3ForCausalLM"])
    assert stored.is_quantized and stored.config.quantization_config == NF4 and stored.dtype == torch.float32
    seen: dict[str, Any] = {}

    def load(self: Any, dtype: Any, **options: Any) -> Any:
        seen.update(options, quantization=self.config.quantization_config)
        return make_causal("emu3.5")[0]

    monkeypatch.setattr(StoredNetwork, "load", load)
    vargen.open_pipeline(folder, size=SIZE)
    assert seen == {"device_map": {"": torch.device("cpu")}, "quantization": NF4}
    with pytest.raises(ValueError, match="quantization must be None for stored weights that are quantized"):
        vargen.open_pipeline(folder, size=SIZE, quantization="int8")


@pytest.mark.skipif(installed_version("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.skipif(installed_version("accelerate") is None, reason="needs accelerate")
def test_nf4_without_bitsandbytes_names_the_package(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="bitsandbytes"):
        vargen.open_pipeline(quantized_folder(pipe, tmp_path), size=SIZE)
