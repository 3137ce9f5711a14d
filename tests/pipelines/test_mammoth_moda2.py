"""MammothModa2, whose image tokens have a feed-forward of their own: tokens of the official loop, decoder inputs, folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding_checks import check_passes, run_or_refuse
from safetensors.torch import load_file, save_file
from tiny_language_models import has_release, make_mammoth_moda2, needs_janus
from torch import Tensor

import vargen
from vargen.decoding import list_methods

pytestmark = [needs_janus, pytest.mark.skipif(not has_release("mammoth-moda2"), reason="needs a newer transformers")]
PROMPTS = ["a red apple", "a blue car on the moon"]
SIZE = (3, 4)
TEXT = (
    "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    "<|image start|>4*3<|image token|>"
)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return vargen.accelerate(*make_mammoth_moda2(), size=SIZE)


def official_states(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Final states `[R, T, D]` of ids `[R, T]` as the official network computes them, written out: no module of ours runs.

    A mask `[R, T]` hides columns, as that of the unconditional rows does; positions count what is visible.
    """
    weights, config = model.state_dict(), model.config
    D, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    K = D // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def feed_forward(x: Tensor, name: str) -> Tensor:
        gate, up, down = (weights[f"{name}.{each}_proj.weight"] for each in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    is_image = (ids >= config.vocab_size)[..., None]
    text, image = (weights[f"model.embed_tokens.{each}.weight"] for each in ("text", "image"))
    x = torch.where(is_image, image[(ids - config.vocab_size).clamp(min=0)], text[ids.clamp(max=config.vocab_size - 1)])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    frequency = theta ** (-torch.arange(0, K, 2) / K)
    angles = (places[:, None, :, None] * torch.cat([frequency, frequency])).float()
    visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & mask[:, None].bool()
    visible = visible | torch.eye(ids.shape[1], dtype=torch.bool)
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}"
        normed = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            F.linear(normed, weights[f"{name}.self_attn.{each}_proj.weight"], weights[f"{name}.self_attn.{each}_proj.bias"])
            .unflatten(-1, (-1, K))
            .transpose(1, 2)
            for each in "qkv"
        )
        k, v = (each.repeat_interleave(heads // kv, 1) for each in (rotate(k), v))
        scores = (rotate(q) @ k.mT / K**0.5).masked_fill(~visible[:, None], float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights[f"{name}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{name}.post_attention_layernorm")
        found = feed_forward(normed, f"{name}.mlp")
        if config.gen_mlp_start <= number < config.gen_mlp_stop:
            found = torch.where(is_image, feed_forward(normed, f"{name}.gen_mlp"), found)
        x = x + found
    return norm(x, "model.norm")


def official_tokens(pipe: Any, prompt: str, scale: float = 6.0) -> list[int]:
    """Greedy ids of the official loop: two equal rows, of which the second sees only the last ten tokens of the prompt."""
    tokenizer, model = pipe.processor, pipe.model
    ids = torch.tensor([tokenizer(TEXT.format(prompt))["input_ids"]] * 2)
    mask = torch.ones_like(ids)
    mask[1, :-10] = 0
    first, end = (tokenizer.convert_tokens_to_ids(each) for each in ("<|visual token 00000|>", "<|endofline|>"))
    found: list[int] = []
    for _ in range(SIZE[0]):
        for column in range(SIZE[1] + 1):
            logits = official_states(model, ids, mask)[:, -1] @ model.state_dict()["gen_head.weight"].T
            guided = logits[1] + (logits[0] - logits[1]) * scale
            image = slice(first - model.config.vocab_size, first + 24 - model.config.vocab_size)
            found.append(end if column == SIZE[1] else first + int(guided[image].argmax()))
            ids = F.pad(ids, (0, 1), value=found[-1])
            mask = F.pad(mask, (0, 1), value=1)
    return found


@pytest.mark.parametrize("method", ["ar", "gumbel", "gsd"])
def test_greedy_tokens_are_those_of_the_official_loop(pipe: Any, method: str) -> None:
    """Prompts of different length together, with guidance and row ends."""
    found = pipe(PROMPTS, accelerator=method, temperature=0, output_type="latent").tokens
    for prompt, tokens in zip(PROMPTS, pipe.language_model.ids[found.flatten(1)].tolist(), strict=True):
        assert tokens == official_tokens(pipe, prompt)


def test_decoder_inputs_are_the_official_ids_and_states(pipe: Any) -> None:
    condition, known = pipe.encode_condition(PROMPTS)[0], pipe.language_model
    tokens = pipe(PROMPTS, temperature=0, output_type="latent").tokens
    found = known.decoder_inputs(condition, tokens)
    for row, prompt in enumerate(PROMPTS):
        ids = [*pipe.processor(TEXT.format(prompt))["input_ids"], *official_tokens(pipe, prompt)]
        assert found["generated_ids"][row, -len(ids) :].tolist() == ids
        assert found["attention_mask"][row].sum() == len(ids)
        whole = torch.tensor([[*ids, pipe.processor.convert_tokens_to_ids("<|image end|>")]])
        expected = official_states(pipe.model, whole, torch.ones_like(whole))
        torch.testing.assert_close(found["last_hidden_states"][row, -whole.shape[1] :], expected[0], atol=1e-4, rtol=1e-4)


def test_passes_equal_one_over_prompt_and_image(pipe: Any) -> None:
    check_passes(pipe.decoding_model(1.0), pipe.encode_condition(PROMPTS)[0])


@pytest.mark.parametrize("name", [each.name for each in list_methods("next-token") if not each.experimental])
def test_every_method_runs_or_says_why_not(pipe: Any, name: str) -> None:
    missing = ("mulo", "mulo-exact", "speculative", "eagle", "medusa", "lantern", "lantern-jacobi")
    found = run_or_refuse(pipe.decoding_model(3.0), pipe.encode_condition(PROMPTS)[0], name, missing)
    if found is not None:
        rows = found.view(2, 3, 5)
        assert (rows[..., -1] == 24).all() and (rows[..., :-1] < 24).all()


def write_official_folder(pipe: Any, folder: Path) -> dict[str, Any]:
    """Write a folder with the official names and nested configurations, and parts of other networks; returns its config."""
    pipe.save_pretrained(folder)
    names = (
        ("model.embed_tokens.text.", "llm_model.model.language_model.embed_tokens."),
        ("model.embed_tokens.image.", "llm_model.model.language_model.gen_embed_tokens."),
        ("model.", "llm_model.model.language_model."),
        ("gen_head.", "llm_model.gen_head."),
    )
    stored = load_file(folder / "model.safetensors")
    tensors = {}
    for name, value in stored.items():
        ours, official = next(each for each in names if name.startswith(each[0]))
        tensors[official + name.removeprefix(ours)] = value
    other = ("llm_model.lm_head.weight", "llm_model.model.visual.patch_embed.proj.weight", "gen_vae.encoder.conv_in.weight",
             "gen_transformer.norm.weight", "gen_image_condition_refiner.query")  # fmt: skip
    save_file(tensors | {name: torch.ones(2) for name in other}, folder / "model.safetensors", {"format": "pt"})
    flat = json.loads((folder / "config.json").read_text())
    text = {name: flat[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps", "gen_vocab_size")}  # fmt: skip
    text |= {"model_type": "mammothmoda2_qwen2_5_vl_text", "moe_type": "ffn-2:4", "rope_theta": 10000.0}
    text |= {"gen_vocab_start_index": flat["vocab_size"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    config = {"model_type": "mammothmoda2", "architectures": ["Mammothmoda2Model"],
              "llm_config": {"model_type": "mammothmoda2_qwen2_5_vl", "text_config": text, "vision_config": {}},
              "gen_vae_config": {}, "gen_dit_config": {}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_folders_with_official_and_with_own_names_are_opened(pipe: Any, tmp_path: Path) -> None:
    official, saved = tmp_path / "official", tmp_path / "saved"
    write_official_folder(pipe, official)
    pipe.save_pretrained(saved)
    options = {"temperature": 0, "output_type": "latent"}
    for folder in (official, saved):
        opened = vargen.open_pipeline(folder, size=SIZE, torch_dtype=torch.float32)
        assert torch.equal(opened("dog", **options).tokens, pipe("dog", **options).tokens)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ((), "llm_config", {"model_type": "mammothmoda2_qwen3_vl"}),
        ((), "llm_config", 3),
        ((), "auto_map", {"AutoModel": "modeling_mammothmoda2.Mammothmoda2Model"}),
        (("llm_config",), "text_config", []),
        (("llm_config", "text_config"), "moe_type", "attention"),
        (("llm_config", "text_config"), "moe_type", "ffn-14:"),
        (("llm_config", "text_config"), "extra_gen_vocab", False),
        (("llm_config", "text_config"), "gen_vocab_start_index", 3),
        (("llm_config", "text_config"), "gen_vocab_size", -1),
        (("llm_config", "text_config"), "rope_scaling", {"rope_type": "yarn"}),
        (("llm_config", "text_config"), "rope_scaling", "yarn"),
        (("llm_config", "text_config"), "num_hidden_layers", "many"),
    ],
)
def test_other_configurations_are_refused_by_name(
    pipe: Any, tmp_path: Path, place: tuple[str, ...], name: str, value: Any
) -> None:
    config = write_official_folder(pipe, tmp_path)
    inner = config
    for key in place:
        inner = inner[key]
    inner[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=name):
        vargen.open_pipeline(tmp_path)


def test_what_it_cannot_do_is_refused(pipe: Any) -> None:
    class MammothModa2ForCausalLM(torch.nn.Module):  # of another program
        pass

    assert pipe.default_sampling["guidance_scale"] == 6
    with pytest.raises(TypeError, match="open_pipeline"):
        vargen.accelerate(MammothModa2ForCausalLM(), pipe.processor)
    with pytest.raises(TypeError, match="generate of a MammothModa2ForCausalLM lacks"):
        vargen.enable(pipe.model)
    with pytest.raises(ValueError, match="mark image tokens"):
        vargen.accelerate(*make_mammoth_moda2(), size=SIZE, quantization="int8")
    with pytest.raises(ValueError, match="draft heads"):
        _ = pipe.language_model.head_settings
    with pytest.raises(ValueError, match="negative_prompt must be None"):
        pipe("dog", negative_prompt="blurry", output_type="latent")
    with pytest.raises(ValueError, match="consecutive"):
        tokenizer = make_mammoth_moda2(codes=2)[1]
        tokenizer.add_tokens(["<|visual token 7|>"])
        vargen.accelerate(pipe.model, tokenizer, size=SIZE)
