"""X-Omni, whose first and last layers change image tokens alone: the tokens of the official loop, folders, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_checks import check_passes, run_or_refuse
from safetensors.torch import load_file, save_file
from tiny_language_models import has_release, make_causal, needs_janus
from torch import Tensor

import vargen
from vargen.decoding import list_methods

pytestmark = [needs_janus, pytest.mark.skipif(not has_release("x-omni"), reason="needs a newer transformers")]
PROMPTS = ["a red apple", "a blue car on the moon"]
SIZE = (3, 4)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return vargen.accelerate(*make_causal("x-omni"), size=SIZE)


def official_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits `[V]` after a sequence, as the official network computes them: layers of Qwen2, text left as it is by some."""
    config, body = model.config, model.model
    row = torch.tensor([ids])
    is_image = (row >= config.vocab_size)[..., None]
    states = torch.where(
        is_image,
        body.embed_tokens.image((row - config.vocab_size).clamp(min=0)),
        body.embed_tokens.text(row.clamp(max=config.vocab_size - 1)),
    )
    mask = torch.full((1, 1, len(ids), len(ids)), float("-inf")).triu(1)
    rotary = body.rotary_emb(states, torch.arange(len(ids))[None])
    for number, layer in enumerate(body.layers):
        after = states + layer.self_attn(layer.input_layernorm(states), attention_mask=mask, position_embeddings=rotary)[0]
        after = after + layer.mlp(layer.post_attention_layernorm(after))
        changes_text = config.num_mm_adap_layers <= number < config.num_hidden_layers - config.num_mm_head_layers
        states = after if changes_text else torch.where(is_image, after, states)
    normed = torch.where(is_image, body.norm.image(states), body.norm.text(states))
    return model.mm_head(normed[0, -1])[: config.image_vocab_size]


@pytest.mark.parametrize("method", ["ar", "gumbel", "gsd"])
def test_greedy_tokens_are_those_of_the_official_loop(pipe: Any, method: str) -> None:
    found = pipe(PROMPTS, accelerator=method, temperature=0, output_type="latent").tokens
    for prompt, tokens in zip(PROMPTS, found.tolist(), strict=True):
        ids = pipe.processor(f"{prompt}<SOM>3 4<IMAGE>")["input_ids"]
        for token in tokens:
            assert token == int(official_logits(pipe.model, ids).argmax())
            ids = [*ids, pipe.processor.convert_tokens_to_ids(f"<MM-Token-{token}>")]


def test_passes_equal_one_over_prompt_and_image(pipe: Any) -> None:
    check_passes(pipe.decoding_model(1.0), pipe.encode_condition(PROMPTS)[0])


@pytest.mark.parametrize("name", [each.name for each in list_methods("next-token") if not each.experimental])
def test_every_method_runs_or_says_why_not(pipe: Any, name: str) -> None:
    missing = ("mulo", "mulo-exact", "speculative", "eagle", "medusa", "lantern", "lantern-jacobi")
    run_or_refuse(pipe.decoding_model(1.0), pipe.encode_condition(PROMPTS)[0], name, missing)


def test_a_folder_with_the_official_names_is_opened(pipe: Any, tmp_path: Path) -> None:
    """Also with a head for text, which images do not need; a folder that asks for code is refused."""
    saved = tmp_path / "saved"
    for folder in (tmp_path, saved):
        pipe.save_pretrained(folder)
    names = (("model.embed_tokens.text", "model.lm_embed_tokens"), ("model.embed_tokens.image", "model.mm_embed_tokens"),
             ("model.norm.text", "model.lm_norm"), ("model.norm.image", "model.mm_norm"))  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    for ours, official in names:
        tensors = {name.replace(f"{ours}.", f"{official}."): value for name, value in tensors.items()}
    save_file(tensors | {"lm_head.weight": torch.ones(5, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    options = {"temperature": 0, "output_type": "latent"}
    for folder in (tmp_path, saved):
        opened = vargen.open_pipeline(folder, size=SIZE, torch_dtype=torch.float32)
        assert torch.equal(opened("dog", **options).tokens, pipe("dog", **options).tokens)
    for name, value in (("num_mm_adap_layers", "all"), ("auto_map", {"AutoModel": "modeling_xomni.XOmniModel"})):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ValueError, match=name):
            vargen.open_pipeline(tmp_path)


def test_what_x_omni_cannot_do_is_refused(pipe: Any) -> None:
    class XOmniForCausalLM(torch.nn.Module):  # of the folder's own code
        pass

    assert pipe.default_sampling["min_p"] == 0.03 and pipe.default_sampling["guidance_scale"] == 1
    with pytest.raises(TypeError, match="open_pipeline"):
        vargen.accelerate(XOmniForCausalLM(), pipe.processor)
    with pytest.raises(TypeError, match="generate of a XOmniForCausalLM lacks"):
        vargen.enable(pipe.model)
    with pytest.raises(ValueError, match="mark image tokens"):
        vargen.accelerate(*make_causal("x-omni"), size=SIZE, quantization="int8")
    with pytest.raises(ValueError, match="draft heads"):
        _ = pipe.language_model.head_settings
