"""Fast and exact sampling of image tokens, for `custom_generate` of transformers.

Each pass of the network feeds the last token and a window of draft tokens, which earlier passes sampled, and commits those that
equal what it samples now (Jacobi decoding). The noise of a token depends on its image and position alone, so that the tokens
are those of decoding one by one.

Shape suffixes: B sequences, R rows (B, times two with guidance: conditional rows first), P prompt tokens, N new tokens, T fed
tokens, W largest T, S slots of the cache, H heads, K head width, V ids that may be sampled, A axes of positions.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

from vargen.in_place.generate_calls import PassThroughError, _read_criteria, _read_processors, _require_plain, _to_mask
from vargen.in_place.image_calls import AllowedIds, read_grids
from vargen.kernels.noise_bits import make_keys, sample_exponential
from vargen.kernels.ops import filter_logits
from vargen.models.transformers.supported import grid_offsets
from vargen.pipelines.seeds import next_seeds

WINDOW = 16
REFUSED = "logits_processor stopping_criteria streamer assistant_model past_key_values inputs_embeds pixel_values position_ids"


def generate(model: Any, window: int = WINDOW, cfg_scale: float | None = None, **arguments: Any) -> Any:
    """Return what `model.generate(**arguments)` returns; for Janus, what it returns in image mode.

    Args:
        window: number W of tokens that a pass feeds; 1 decodes one by one.
        cfg_scale: guidance scale of Janus. None: that of its configuration, or 5.

    Raises:
        ValueError: for a model or an option that is not supported.
    """
    kinds = ("JanusForConditionalGeneration", "Emu3ForConditionalGeneration", "GlmImageForConditionalGeneration")
    kind = next((base.__name__ for base in type(model).__mro__ if base.__name__ in kinds), None)
    if kind is None or window < 1:
        raise ValueError(
            f"model must be one of {', '.join(kinds)}, and window at least 1, got {type(model).__name__}, {window}"
        )
    try:
        for name in REFUSED.split():
            require(arguments.get(name) is None, f"{name} is given")
        if kind == kinds[0]:
            config = arguments.get("generation_config") or model.generation_config
            cfg_scale = next(float(each) for each in (cfg_scale, config.guidance_scale, 5) if each is not None)
            arguments["max_new_tokens"] = model.model.vision_model.config.num_image_tokens
        require(kind == kinds[0] or cfg_scale is None, "cfg_scale is given, and this model has guidance_scale")
        decode = partial(decode_call, kind=kind, window=window, cfg_scale=cfg_scale)
        return GenerationMixin.generate(model, custom_generate=decode, **arguments)
    except PassThroughError as error:
        raise ValueError(f"call generate without custom_generate, because {error}") from None


def require(holds: Any, reason: str) -> None:
    if not holds:
        raise PassThroughError(reason)


class SlotCache(Cache):
    """Keys and values by slot: the tokens of a pass replace those that the last one rejected. `valid`: bool `[R, S]`."""

    is_compileable = False

    def __init__(self, valid: Tensor):
        self.valid, self.stored, self.layers = valid, dict[int, Tensor](), list[Any]()

    def start_pass(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Choose the slots int64 `[R, T]` of the fed tokens; returns the additive mask `[R, 1, T, S]`."""
        self.slots, self.end = slots[:, None, :, None], int(slots.max()) + 1
        key, query = torch.arange(self.end, device=slots.device), slots[..., None]
        visible = (key < query) & self.valid[:, None, : self.end] | (key == query)
        return torch.zeros(visible.shape, dtype=dtype, device=slots.device).masked_fill(~visible, float("-inf"))[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        new = torch.stack([key_states, value_states])  # [2, R, H, T, K]
        if layer_idx not in self.stored:
            self.stored[layer_idx] = new.new_zeros(*new.shape[:3], self.valid.shape[1], new.shape[4])
        self.stored[layer_idx].scatter_(3, self.slots.expand_as(new), new)
        return self.stored[layer_idx][..., : self.end, :].unbind()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are explicit

    def get_mask_sizes(self, *args: Any, **options: Any) -> tuple[int, int]:
        return self.end, 0


def list_prompts(ids: Tensor, mask: Tensor | None, negative: Any, config: Any, is_janus: bool, guided: bool) -> list[Tensor]:
    """Return the prompts of all rows, int64 `[R, P]` padded on the left, and bool `[R, P]`, which ids are no padding."""
    rows = [(ids, _to_mask(mask, ids))]
    if guided and is_janus:
        kept = (ids == config.bos_token_id) | (ids == config.generation_kwargs["boi_token_id"])
        rows.append((torch.where(kept, ids, config.pad_token_id), rows[0][1]))
    elif guided:
        rows.append(negative or (ids[:, -1:], rows[0][1][:, -1:]))
        require(len(rows[1][0]) == len(ids), f"{len(rows[1][0])} negative prompts are given for {len(ids)} prompts")
    P = max(each.shape[1] for each, _ in rows)
    return [torch.cat([F.pad(each, (P - each.shape[1], 0)) for each in column]) for column in zip(*rows, strict=True)]


def force_ids(
    allowed: AllowedIds, image: Any, sequences: Tensor, index: Tensor, prompt: int, limit: int, ends: Tensor
) -> Tensor:
    """Return the only allowed ids at positions int64 `[B, T]` after the prompts, -1 elsewhere; they become drafts, too."""
    forced = torch.full_like(index, -1)
    for row, places in enumerate((prompt + index).tolist()):
        for slot, place in enumerate(places):
            if place >= limit or torch.isin(sequences[row, prompt:place], ends).any():
                break
            ids = allowed(row, sequences[row, :place])
            require(ids is image or len(ids) == 1, "prefix_allowed_tokens_fn allows different sets of ids")
            if ids is not image:
                forced[row, slot] = sequences[row, place] = ids[0]
    return forced


def decode_call(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    kind: str, window: int, cfg_scale: float | None, **inputs: Any,
) -> Any:  # fmt: skip
    """Run a call whose arguments the installed `generate` has resolved."""
    config, is_janus, (B, P), device = generation_config, kind.startswith("Janus"), input_ids.shape, input_ids.device
    _require_plain(config)
    require(not model.training, "the model is in training mode")
    attention = model.config.get_text_config()._attn_implementation
    require(attention in ("sdpa", "eager"), f"attn_implementation is {attention}: set it to sdpa or eager")
    scale, negative, function, options = _read_processors(logits_processor)
    scale = scale if cfg_scale is None else cfg_scale
    limit, end = _read_criteria(stopping_criteria)
    ends, N = torch.tensor([] if is_janus else end, dtype=torch.int64, device=device), limit - P
    offsets = torch.arange(N + window, device=device)[None]  # [A, N + W], of positions after the prompt
    if kind.startswith("Glm"):
        require(scale == 1 and "image_grid_thw" in inputs, "GLM-Image needs image_grid_thw, and has no guidance_scale")
        offsets = grid_offsets(read_grids(input_ids, model.config.image_end_token_id, **inputs)).to(device)
        require(offsets.shape[1] + 1 >= N, f"max_new_tokens is {N}, and the image has {offsets.shape[1]} tokens")
    prompts, valid = list_prompts(input_ids, inputs.get("attention_mask"), negative, config, is_janus, scale != 1)
    cache, start, width = SlotCache(F.pad(valid, (0, N + window), value=True)), valid.sum(1), prompts.shape[1]
    body = model.model.text_model if kind.startswith("Emu3") else model.model.language_model
    head = model.model.generation_head if is_janus else model.get_output_embeddings()
    embed = model.prepare_embeddings_for_image_generation if is_janus else model.get_input_embeddings()

    def run(fed: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Run a pass over embeddings, whose positions are int64 `[A, R, T]`; returns its last states."""
        given = {"attention_mask": cache.start_pass(slots, fed.dtype), "position_ids": positions.squeeze(0)}
        return body(inputs_embeds=fed, past_key_values=cache, use_cache=True, **given).last_hidden_state

    slots, positions = torch.arange(width, device=device).expand_as(prompts), (valid.cumsum(1) - 1).clamp(min=0)
    hidden = run(model.get_input_embeddings()(prompts), slots, positions.expand(len(offsets), -1, -1))[:, -1:]
    allowed = function and AllowedIds(function)
    image = allowed and allowed(0, input_ids[0])
    ids = torch.tensor(image or range(head(hidden[:1]).shape[-1]), device=device)
    seeds = [next_seeds(torch.default_generator)[1] if config.do_sample else 0 for _ in range(B)]
    seed, every = torch.tensor(seeds, device=device), torch.arange(N + window, device=device).expand(B, -1)
    sequences = torch.cat([input_ids, ids[make_keys(seed, every, 3) % len(ids)]], 1)  # the first drafts are uniform
    tokens, length, stop, index = sequences[:, P:], start.new_zeros(B), start.new_full((B,), N), every[:, :1]
    while True:
        forced = force_ids(allowed, image, sequences, index, P, limit, ends) if allowed else None
        if length.any():
            place = (index - 1).repeat(len(prompts) // B, 1)
            positions = start[:, None] + offsets[:, place.clamp(max=offsets.shape[1] - 1)]
            hidden = run(embed(tokens.gather(1, index - 1)).repeat(len(prompts) // B, 1, 1), width + place, positions)
        logits = head(hidden).float()
        if scale != 1:
            own, blank = logits.chunk(2)
            logits = blank.add(own - blank, alpha=scale)
        require(logits.isfinite().all(), "logits are not finite")
        logits = logits[..., ids] if allowed else logits
        chosen = logits.argmax(-1)
        if config.do_sample:
            filters = options.get("top_k"), options.get("top_p", 1), options.get("min_p", 0)
            probs = filter_logits(logits / options.get("temperature", 1), *filters)
            chosen = (probs.softmax(-1) / sample_exponential(seed, index, len(ids))).argmax(-1)
        new = torch.where(forced < 0, ids[chosen], forced) if forced is not None else chosen
        count = 1 + (new[:, :-1] == tokens.gather(1, index[:, :-1])).cumprod(1).sum(1)
        tokens.scatter_(1, index, new)
        is_end = torch.isin(new, ends) & (index < (length + count)[:, None])
        stop = torch.where(is_end, index + 1, N).amin(1).minimum(stop)
        length = (length + count).minimum(stop)
        if (length == stop).all():
            break
        index = length[:, None] + every[0, :window]
    new = torch.where(every < stop[:, None], tokens, getattr(config, "_pad_token_tensor", None) or 0)[:, : int(stop.max())]
    found = new if is_janus else torch.cat([input_ids, new], 1)
    return GenerateDecoderOnlyOutput(sequences=found) if config.return_dict_in_generate else found
