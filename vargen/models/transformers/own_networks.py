"""Causal language models with image tokens that transformers has no class for: their networks are ours, over its layers.

Shape suffixes: B images, P prompt tokens, N tokens of the grid, D width.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.folders.json_files import expect
from vargen.folders.transformers_networks import NetworkKind
from vargen.models.transformers.base import PromptRows, force_row_ends
from vargen.models.transformers.causal import CausalLanguageModel


class MarkedLanguageModel(CausalLanguageModel):
    """A model whose states also say which tokens are image tokens; see `marked_states`. Its class is ours."""

    since, has_generate = "4.56", False

    def __init__(self, model: Any, tokenizer: Any = None, size: tuple[int, int] | None = None):
        assert self.stored.own is not None
        if not isinstance(model, self.stored.own()):
            raise TypeError(f"model must be one that vargen.open_pipeline opened, got a {self.class_name} with code of its own")
        super().__init__(model, tokenizer, size)

    def embed(self, tokens: Tensor) -> Tensor:
        assert self.ids is not None
        return self.model.get_input_embeddings().embed_image_tokens(self.ids[tokens])

    def embed_with_prompts(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        assert self.ids is not None
        return self.model.get_input_embeddings()(torch.cat([prompts, self.ids[tokens]], 1))  # marked, all of them

    @property
    def head_rows(self) -> Tensor | slice:
        rows = super().head_rows
        return rows if isinstance(rows, slice) else rows - self.model.config.vocab_size

    @property
    def head_settings(self) -> dict[str, Any]:
        raise ValueError(f"draft heads must be left out: the states of {self.name} also say which tokens are image tokens")


def _x_omni() -> Any:
    from vargen.models.transformers.x_omni import XOmniForCausalLM

    return XOmniForCausalLM


class XOmni(MarkedLanguageModel):
    """X-Omni 7B (arXiv 2507.22058): Qwen2.5 with layers, embeddings and a head for image tokens alone; see `x_omni`."""

    class_name, name, marks = "XOmniForCausalLM", "X-Omni", ("<SOM>", "<IMAGE>", "<MM-Token-0>")
    stored = NetworkKind(
        class_name,
        "x-omni",
        renamed=(
            (r"^model\.lm_embed_tokens\.", "model.embed_tokens.text."),
            (r"^model\.mm_embed_tokens\.", "model.embed_tokens.image."),
            (r"^model\.lm_norm\.", "model.norm.text."),
            (r"^model\.mm_norm\.", "model.norm.image."),
        ),
        ignored=(r"^lm_head\.",),
        own=_x_omni,
        more=("mm_vocab_size", "image_vocab_size", "num_mm_adap_layers", "num_mm_head_layers"),
    )
    published_size, token_format = (72, 72), "<MM-Token-{}>"
    guided, min_p = False, 0.03

    def format_prompt(self, prompt: str) -> str:
        return f"{prompt}<SOM>{self.size[0]} {self.size[1]}<IMAGE>"


def _mammoth_moda2() -> Any:
    from vargen.models.transformers.mammoth_moda2 import MammothModa2ForCausalLM

    return MammothModa2ForCausalLM


def read_mammoth_moda2(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the configuration of the language model, of that of the whole model with its diffusion decoder.

    Raises:
        ValueError: for a later MammothModa2, over Qwen3-VL, and for image tokens that are not behind those of text.
    """
    known = "mammothmoda2_qwen2_5_vl"
    if "llm_config" not in values:
        return values  # as a pipeline saved it
    model = values["llm_config"]
    kind = model.get("model_type") if isinstance(model, dict) else model
    expect(kind == known, "llm_config", kind, file, f"a configuration of {known!r}")
    text = model.get("text_config")
    expect(isinstance(text, dict), "text_config", text, file, "the configuration of a language model")
    given = {**model, **text, "model_type": values["model_type"]}
    layers, first = given.get("moe_type", "ffn"), given.get("gen_vocab_start_index")
    found = re.fullmatch(r"ffn(?:-(\d{1,4}):(\d{1,4}))?", str(layers))
    expect(found is not None, "moe_type", layers, file, "'ffn', or with a range of layers such as 'ffn-14:28'")
    expect(given.get("extra_gen_vocab", True) is True, "extra_gen_vocab", given.get("extra_gen_vocab"), file, "true")
    expect(first in (None, given.get("vocab_size")), "gen_vocab_start_index", first, file, "vocab_size, or none")
    rotary = given.pop("rope_scaling", None) or {}  # three axes of positions, which are equal without images in the prompt
    form = rotary.get("rope_type", rotary.get("type", "default")) if isinstance(rotary, dict) else rotary
    expect(form in ("default", "mrope"), "rope_scaling", form, file, "'default' or 'mrope'")
    start, stop = (0, given.get("num_hidden_layers")) if found is None or found[1] is None else map(int, found.groups())
    return {"gen_vocab_size": 32_800, **given, "gen_mlp_start": start, "gen_mlp_stop": stop}


_TAIL = 10  # tokens of a prompt that unconditional rows see: the beginning of the answer, with the size


class MammothModa2(MarkedLanguageModel):
    """MammothModa2-Preview (arXiv 2511.18262): Qwen2.5 with a second feed-forward for image tokens; see `mammoth_moda2`.

    Each row ends with a token. Its own diffusion decoder makes the image from the tokens; see `decoder_inputs`. It also
    takes the negative prompt. The first official code samples ids behind the image tokens, too, which later code corrects.
    """

    class_name, name = "MammothModa2ForCausalLM", "MammothModa2"
    marks = "<|image token|>", "<|image end|>", "<|endofline|>"
    stored = NetworkKind(
        class_name,
        "mammothmoda2",
        renamed=(
            (r"^llm_model\.model\.language_model\.embed_tokens\.", "model.embed_tokens.text."),
            (r"^llm_model\.model\.language_model\.gen_embed_tokens\.", "model.embed_tokens.image."),
            (r"^llm_model\.model\.language_model\.", "model."),
            (r"^llm_model\.gen_head\.", "gen_head."),
        ),
        ignored=(r"^llm_model\.(lm_head|model\.visual)\.", r"^gen_(vae|transformer|image_condition_refiner)\."),
        own=_mammoth_moda2,
        more=("gen_vocab_size", "gen_mlp_start", "gen_mlp_stop"),
        flatten=read_mammoth_moda2,
    )
    published_size = (32, 32)
    guidance_scale = 6.0
    prompt_format = (
        "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    def __init__(self, model: Any, tokenizer: Any = None, size: tuple[int, int] | None = None):
        super().__init__(model, tokenizer, size)
        if tokenizer is None:  # only weights and sizes are asked for
            return
        assert self.ids is not None
        end_of_line, self.end_of_image = map(tokenizer.get_vocab().__getitem__, ("<|endofline|>", "<|image end|>"))
        self.ids = F.pad(self.ids, (0, 1), value=end_of_line)
        self.vocab, self.grid = len(self.ids), (self.size[0], self.size[1] + 1)
        self.forced = force_row_ends(self.grid, self.vocab - 1)

    def find_ids(self, tokenizer: Any, embedded: int) -> tuple[int, int]:
        known = tokenizer.get_vocab().items()
        found = {int(match[1]): each for name, each in known if (match := re.fullmatch(r"<\|visual token (\d+)\|>", name))}
        first = found.get(0, 0)
        if not found or any(found.get(number) != first + number for number in range(len(found))):
            raise ValueError("processor must have consecutive ids of image tokens <|visual token 0|>, ...")
        return first, first + len(found)

    def format_prompt(self, prompt: str) -> str:
        return f"{super().format_prompt(prompt)}<|image start|>{self.size[1]}*{self.size[0]}<|image token|>"

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        if negative is not None:
            raise ValueError("negative_prompt must be None: that of MammothModa2 is for its diffusion decoder")
        found = super().encode_prompts(processor, prompts, None)
        return replace(found, unconditional=PromptRows(found.ids[:, -_TAIL:], found.valid[:, -_TAIL:]))

    @torch.no_grad()
    def decoder_inputs(self, condition: PromptRows, tokens: Tensor) -> dict[str, Tensor]:
        """Return what its diffusion decoder, `decode_diffusion_image`, takes of images.

        Args:
            condition: as a pipeline's `encode_condition` returns it. tokens: int64 `[B, N]`, of a result.

        Returns:
            `input_ids` `[B, P]`, `generated_ids` and `attention_mask` int64 `[B, P + N]`, and `last_hidden_states`, float
            `[B, P + N + 1, D]`: after the final norm, of prompt, image and `<|image end|>`; the decoder computes them in a pass
            of its own.
        """
        assert self.ids is not None
        ids, valid = (each.to(self.device) for each in (condition.ids, condition.valid.long()))
        generated = torch.cat([ids, self.ids[tokens.flatten(1).to(self.device)]], 1)
        mask = F.pad(valid, (0, generated.shape[1] - ids.shape[1]), value=1)
        whole, seen = F.pad(generated, (0, 1), value=self.end_of_image), F.pad(mask, (0, 1), value=1)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        states = self.body(
            inputs_embeds=self.model.get_input_embeddings()(whole), attention_mask=seen, position_ids=places, use_cache=False
        ).last_hidden_state
        return {"input_ids": ids, "generated_ids": generated, "attention_mask": mask, "last_hidden_states": states}
