"""Image calls of `generate` of tiny models of transformers, with varied images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_language_models import EOS, PAD, has_release, make_emu3, make_glm, make_janus, randomize

from vargen.models.transformers.supported import describe_language_model

PROMPTS = ["a red apple on the moon", "a cat"]
EOL, EOF, EOI = 8, 7, 4


class Case:
    """A tiny model, the inputs of an image call, and its options."""

    def __init__(self, model: Any, inputs: dict[str, Any], **options: Any):
        self.model, self.inputs, self.options = model, dict(inputs), options

    def generate(self, model: Any = None, **changed: Any) -> Any:
        used = self.model if model is None else model
        return used.generate(**{**self.inputs, **self.options, **changed})

    @property
    def body(self) -> Any:
        return describe_language_model(self.model).body


def janus(side: int = 4, prompts: list[str] = PROMPTS, **sizes: Any) -> Case:
    model, processor = make_janus(side=side, **sizes)
    randomize(model, 3, 0.8)
    found = processor(text=prompts, generation_mode="image", padding=True, padding_side="left", return_tensors="pt")
    return Case(model, found, generation_mode="image", guidance_scale=1.5, do_sample=False)


def allow_image(ids: list[int], wrapper: int, height: int, width: int) -> Callable[[int, Any], Any]:
    """The function of the documentation of transformers: rows of an image with their ends, and three last tokens."""

    def allowed(_: int, sequence: torch.Tensor) -> Any:
        place = len(sequence) - int(torch.nonzero(sequence == wrapper)[0])
        last = (width + 1) * height
        if place > last:
            return ((EOF,), (EOI,), (EOS,), (PAD,))[min(place - last, 4) - 1]
        return (EOL,) if place % (width + 1) == 0 else ids

    return allowed


def emu3(rows: int = 4, columns: int = 5, prompts: list[str] = PROMPTS, **sizes: Any) -> Case:
    model, processor = make_emu3(seed=2, **sizes)
    area = rows * columns * processor.downsample_ratio**2
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    image = {"return_for_image_generation": True, "ratio": f"{columns}:{rows}", "image_area": area}
    found = processor(text=prompts, **image, **options)
    assert tuple(map(int, found.pop("image_sizes")[0])) == (rows, columns)
    negative = processor(text=["lowres", "blurry , lowres"][: len(prompts)], **options)
    allowed = allow_image(model.vocabulary_mapping.image_tokens, processor.tokenizer.image_wrapper_token_id, rows, columns)
    return Case(
        model, found, prefix_allowed_tokens_fn=allowed, max_new_tokens=rows * (columns + 1) + 20, guidance_scale=3.0,
        negative_prompt_ids=negative["input_ids"], negative_prompt_attention_mask=negative["attention_mask"], do_sample=False,
    )  # fmt: skip


def glm(height: int = 64, width: int = 96, prompts: list[str] = PROMPTS, **sizes: Any) -> Case:
    model, processor = make_glm(max_position_embeddings=4096, **sizes)
    randomize(model, 3, 0.8)
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
    options = {"target_h": height, "target_w": width, "padding": True, "padding_side": "left", "return_tensors": "pt"}
    found = processor.apply_chat_template(messages, tokenize=True, return_dict=True, processor_kwargs=options)
    count = int(found["image_grid_thw"][:2].prod(1).sum())
    return Case(model, found, do_sample=False, max_new_tokens=count + 1)


MAKERS: dict[str, Callable[..., Case]] = {"janus": janus, "emu3": emu3, "glm-image": glm}


def make_case(name: str, **sizes: Any) -> Case:
    if not has_release(name):
        pytest.skip(f"{name} came with a newer transformers")
    return MAKERS[name](**sizes)
