"""Greedy calls of `generate` of image language models of transformers, as their documentation has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.in_place.enabling import disable, enable, summary
from vargen.models.transformers.supported import GLMImage, Janus, tokenize


class NotCheckedError(Exception):
    """A check that this model, machine or time does not allow; the message is the reason."""


def make_call(pipe: Any, prompt: str, num_tokens: int) -> dict[str, Any]:
    """Return the arguments of a greedy call for one image, or for its first tokens.

    Raises:
        NotCheckedError: for a model whose `generate` makes no image tokens, or only all of them.
    """
    known, processor = pipe.language_model, pipe.processor
    if isinstance(known, GLMImage):
        rows, columns = known.size
        size = {"target_h": 32 * rows, "target_w": 32 * columns, "return_tensors": "pt"}
        message = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        inputs = processor.apply_chat_template([message], tokenize=True, return_dict=True, processor_kwargs=size)
        return {**inputs.to(known.device), "max_new_tokens": num_tokens, "do_sample": False}
    if not known.has_generate:
        raise NotCheckedError(f"generate of {known.class_name} makes no image tokens")
    scale = pipe.default_sampling["guidance_scale"]
    if isinstance(known, Janus):
        if num_tokens < pipe.num_tokens:
            raise NotCheckedError("generate of Janus makes whole images, and one does not fit --minutes")
        (ids,) = tokenize(processor, [prompt], generation_mode="image")
        ids = torch.as_tensor(ids, device=known.device)[None]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_mode": "image"}
        return {**given, "guidance_scale": scale, "do_sample": False}
    rows = pipe.encode_condition([prompt])[0]
    ids, blank = rows.ids.to(known.device), rows.unconditional
    assert known.ids is not None
    tokens, start = known.ids.tolist(), ids.shape[1]
    forced = [-1] * pipe.num_tokens if known.forced is None else known.forced.tolist()
    only = {place: [tokens[token]] for place, token in enumerate(forced) if token >= 0}
    image = [each for token, each in enumerate(tokens) if token not in forced]

    def allowed(_: int, sequence: Tensor) -> list[int]:
        return only.get(len(sequence) - start, image)

    call = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": num_tokens,
        "prefix_allowed_tokens_fn": allowed,
    }  # fmt: skip
    if blank is not None:
        call |= {"negative_prompt_ids": blank.ids.to(known.device), "guidance_scale": scale}
        call["negative_prompt_attention_mask"] = torch.ones_like(call["negative_prompt_ids"])
    return call


def generate_both(pipe: Any, prompt: str, num_tokens: int, method: str = "gumbel") -> tuple[Tensor, Tensor]:
    """Return the image tokens int64 `[N]` of one call, by the model's own `generate` and by `vargen.enable`.

    Tokens are numbered as in `pipe`; ids that are none, such as markers of GLM-Image, follow them, and -1 is
    after the end of the shorter sequence.
    """
    model, known, call = pipe.model, pipe.language_model, make_call(pipe, prompt, num_tokens)
    sequences = [model.generate(**call)]
    enable(model, method)
    try:
        sequences.append(model.generate(**call))
        reasons = list(summary(model).original)
    finally:
        disable(model)
    if reasons:
        raise NotCheckedError(f"the call runs by the original generate, because {reasons[0]}")
    start = 0 if isinstance(known, Janus) else call["input_ids"].shape[1]
    rest = max(each.shape[1] for each in sequences)
    own, enabled = (F.pad(each[0].cpu(), (0, rest - each.shape[1]), value=-1)[start:] for each in sequences)
    if known.ids is None:
        return own, enabled
    places = {number: place for place, number in enumerate(known.ids.tolist())}
    own, enabled = (torch.tensor([places.get(each, len(places)) for each in row.tolist()]) for row in (own, enabled))
    return own, enabled
