"""What a user changed on a model that a call by our loop would leave out: then the original `generate` runs."""

from __future__ import annotations

from typing import Any

from vargen.in_place.generate_calls import PassThroughError
from vargen.models.transformers.base import ImageLanguageModel
from vargen.models.transformers.supported import Janus

_METHODS = ("generate", "forward", "prepare_inputs_for_generation", "_sample")
_OFFLOADING = {"AlignDevicesHook", "CpuOffload", "SequentialHook"}  # of accelerate; they move weights and nothing else


def refuse_overrides(model: Any, known: ImageLanguageModel) -> None:
    """Raise `PassThroughError` for methods that a subclass or the user replaced, and for hooks that may see or change a pass.

    Passes of our loop have several tokens, and call the layers, not the modules around them. Adapters, quantized layers and
    compiled modules are layers as others are.
    """
    base = next(each for each in type(model).__mro__ if each.__name__ == known.class_name)
    for name in _METHODS:
        if getattr(type(model), name) is not getattr(base, name):
            raise PassThroughError(f"the class {type(model).__name__} has a {name} of its own")
    body = getattr(known.body, "_orig_mod", known.body)  # of torch.compile
    called = [model, body] if isinstance(known, Janus) else [model, model.model, body]
    for module in called:
        for name in _METHODS[1:]:
            if name == "forward" and (hasattr(module, "_hf_hook") or (module is model and isinstance(known, Janus))):
                continue  # what accelerate replaced; the loop of Janus does not call its own forward
            if (own := vars(module).get(name)) is not None and not _is_own_method(own, module, name):
                raise PassThroughError(f"{name} of the {type(module).__name__} was replaced")
    for module in model.modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise PassThroughError(f"a {type(module).__name__} of torch.ao quantizes its inputs by all tokens of a pass")
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_diffusers_hook"):
            raise PassThroughError(f"a forward hook is on a {type(module).__name__}")
        hook = getattr(module, "_hf_hook", None)
        for each in [] if hook is None else [hook, *getattr(hook, "hooks", ())]:
            if type(each).__name__ not in _OFFLOADING:
                raise PassThroughError(f"a {type(each).__name__} is on a {type(module).__name__}")


def _is_own_method(method: Any, module: Any, name: str) -> bool:
    """Whether an attribute is the method of the class, as it is or compiled."""
    method = getattr(method, "_torchdynamo_orig_callable", method)
    return bool(method == getattr(type(module), name).__get__(module))
