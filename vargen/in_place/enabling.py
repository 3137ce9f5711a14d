"""`enable`, `disable`, `summary` and `supported`: methods of vargen on an object that the user already has.

An enabled model of transformers has one attribute more, `generate`, an `EnabledGenerate`. It runs image calls by our loop over
the model's own modules, and passes all others to the original. Nothing else of the model changes, and no weights are copied.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput

from vargen.compat import installed_version, without_autocast
from vargen.decoding import Accelerator, decode
from vargen.decoding.methods import resolve_method
from vargen.decoding.rules import speculative_sampling
from vargen.decoding.tree_rules import traversal
from vargen.in_place.generate_calls import GenerateCall, PassThroughError, bind_arguments, resolve_call
from vargen.in_place.image_calls import CallDescription, ImagePlan, cut_at_end, find_change, is_image_call, plan_call
from vargen.in_place.overrides import refuse_overrides
from vargen.in_place.quantized import QuantizedCopy
from vargen.in_place.summary import Summary
from vargen.models.guidance import Guidance
from vargen.models.transformers.base import ImageLanguageModel, validate_network
from vargen.models.transformers.causal import NETWORKS, CausalLanguageModel
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.int8 import validate_int8, validate_layers
from vargen.models.transformers.int8_decoding import Int8TokenModel
from vargen.models.transformers.supported import MODELS, Chameleon, Janus, describe_language_model, find_description
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.language_model import bind_heads, open_heads
from vargen.pipelines.seeds import resolve_seeds
from vargen.values import short_repr

logger = logging.getLogger("vargen")
_CUSTOM_GENERATE = (4, 56)  # the first transformers whose `generate` takes a function as custom_generate


def enable(
    model: Any, method: Any = "gumbel", *,
    draft_model: Any = None, drafter: Any = None, quantization: str | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """Let a model or pipeline of yours generate images by a method of vargen, where it is; returns it.

    Calls stay as they are. Calls that generate text, and image calls with options that vargen lacks, run as before; of the
    latter, the first for each reason logs a warning.

    Args:
        model: a `JanusForConditionalGeneration`, `Emu3ForConditionalGeneration`, `GlmImageForConditionalGeneration`,
            `GemmaForCausalLM` or `Qwen2ForCausalLM` of transformers, also compiled or with adapters of peft; a pipeline of
            diffusers such as `GlmImagePipeline`; or a pipeline of vargen, whose default method is then this one.
        method: the name of a preset, a method string such as `"gumbel:window=8"`, or a method object.
        draft_model: for `"speculative"`, a smaller model of the same class.
        drafter: for `"eagle"` and `"medusa"`, the folder of a trained draft head, or a list of them. For Janus.
        quantization: `"int8"` for a model of transformers on a CPU: image calls run on 8-bit copies of the layers and of the
            image head, which are made by the first one, and again when the weights change. Tokens are not those of the
            untouched call then.
        settings: of the method, such as `window=8`.

    Raises:
        TypeError: for an object without a model that generates image tokens.
        ValueError: for a method that is unknown or that this model cannot run, and an object that is enabled already by another
            method or quantization. Nothing has changed then.
    """
    target = _find_target(model)
    if settings:
        if not isinstance(method, str):
            raise ValueError(f"method must be a name to have settings such as {next(iter(settings))}, got {short_repr(method)}")
        method = method + (":" if ":" not in method else ",") + ",".join(f"{name}={value}" for name, value in settings.items())
    if isinstance(target, VisualPipeline):
        if quantization is not None:
            raise ValueError("quantization must be None: pipelines of vargen are opened with it")
        return _enable_pipeline(target, method, draft_model, drafter)
    chosen = resolve_method(method)
    known = describe_language_model(target)
    if not known.has_generate:
        what = "masks" if isinstance(known, Chameleon) else "lacks"
        raise TypeError(f"model must sample image tokens, which generate of a {known.class_name} {what}; see vargen.accelerate")
    installed = installed_version("transformers") or "0"
    if not isinstance(known, Janus) and tuple(map(int, installed.split(".")[:2])) < _CUSTOM_GENERATE:
        raise ValueError(f"{known.class_name} can be enabled with transformers 4.56 or newer, got {installed}")
    enabled = _find_enabled(target)
    if enabled is not None:
        if enabled.summary.method != chosen or enabled.quantization != quantization:
            form = "" if enabled.quantization is None else f" with quantization={enabled.quantization!r}"
            raise ValueError(f"model is enabled by {enabled.summary.method.name}{form} already; call vargen.disable first")
        return model
    if validate_int8(quantization, known.device) is not None:
        validate_layers(known.body)
    if draft_model is not None:
        known.validate_draft(describe_language_model(_find_target(draft_model)))
    if not target.training:
        validate_network(known)
    if drafter is not None and not isinstance(known, Janus):
        raise ValueError(f"drafter must be None: draft heads run in place with Janus, not with {known.class_name}")
    heads = {} if drafter is None else open_heads(TransformersTokenModel(known), *_to_list(drafter))
    made = EnabledGenerate(target, chosen, draft_model, heads, quantization)
    if not target.training:
        chosen.bind(made.token_model(known, Guidance(1.0), quantized=False), 0)  # refuses methods that lack a part
    if made.previous is not None:
        logger.warning("generate of this model was replaced before: image calls that run accelerated do not pass through it")
    target.__dict__["generate"] = made
    return model


def disable(model: Any) -> Any:
    """Undo `enable`, whether or not the object is enabled; returns the object, with what it had before.

    Raises:
        ValueError: if `generate` was replaced since; nothing has changed then.
    """
    target = _find_target(model)
    if isinstance(target, VisualPipeline):
        if target.summary is not None:
            own = target.__dict__
            for name in ("summary", "default_method"):
                own.pop(name, None)
            if (previous := own.pop("_method_before")) is not None:
                own["default_method"] = previous
        return model
    enabled = _find_enabled(target)
    if enabled is not None:
        if vars(target).get("generate") is not enabled:
            raise ValueError("generate of this model was replaced after vargen.enable; undo that first")
        del target.__dict__["generate"], _ENABLED[target]
        if enabled.previous is not None:
            target.__dict__["generate"] = enabled.previous
    elif isinstance(vars(target).get("generate"), EnabledGenerate):  # of the model that this one is a shallow copy of
        del target.__dict__["generate"]
    return model


def summary(model: Any) -> Summary:
    """Return what the calls of an enabled object did so far; printed, it is a few lines.

    Raises:
        ValueError: for an object that is not enabled.
    """
    target = _find_target(model)
    found = target.summary if isinstance(target, VisualPipeline) else getattr(_find_enabled(target), "summary", None)
    if found is None:
        raise ValueError("model must be enabled: call vargen.enable first")
    return found


def supported() -> dict[str, str]:
    """Return the classes that `enable` takes, each with the call that it accelerates."""
    calls = {
        "JanusForConditionalGeneration": 'generate(**inputs, generation_mode="image")',
        "Emu3ForConditionalGeneration": "generate(**inputs, prefix_allowed_tokens_fn=...)",
        "GlmImageForConditionalGeneration": "generate(**inputs), for text to image",
        "diffusers.GlmImagePipeline": "pipe(prompt)",
        "pipelines of vargen": "pipe(prompt)",
    }
    others = {
        name: "generate(**inputs, prefix_allowed_tokens_fn=...)"
        for name in (*MODELS, *NETWORKS)
        if name in NETWORKS or MODELS[name].has_generate
    }
    return {**others, **calls}


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _find_target(model: Any) -> Any:
    """Return the model of transformers, or our pipeline, that an object is or contains."""
    found = model
    if isinstance(found, VisualPipeline):
        return found
    while True:
        if hasattr(found, "_orig_mod"):  # torch.compile
            found = found._orig_mod
        elif callable(getattr(found, "get_base_model", None)):  # peft
            found = found.get_base_model()
        else:
            break
    parts = getattr(found, "components", None)
    candidates = [found, *parts.values()] if isinstance(parts, Mapping) else [found]
    for each in candidates:
        kind = find_description(each) if isinstance(each, nn.Module) else None
        if kind is not None and (each is found or kind is not CausalLanguageModel):  # that of a pipeline encodes prompts
            return each if each is found else _find_target(each)
    raise TypeError(
        f"model must be one of {', '.join(MODELS)}, or a pipeline with one, got {short_repr(type(model).__name__)}; "
        "vargen.supported() lists what can be enabled"
    )


def _enable_pipeline(pipe: Any, method: Any, draft_model: Any, drafter: Any) -> Any:
    if draft_model is not None or drafter is not None:
        raise ValueError("draft_model and drafter must be None: pipelines of vargen are opened with them")
    chosen = pipe.resolve_method(method)
    if pipe.summary is not None:
        if pipe.summary.method != chosen:
            raise ValueError(f"model is enabled by {pipe.summary.method.name} already; call vargen.disable first")
        return pipe
    pipe.validate_method(chosen)
    pipe._method_before = vars(pipe).get("default_method")
    pipe.default_method, pipe.summary = method if isinstance(method, str) else chosen, Summary(chosen)
    return pipe


# By model, which is not kept alive; where a wrapper stands in its place, the attribute alone would not tell.
_ENABLED: weakref.WeakKeyDictionary[Any, EnabledGenerate] = weakref.WeakKeyDictionary()


def _find_enabled(model: Any) -> EnabledGenerate | None:
    """Return what enabled this very model: its shallow copies have the attribute, too."""
    own = vars(model).get("generate")
    if own is None:  # it was deleted
        _ENABLED.pop(model, None)
    found = own if isinstance(own, EnabledGenerate) else _ENABLED.get(model)
    return None if found is None or not found.is_of(model) else found


class EnabledGenerate:
    """The attribute `generate` of an enabled model, which it does not keep alive. A deep copy belongs to the copied model.

    Attributes:
        previous: the attribute that it replaced, or None.
    """

    def __init__(
        self, model: Any, method: Accelerator, draft_model: Any = None, heads: Mapping[str, Any] | None = None,
        quantization: str | None = None,
    ):  # fmt: skip
        own = vars(model).get("generate")
        self.previous = None if isinstance(own, EnabledGenerate) else own  # that of a shallow copy is its original's
        self.summary, self._draft_model, self._heads = Summary(method), draft_model, dict(heads or {})
        self.quantization, self._copies = quantization, (QuantizedCopy(), QuantizedCopy())  # of the model, and its drafter
        self._attach(model)

    def _attach(self, model: Any) -> None:
        self._model, self._kind = weakref.ref(model), find_description(model)
        _ENABLED[model] = self
        functools.update_wrapper(self, type(model).generate)
        self.__signature__ = inspect.signature(type(model).generate.__get__(model))

    def is_of(self, model: Any) -> bool:
        """Whether it belongs to a model, and not to one that was copied."""
        return self._model() is model

    def __getstate__(self) -> dict[str, Any]:
        names = ("previous", "summary", "_draft_model", "_heads", "quantization")
        return {"model": self._model(), **{name: vars(self)[name] for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state.pop("model")
        vars(self).update(state)
        self._copies = QuantizedCopy(), QuantizedCopy()
        self._attach(model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self._model()
        if model is None:
            raise ReferenceError("the model that was enabled is gone: this generate belongs to a shallow copy of it")
        if self._kind is None or not is_image_call(self._kind, options):  # None: pickled, and not described here
            return self._call_original(model, args, options)
        known = without_autocast(describe_language_model)(model)
        try:
            if model.training:
                raise PassThroughError("the model is in training mode")
            refuse_overrides(model, known)
            call = resolve_call(model, args, options)
            with torch.no_grad(), _outer_hook(model, known):
                return self._generate(model, known, call, bind_arguments(model, args, options))
        except PassThroughError as error:
            reason = str(error)
        if self.summary.add_original(reason):
            logger.warning("this image call runs by the original generate, because %s", reason)
        return self._call_original(model, args, options)

    def _call_original(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self.previous(*args, **options) if self.previous else type(model).generate(model, *args, **options)

    def token_model(
        self, description: ImageLanguageModel, guidance: Guidance, quantized: bool = True
    ) -> TransformersTokenModel:
        """Return how the loop sees the model in one call. Raises `ValueError` for a network that it cannot run.

        Args:
            quantized: False leaves a quantization out, whose copies take time.
        """

        def make(each: ImageLanguageModel, kept: QuantizedCopy, *args: Any, **options: Any) -> TransformersTokenModel:
            if self.quantization is None or not quantized:
                return TransformersTokenModel(each, guidance, *args, **options)
            return Int8TokenModel(each, kept.parts(each), guidance, *args, **options)

        draft, (own, other) = self._describe_draft(description), self._copies
        small = None if draft is None else make(draft, other)
        return make(description, own, small, draft_heads=bind_heads(self._heads, description.device))

    def _describe_draft(self, description: ImageLanguageModel) -> ImageLanguageModel | None:
        if self._draft_model is None:
            return None
        known = describe_language_model(_find_target(self._draft_model))
        return description.with_model(known) if isinstance(description, CallDescription) else known

    @without_autocast
    def _generate(self, model: Any, known: ImageLanguageModel, call: GenerateCall, options: dict[str, Any]) -> Any:
        plan, count = plan_call(known, call), len(call.ids)
        method, greedy = self.summary.method, plan.sampling.is_greedy
        if greedy and method.kind == "relaxed":  # greedy tokens are those of the model
            method = replace(method, acceptance=speculative_sampling if method.drafter.topology == "chain" else traversal)
        try:
            target = self.token_model(plan.description, Guidance(call.guidance_scale))
            method.bind(target, 0)
            if self.quantization is not None:
                target.description.validate_lengths(plan.rows)
        except ValueError as error:
            raise PassThroughError(str(error)) from None
        seeds = torch.zeros(count, dtype=torch.int64) if greedy else resolve_seeds(None, count).noise_seeds
        found = decode(target, plan.rows, seeds, method, plan.sampling)
        self.summary.add(found.stats)
        tokens = found.tokens.to(call.ids.device)
        tokens = _complete(model, plan, tokens, options) if plan.whole_sequence else tokens.to(call.ids.dtype)
        return GenerateDecoderOnlyOutput(sequences=tokens) if call.returns_dict else tokens


def _complete(model: Any, plan: ImagePlan, tokens: Tensor, options: dict[str, Any]) -> Tensor:
    """Return prompts and new ids `[B, P + T]`, cut at the ends of sequences and padded behind them."""
    call, ids = plan.call, plan.description.ids
    length = len(plan.schedule) or call.max_new_tokens
    new = (tokens if ids is None else ids.to(tokens.device)[tokens])[:, :length]
    rows = [cut_at_end(row, call.end) for row in new]
    for number, row in enumerate(rows):
        if (place := find_change(plan, number, row)) is not None:
            rows[number] = _continue_sequence(model, call, number, row[:place], options)
    rest = max(map(len, rows))
    padded = torch.full((len(rows), rest), call.pad, device=call.ids.device)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return torch.cat([call.ids, padded], 1)


def _continue_sequence(model: Any, call: GenerateCall, number: int, new: Tensor, options: dict[str, Any]) -> Tensor:
    """Let the original `generate` continue a sequence from where `prefix_allowed_tokens_fn` depends on sampled ids."""
    logger.warning(
        "prefix_allowed_tokens_fn depends on sampled ids: the original generate continues after %d of them", len(new)
    )
    allowed, width = call.allowed, call.ids.shape[1]
    assert allowed is not None

    def extend(ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.cat([ids[number], new.to(ids)])[None]
        return row, torch.cat([valid[number].long(), torch.ones_like(new)])[None]

    ids, mask = extend(call.ids, call.valid)
    changed: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": call.max_new_tokens - len(new)}
    changed |= {"max_length": None, "num_return_sequences": 1, "return_dict_in_generate": False}
    changed["prefix_allowed_tokens_fn"] = lambda _, sequence: allowed(number, sequence)
    if call.guidance_scale != 1:
        negative = call.negative or (call.ids[:, -1:], torch.ones_like(call.valid[:, -1:]))
        changed["negative_prompt_ids"], changed["negative_prompt_attention_mask"] = extend(*negative)
    given = {name: value for name, value in options.items() if name != "inputs"}
    return type(model).generate(model, **{**given, **changed})[0, width:]


@contextmanager
def _outer_hook(model: Any, known: ImageLanguageModel) -> Iterator[None]:
    """Let the hook of accelerate on the whole model run, which moves its weights, as around its `forward`."""
    hook = getattr(model, "_hf_hook", None)
    if hook is None or isinstance(known, Janus):  # whose own loop does not call it, either
        yield
        return
    hook.pre_forward(model)
    try:
        yield
    finally:
        hook.post_forward(model, None)
