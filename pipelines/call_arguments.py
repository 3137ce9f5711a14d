"""Helpful errors for unsupported arguments of a call, such as those of other diffusers pipelines."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Set
from typing import Any, TypeVar

from vargen.values import short_repr

_F = TypeVar("_F", bound=Callable[..., Any])

_ONE_SIZE = "a model draws one size; resize the pictures that a call returns, as by image.resize((256, 256))"
_INSTEAD = {
    "seed": "give generator=torch.Generator().manual_seed({value})",
    "height": _ONE_SIZE,
    "width": _ONE_SIZE,
    "num_inference_steps": "accelerator= decides how many passes a picture takes",
    "num_frames": "give num_blocks= to a model of video",
    "callback": "give callback_on_step_end=",
    "negative_prompt": "this model has no guidance to lead away from anything; say in prompt what to show",
}


def answering(call: _F, taken: Set[str]) -> _F:
    """Wrap a pipeline's call: an empty `negative_prompt` counts as None, and unsupported arguments raise a helpful error.

    Args:
        taken: names of the supported arguments.

    Raises:
        TypeError: when the wrapped call gets an argument that is not in `taken`. The message says what to use instead.
    """

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **given: Any) -> Any:
        if "negative_prompt" in given and _is_blank(given["negative_prompt"]):
            del given["negative_prompt"]
        for name in given.keys() - taken:
            remedy = _instead(name, given[name], taken)
            raise TypeError(f"{type(self).__name__} takes no {name}, got {short_repr(given[name])}: {remedy}")
        return call(self, *args, **given)

    return checked  # type: ignore[return-value]


def names_of(*calls: Callable[..., Any]) -> Set[str]:
    """Return the names of the keyword arguments of all the calls."""
    found = [each for call in calls for each in inspect.signature(call).parameters.values()]
    return {each.name for each in found if each.kind is not each.VAR_KEYWORD} - {"self"}


def _is_blank(prompt: Any) -> bool:
    prompts = prompt if isinstance(prompt, list | tuple) else [prompt]
    return all(each is None or (isinstance(each, str) and not each.strip()) for each in prompts)


def _instead(name: str, value: Any, taken: Set[str]) -> str:
    if name in _INSTEAD:
        return _INSTEAD[name].format(value=value if isinstance(value, int) else 0)
    near = difflib.get_close_matches(name, taken, 1)
    return f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(taken))}"
