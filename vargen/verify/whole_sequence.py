"""Logits and latents of known sequences: by passes without a cache, which loops with a cache must repeat, and by such loops.

Shape suffixes: B images, P prompt tokens, N known tokens, V vocabulary.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.decoding import Tree
from vargen.decoding.video.denoising import TIMESTEPS, make_block_noise, predict_clean, step_noise_level
from vargen.models.causal_video.decoding import CausalVideoBlockModel
from vargen.models.guidance import Condition
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.var.decoding import VARScaleModel

_CHUNK = 64  # tokens of a pass over known ones
_NO_TOKEN = -1e9  # logit of tokens that a scale does not use


@torch.no_grad()
def compute_whole_logits(model: Any, condition: Any, tokens: Tensor) -> Tensor:
    """Return guided logits float32 `[B, N, V]` of known tokens int64 `[B, N]`, by one pass over all without a cache."""
    if isinstance(model, TransformersTokenModel):
        return _whole_text(model, condition, tokens)
    conditions = model.guidance.conditions(condition, model.transformer)
    joined = reduce(Condition.cat, conditions)
    if isinstance(model, VARScaleModel):
        canvas, inputs = model.canvas(len(tokens)), list[Tensor]()
        for scale, part in enumerate(tokens.split(model.scale_tokens, 1)[:-1]):
            canvas, following = model.add(canvas, part, scale)
            assert following is not None
            inputs.append(following)
        rows = torch.cat(inputs, 1).repeat(len(conditions), 1, 1)
        logits = model.forward_all(rows, joined)
        return torch.cat([_pad(model, part, k) for k, part in enumerate(logits.split(model.scale_tokens, 1))], 1)
    guided = {"guidance": model.guidance.scale} if len(conditions) == 2 else {}
    return model.transformer(model.guidance.repeat(tokens), joined, **guided).logits


def _whole_text(model: TransformersTokenModel, condition: Any, tokens: Tensor) -> Tensor:
    """Prompts and image tokens of a language model in one call of its body."""
    known, device = model.description, model.device
    rows = condition.join() if model.rows_per_image == 2 else condition
    ids, valid = rows.ids.to(device), rows.valid.to(device)
    (R, P), N = ids.shape, tokens.shape[1]
    embeddings = known.embed_with_prompts(ids, model.guidance.repeat(tokens[:, :-1]))
    valid = F.pad(valid, (0, N - 1), value=True)
    text = known.prompt_positions((valid[:, :P].long().cumsum(1) - 1).clamp(min=0))
    index = torch.arange(N - 1, device=device).expand(R, -1)
    positions = torch.cat([text, known.positions(valid[:, :P].sum(1), index)], -1)
    length = P + N - 1
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril() & valid[:, None]
    visible |= torch.eye(length, dtype=torch.bool, device=device)  # padding sees itself
    mask = torch.zeros(R, 1, length, length, dtype=model.dtype, device=device).masked_fill(~visible[:, None], float("-inf"))
    given = {"inputs_embeds": embeddings, "attention_mask": mask, "position_ids": positions}
    hidden = known.body(**given, use_cache=False).last_hidden_state[:, P - 1 :]
    return model._logits(hidden, torch.arange(N, device=device).expand(len(tokens), -1), model._scale)


@torch.no_grad()
def compute_pass_logits(model: Any, condition: Any, tokens: Tensor) -> Tensor:
    """Return the same logits by passes with a cache: over `_CHUNK` tokens, or over a scale."""
    if isinstance(model, VARScaleModel):
        state, canvas, inputs, found = model.allocate(condition, len(tokens)), model.canvas(len(tokens)), [None], []
        model.reset(state, condition)
        for scale, part in enumerate(tokens.split(model.scale_tokens, 1)):
            found.append(_pad(model, model.forward(state, inputs, 1), scale))
            canvas, following = model.add(canvas, part, scale)
            inputs.append(following)  # type: ignore[arg-type]
        return torch.cat(found, 1)
    state, out = model.start(condition, _CHUNK)
    return torch.cat([out.logits, feed(model, state, tokens[:, :-1])], 1)


def _pad(model: VARScaleModel, logits: Tensor, scale: int) -> Tensor:
    codes = model.scale_codes[scale]
    return F.pad(logits[..., :codes], (0, model.vocab - codes), value=_NO_TOKEN)


@torch.no_grad()
def feed(model: Any, state: Any, tokens: Tensor, width: int = _CHUNK) -> Tensor:
    """Feed and commit known tokens `[B, N]` in passes over `width` of them; logits `[B, N, V]` after each."""
    found, device = [tokens.new_zeros(len(tokens), 0, model.vocab, dtype=torch.float32)], tokens.device
    for part in tokens.split(width, 1):
        B, T = part.shape
        chain = Tree.make_chain(T - 1, device)
        found.append(model.forward(part, state, chain).logits)
        model.commit(state, torch.arange(T, device=device).expand(B, T), torch.full((B,), T, device=device), chain)
    return torch.cat(found, 1)


@torch.no_grad()
def denoise_without_cache(model: CausalVideoBlockModel, condition: Any, seed: int, blocks: int) -> Tensor:
    """Return latents `[1, F, C, Y, X]` of a video by the plain loop: every step runs over all frames so far."""
    text, clean, R = model._text(condition), list[Tensor](), model.rows_per_video
    for block in range(blocks):
        noise = partial(make_block_noise, seed, block, shape=model.block_shape, device=model.device)
        noisy = estimate = noise(0)
        for step, level in enumerate(model.levels):
            if step:
                noisy = step_noise_level(model, noisy, estimate, step - 1, noise)
            latents = torch.cat([*clean, noisy], 1)
            held = latents.shape[1] - noisy.shape[1]
            levels = torch.zeros(R, latents.shape[1], device=model.device)
            levels[:, held:] = level * TIMESTEPS
            rows = latents.expand(R, -1, -1, -1, -1)
            velocity = model.transformer(rows, levels, text, window=model.window, sinks=model.sinks)[:, held:].float()
            if R == 2:
                with_prompt, without = velocity.chunk(2)
                velocity = without + model.guidance.scale * (with_prompt - without)
            estimate = predict_clean(noisy, velocity, level)
        clean.append(estimate)
    return torch.cat(clean, 1)
