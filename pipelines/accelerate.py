"""`accelerate`: a pipeline around models of transformers or diffusers that are in memory."""

from __future__ import annotations

from typing import Any

from vargen.values import short_repr

from diffusers import DiffusionPipeline  # isort: skip  (after the torchvision guard)


def accelerate(model: Any, processor: Any = None, draft_model: Any = None, **options: Any) -> Any:
    """Return a pipeline that generates with methods of vargen.

    Args:
        model: an image language model of transformers, or a pipeline of diffusers' Helios.
        processor: of a language model.
        draft_model: a smaller model of the same kind, or Helios-Distilled.
        options: as of `LanguageModelPipeline`; there are none for Helios.

    Returns:
        A `LanguageModelPipeline` or `HeliosVideoPipeline`, whose pages say which models fit.
    """
    if not isinstance(model, DiffusionPipeline):
        from vargen.pipelines.language_model import LanguageModelPipeline

        return LanguageModelPipeline(model, processor, draft_model, **options)
    from vargen.pipelines.helios import HeliosVideoPipeline

    given = {"processor": processor, **options}
    if extra := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"{extra[0]} must be left out for a pipeline of diffusers, got {short_repr(given[extra[0]])}")
    return HeliosVideoPipeline(model, draft_model)
