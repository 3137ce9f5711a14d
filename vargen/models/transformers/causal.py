"""Causal language models of text whose vocabulary also has image tokens: each model is a few lines of data.

Their networks are classes of transformers that text models have, too. The special tokens of the tokenizer tell them apart.
`own_networks` has those whose networks are ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vargen.folders.transformers_networks import NetworkKind
from vargen.models.transformers.base import ImageLanguageModel, PromptRows, pad_prompts, validate_size
from vargen.values import short_repr

# By class of transformers, what a folder holds; and the names that official folders give to such a class.
NETWORKS = {
    name: NetworkKind(name, kind)
    for name, kind in (("GemmaForCausalLM", "gemma"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3"))
}
OTHER_NAMES = {
    "SimpARForCausalLM": "Qwen2ForCausalLM", "Emu3ForCausalLM": "Qwen3ForCausalLM",
    "Mammothmoda2Model": "MammothModa2ForCausalLM",
}  # fmt: skip


class CausalLanguageModel(ImageLanguageModel):
    """A causal language model with image tokens; without a tokenizer, any of its ids may be one.

    Ids that are not image tokens are never sampled. Tokens are returned: other programs decode them.

    Args:
        tokenizer: that of the model, which tells where its image tokens are.
        size: rows and columns of the image in tokens; None: the published one.

    Attributes:
        name: of the image model.
        marks: special tokens by which its tokenizer is known.
        codes: the most image tokens behind those of the tokenizer.
        token_format: or else their names in the tokenizer, by number.
        published_size: default of `size`.
        prompt_format, negative_format: text of a prompt, and of a negative one, around the place `{}`.
        blank: text of the unconditional rows without a negative prompt.
    """

    class_name, since = "CausalLanguageModel", "4.53"
    processor_name = "PreTrainedTokenizerFast"
    tokenizer_names, image_processor_name = ("PreTrainedTokenizerFast",), ""
    has_pixels = False
    options: tuple[str, ...] = ("size",)
    name = ""
    marks: tuple[str, ...] = ()
    codes = 0
    token_format = ""
    published_size = (1, 1)
    prompt_format = negative_format = "{}"
    blank = ""

    def __init__(self, model: Any, tokenizer: Any = None, size: tuple[int, int] | None = None):
        super().__init__(model)
        names = (each.__name__ for each in type(model).__mro__)
        self.class_name = next((name for name in names if name in NETWORKS), self.class_name)
        self.body = model.model
        self.grid = self.size = validate_size(self.published_size if size is None else size)
        first, last = 0, model.get_input_embeddings().num_embeddings
        if tokenizer is not None:
            first, last = self.find_ids(tokenizer, last)
            self.ids = torch.arange(first, last, device=self.device)
        self.vocab = last - first

    def find_ids(self, tokenizer: Any, embedded: int) -> tuple[int, int]:
        """Return the first image token and the one after the last: by their names, or the embeddings behind the tokenizer's."""
        first = len(tokenizer)
        if not self.token_format and embedded <= first:
            raise ValueError(f"model must embed image tokens beside the {first} of its tokenizer, got {embedded} embeddings")
        if not self.token_format:
            return first, min(first + self.codes, embedded)
        known, count = tokenizer.get_vocab(), 0
        first = known[self.token_format.format(0)]
        while known.get(self.token_format.format(count)) == first + count and first + count < embedded:
            count += 1
        if (name := self.token_format.format(count)) in known:
            raise ValueError(f"processor must have consecutive ids of image tokens, got {known[name]} for {name}")
        return first, first + count

    def format_prompt(self, prompt: str) -> str:
        """Return the text of a prompt."""
        return self.prompt_format.format(prompt)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        def encode(texts: list[str]) -> PromptRows:
            return pad_prompts([processor(text)["input_ids"] for text in texts], processor.pad_token_id or 0)

        if negative is not None and not self.guided:
            raise ValueError(f"negative_prompt must be None: {self.name} has no unconditional prompt")
        found = encode([self.format_prompt(prompt) for prompt in prompts])
        if not self.guided:
            return found
        texts = [self.blank] * len(prompts) if negative is None else [self.negative_format.format(each) for each in negative]
        return replace(found, unconditional=encode(texts))

    def validate_processor(self, processor: Any) -> None:
        if not self.name:
            raise TypeError(f"processor must be the tokenizer of a {self.class_name}, got {short_repr(processor)}")


class Liquid(CausalLanguageModel):
    """Liquid 7B (arXiv 2412.04332): Gemma with 8,192 image tokens of Chameleon's tokenizer, `vision_tokenizer`."""

    class_name, name, marks = "GemmaForCausalLM", "Liquid", ("<boi>", "<unconditional>")
    codes, published_size = 8192, (32, 32)
    prompt_format = negative_format = "{} Generate an image based on this description.<boi>"
    blank = "<unconditional><boi>"
    guidance_scale, temperature, top_k, top_p = 7.0, 0.99, 4096, 0.96
    options: tuple[str, ...] = ("size", "vision_tokenizer")

    def __init__(self, model: Any, tokenizer: Any = None, size: tuple[int, int] | None = None, vision_tokenizer: Any = None):
        super().__init__(model, tokenizer, size)
        self.decode_by(vision_tokenizer, self.vocab)


class SimpleAR(CausalLanguageModel):
    """SimpleAR 0.5B and 1.5B (arXiv 2504.11455): Qwen2 with 64,000 image tokens of the Cosmos tokenizer DV 8 x 16 x 16."""

    class_name, name, marks = "Qwen2ForCausalLM", "SimpleAR", ("<|t2i|>", "<|soi|>")
    codes, published_size = 64_000, (64, 64)
    prompt_format, negative_format = "<|t2i|>A highly realistic image of {}<|soi|>", "<|t2i|>{}<|soi|>"
    blank = negative_format.format(
        "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad eyes, "
        "bad limbs, distortion"
    )
    guidance_scale = 6.0


class Tar(CausalLanguageModel):
    """Tar 1.5B and 7B (arXiv 2506.18898): Qwen2.5 with 65,536 image tokens in its tokenizer, at three scales.

    Its tokens stand for meaning; a second model makes the image from them.
    """

    class_name, name, marks = "Qwen2ForCausalLM", "Tar", ("<I0>", "<S0>")
    published_size, token_format = (27, 27), "<I{}>"
    prompt_format = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        "<im_start>"
    )
    guided, top_k, top_p = False, 1200, 0.95
    scales = ((27, 27), (13, 13), (9, 9))

    def __init__(self, model: Any, tokenizer: Any = None, size: tuple[int, int] | None = None):
        super().__init__(model, tokenizer, size)
        if self.size not in self.scales:
            raise ValueError(f"size must be one of {', '.join(map(str, self.scales))} for Tar, got {self.size}")

    def format_prompt(self, prompt: str) -> str:
        return f"{super().format_prompt(prompt)}<S{self.scales.index(self.size)}>"
