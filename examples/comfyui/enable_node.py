"""The node that makes a loaded model of transformers faster."""

from __future__ import annotations

from typing import Any

import vargen
from vargen.decoding import Accelerator, list_methods


class AnyType(str):
    """A type of sockets that connects with every other: packs of nodes name the types of their models as they like."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False


ANY = AnyType("*")


class VargenEnable:
    """Lets a loaded Janus, Emu3 or GLM-Image of transformers, or a diffusers pipeline with one, take fewer passes."""

    CATEGORY = "vargen"
    DESCRIPTION = __doc__
    FUNCTION = "enable"
    RETURN_TYPES = (ANY,)
    RETURN_NAMES = ("model",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        methods = [each.name for each in list_methods(Accelerator.paradigm) if not each.experimental]
        tooltip = "gumbel: the image that one token at a time gives. off: as it was."
        return {"required": {"model": (ANY,), "method": (["off", *methods], {"default": "gumbel", "tooltip": tooltip})}}

    def enable(self, model: Any, method: str) -> tuple[Any]:
        """Enable the model that is given, which other nodes then use as before.

        Raises:
            TypeError: for an object without such a model.
            ValueError: for a method that it cannot run.
        """
        vargen.disable(model)
        return (model if method == "off" else vargen.enable(model, method),)
