"""Weights that hooks of accelerate or diffusers move or cast while a module runs: they may be read in its `forward` only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_offloaded(module: Any) -> bool:
    """Whether accelerate moves the weights of a module, or of its parts, to another device while they run."""
    return hasattr(module, "_hf_hook") or weights_are_elsewhere(module)


def read_weight(module: Any, name: str = "weight") -> Tensor:
    """Return a parameter or buffer of a module for use outside its `forward`, on the device where the module runs.

    While the module is offloaded, this is a copy without a gradient.
    """
    hook, weight = getattr(module, "_hf_hook", None), getattr(module, name)
    if hook is None or not weight.is_meta:
        return weight if hook is None else weight.detach().to(find_device(module))
    hook.pre_forward(module)
    weight = getattr(module, name).detach().clone()
    hook.post_forward(module, None)
    return weight


def find_device(module: Any) -> torch.device:
    """Return the device where a module runs. While accelerate offloads it, its weights are on another one."""
    for part in module.modules():
        hooks = getattr(part, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", [hooks]):
            place = getattr(hook, "execution_device", None)
            if place is not None:
                return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return next(module.parameters()).device


def weights_are_elsewhere(module: Any) -> bool:
    """Whether hooks of accelerate keep weights of a module somewhere else, and load them for each layer's `forward`."""
    hooked = any(hasattr(part, "_hf_hook") for part in module.modules())
    return hooked and any(weight.is_meta for weight in module.parameters())


def require_weights(module: Any, action: str, name: str = "") -> None:
    """Raise ValueError if weights of a module are elsewhere; `action` says what cannot be done, such as "saved"."""
    if weights_are_elsewhere(module):
        raise ValueError(
            f"{name or type(module).__name__} cannot be {action} while its weights are offloaded: call remove_all_hooks() of "
            "the pipeline first, or accelerate.hooks.remove_hook_from_module(network, recurse=True)"
        )


def validate_offloading(transformer: Any) -> None:
    """Raise ValueError for a quantized network that is offloaded: its passes read the weights of all layers at once."""
    if transformer.quantized:
        require_weights(transformer, "run with quantization='int8'")
