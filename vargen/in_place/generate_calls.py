"""What a call of transformers' `generate` asks for, resolved by the installed `generate` itself, and read for our loop.

Shape suffixes: B sequences, P prompt tokens, T new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Sampling

# Arguments that only the original `generate` implements; None and False leave them out.
_ORIGINAL_ONLY = (
    "logits_processor", "stopping_criteria", "streamer", "assistant_model", "assistant_tokenizer", "custom_generate",
    "past_key_values", "inputs_embeds", "synced_gpus", "pixel_values", "position_ids", "mm_encoder_outputs",
)  # fmt: skip
_EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class PassThroughError(Exception):
    """A call that our loop does not run, so that the original `generate` does; the message is the reason."""


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate` with the values that the installed transformers resolved.

    Attributes:
        ids, valid: int64 and bool `[B, P]`, as `num_return_sequences` expanded them; padded on the left.
        sampling: greedy, or temperature, top-k, top-p and min-p.
        guidance_scale: 1 without guidance.
        negative: ids and mask of the unconditional rows `[B, P']`; None without guidance, and where the call names none.
        max_new_tokens: number T.
        end: ids that end a sequence.
        pad: the id that follows its end in longer company.
        allowed: the function `prefix_allowed_tokens_fn`.
        returns_dict: whether a `GenerateDecoderOnlyOutput` is returned.
        inputs: further inputs of the model, such as `image_grid_thw`.
    """

    ids: Tensor
    valid: Tensor
    sampling: Sampling
    guidance_scale: float = 1.0
    negative: tuple[Tensor, Tensor] | None = None
    max_new_tokens: int = 0
    end: tuple[int, ...] = ()
    pad: int = 0
    allowed: Callable[[int, Tensor], Any] | None = None
    returns_dict: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)


class _Resolved(Exception):  # leaves `generate` where sampling would begin
    def __init__(self, *values: Any):
        self.values = values


def resolve_call(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> GenerateCall:
    """Return what a call of `generate` asks for.

    The installed `generate` resolves it, from its argument, its keywords and the model's configuration, and stops before its
    first pass. Errors that it raises, such as for unknown keywords, are its own.

    Raises:
        PassThroughError: for what our loop does not do.
    """
    given = bind_arguments(model, args, options)
    for name in _ORIGINAL_ONLY:
        if given.get(name) is not None and given[name] is not False:
            raise PassThroughError(f"{name} is given")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise PassThroughError("autocast is enabled")
    if hasattr(model, "prepare_embeddings_for_image_generation"):
        return _resolve_image_mode(model, args, options)
    try:
        type(model).generate(model, *args, custom_generate=_stop_before_sampling, **options)
    except _Resolved as found:
        ids, processors, criteria, config, inputs = found.values
    else:
        raise PassThroughError("generate of this version of transformers does not call custom_generate")
    _require_plain(config)
    length, end = _read_criteria(criteria)
    scale, negative, allowed, values = _read_processors(processors)
    sampling = _to_sampling(config, values)
    pad = getattr(config, "_pad_token_tensor", None)
    return GenerateCall(
        ids, _to_mask(inputs.pop("attention_mask", None), ids), sampling, scale, negative,
        length - ids.shape[1], end, 0 if pad is None else int(pad), allowed, bool(config.return_dict_in_generate), inputs,
    )  # fmt: skip


def bind_arguments(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `generate` by name."""
    given = inspect.signature(type(model).generate).bind(model, *args, **options).arguments
    return {**{name: value for name, value in given.items() if name not in ("self", "kwargs")}, **given.get("kwargs", {})}


def _stop_before_sampling(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any
) -> None:
    raise _Resolved(input_ids, logits_processor, stopping_criteria, generation_config, inputs)


def _resolve_image_mode(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> GenerateCall:
    """Resolve a call of a model whose `generate` has a loop of its own, which custom_generate does not replace: Janus.

    A second object of the model's class, with the same modules, runs it and stops at the inputs of the first pass.
    """
    probe = copy(model)
    probe.__class__ = _make_probe(type(model))  # type: ignore[arg-type]
    try:
        probe.__class__.generate(probe, *args, **options)
    except _Resolved as resolved:
        ids, mask = resolved.values
    else:
        raise PassThroughError("generate of this version of transformers prepares its inputs in another way")
    config, processors = probe.resolved
    _require_plain(config)
    if not any(type(each).__name__ == "ClassifierFreeGuidanceLogitsProcessor" for each in processors):
        raise PassThroughError("guidance_scale is not above 1")  # transformers fails, too
    scale, _, _, values = _read_processors(processors)
    sampling = _to_sampling(config, values)
    (own, blank), (valid, blank_valid) = ids.chunk(2), _to_mask(mask, ids).chunk(2)
    return GenerateCall(
        own, valid, sampling, scale, (blank, blank_valid), returns_dict=bool(config.return_dict_in_generate)
    )  # fmt: skip


@cache
def _make_probe(kind: type[Any]) -> Any:
    """Return a subclass of a model's class that notes the configuration and processors, and stops at the first inputs."""

    class Probe(kind):
        def _get_logits_processor(self, generation_config: Any = None, **others: Any) -> Any:
            found = super()._get_logits_processor(generation_config=generation_config, **others)
            self.resolved = generation_config, found
            return found

        def _get_cache(self, *_: Any, **__: Any) -> None:
            """Allocate none."""

        _prepare_static_cache = _get_cache

        @wraps(kind.prepare_inputs_for_generation)  # whose signature says which keywords a call may have
        def prepare_inputs_for_generation(self, *_: Any, input_ids: Tensor, attention_mask: Any = None, **__: Any) -> Any:
            raise _Resolved(input_ids, attention_mask)

    return Probe


def _require_plain(config: Any) -> None:
    """Raise `PassThroughError` for settings that change more than what processors and criteria show."""
    mode = config.get_generation_mode().value
    if mode not in ("sample", "greedy_search"):
        raise PassThroughError(f"generation mode is {mode}")
    if config.return_dict_in_generate and (given := [name for name in _EXTRA_OUTPUTS if getattr(config, name, None)]):
        raise PassThroughError(f"{given[0]} is set")
    if getattr(config, "cache_implementation", None) == "quantized":
        raise PassThroughError("cache_implementation is quantized")


def _to_mask(mask: Tensor | None, ids: Tensor) -> Tensor:
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if not valid[:, -1].all():
        raise PassThroughError("prompts are padded on the right: set padding_side='left'")
    if (valid[:, :-1] & ~valid[:, 1:]).any():
        raise PassThroughError("the attention mask has a hole")
    return valid


def _read_criteria(criteria: Any) -> tuple[int, tuple[int, ...]]:
    """Return the maximum length with the prompt, and the ids that end a sequence."""
    length, end = 0, tuple[int, ...]()
    for each in criteria:
        match type(each).__name__:
            case "MaxLengthCriteria":
                length = int(each.max_length)
            case "EosTokenCriteria":
                end = tuple(each.eos_token_id.flatten().tolist())
            case other:
                raise PassThroughError(f"{other} may stop a sequence")
    return length, end


def _read_processors(processors: Any) -> tuple[float, tuple[Tensor, Tensor] | None, Any, dict[str, Any]]:
    """Return guidance scale, ids and mask of the unconditional rows, the function of allowed ids, and sampling options.

    Raises:
        PassThroughError: for processors other than guidance, allowed tokens, temperature and filters, in this order.
    """
    scale, negative, allowed, values = 1.0, None, None, dict[str, Any]()
    order = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor",
             "PrefixConstrainedLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
             "MinPLogitsWarper", "LogitNormalization")  # fmt: skip
    last = -1
    for each in processors:
        name = type(each).__name__
        place = order.index(name) if name in order else -1
        if place <= last:
            raise PassThroughError(f"{name} changes the logits")
        last = place
        match name:
            case "UnbatchedClassifierFreeGuidanceLogitsProcessor":
                scale, context = float(each.guidance_scale), each.unconditional_context
                if (ids := context["input_ids"]) is not None:
                    negative = ids, _to_mask(context["attention_mask"], ids)
            case "ClassifierFreeGuidanceLogitsProcessor":
                scale = float(each.guidance_scale)
            case "PrefixConstrainedLogitsProcessor":
                allowed = each._prefix_allowed_tokens_fn
            case "TemperatureLogitsWarper":
                values["temperature"] = each.temperature
            case "TopKLogitsWarper":
                values["top_k"] = each.top_k
            case "TopPLogitsWarper":
                values["top_p"] = each.top_p
            case "MinPLogitsWarper":
                values["min_p"] = each.min_p
    return scale, negative, allowed, values


def _to_sampling(config: Any, values: dict[str, Any]) -> Sampling:
    try:
        return Sampling(**values) if config.do_sample else Sampling(temperature=0)
    except (ValueError, TypeError) as error:
        raise PassThroughError(str(error)) from None
