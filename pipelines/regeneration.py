"""Generate an image again from the parameters that it carries, and compare tokens and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.compat import installed_version
from vargen.decoding import DecodeStats, resolve_method
from vargen.image_metadata import model_digest, pixels_digest, tokens_digest
from vargen.pipelines.validation import is_blank
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline
    from vargen.pipelines.generation import ImageRequest

_SAMPLING = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")
_SOURCES = {"image": "an image", "mask": "a mask"}
_UNKNOWN = ("prompt_embeds", "negative_prompt_embeds", "stopped", "method")  # of calls that parameters do not describe


_ROUNDING_LEVELS = 8  # by which decoders of two machines or dtypes may differ


@dataclass(frozen=True)
class Regeneration:
    """An image generated again.

    Attributes:
        image: the new image. same_tokens: None if the original does not record its tokens. same_pixels: compared with its file.
        reasons: why it may differ, in sentences; empty if nothing is known to differ.
        levels: the largest difference of a color, of 255; 255 for images of different sizes.
    """

    image: Image.Image
    same_tokens: bool | None
    same_pixels: bool
    reasons: tuple[str, ...] = ()
    levels: int = 0

    def describe(self) -> str:
        """Return the result in one or more sentences."""
        if self.same_pixels:
            tokens = {True: "tokens and pixels are", False: "pixels are, though not the tokens,", None: "pixels are"}
            return f"The same image: its {tokens[self.same_tokens]} identical."
        if self.same_tokens:
            cause = "the decoder rounds differently here" if self.levels <= _ROUNDING_LEVELS else "the file was edited"
            return f"The same tokens, but colors that differ by up to {self.levels} of 255: {cause}."
        reasons = self.reasons or ("No recorded setting differs: rounding may have, or the file was edited.",)
        return " ".join(["Another image.", *reasons])


def describe_environment(pipe: VisualPipeline) -> dict[str, Any]:
    """Return what an image records about the dtype of its model, the machine and packages."""
    device = pipe._device_of(pipe.transformer)
    network = pipe.transformer
    quantization = getattr(network.config, "quantization", None) or getattr(network, "gpu_format", None)
    quantization = "int8" if hasattr(network, "int8_network") else quantization
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        **({"quantization": quantization} if quantization else {}),
        "processor": f"{device.type} {processor}",
        "versions": {name: installed_version(name) for name in ("vargen", "torch", "diffusers", "transformers")},
    }


def _model_title(folder: Path) -> str:
    """Return the name of a model folder; of one in the cache of the hub, the id of the model."""
    place = folder.resolve()
    return place.parents[1].name.removeprefix("models--").replace("--", "/") if place.parent.name == "snapshots" else place.name


@dataclass(frozen=True)
class CallRecord:
    """What a call was given, as it was then, so that the parameters of its images can be asked for later.

    Attributes:
        model, folder: class of the pipeline, and folder of its model; None if its components come from elsewhere.
        subject: `"prompt"` or `"class_label"`, and one of them or a list, each for equally many images; None for features.
        negative: negative prompts, likewise.
        others: what else the call was given, by name; also what parameters cannot hold, such as an image to start from.
    """

    environment: Mapping[str, Any]
    model: str
    folder: Path | None
    request: ImageRequest
    subject: tuple[str, Any]
    negative: Any
    others: Mapping[str, Any]

    @classmethod
    def make(cls, pipe: VisualPipeline, request: ImageRequest, prompt: Any, negative: Any, **others: Any) -> CallRecord:
        """Record a call; arguments as the call was given them, None for those that it was not given."""
        subject = ("prompt", copy(prompt))
        if pipe.is_class_conditional:
            subject = ("class_label", request.condition.class_labels[:: request.num_candidates].tolist())
        request = replace(request, condition=None, fixed=None)
        environment, negative = describe_environment(pipe), None if is_blank(negative) else copy(negative)
        return cls(environment, type(pipe).__name__, pipe.folder, request, subject, negative, others)

    def describe(self, number: int, stats: DecodeStats, tokens: Tensor) -> dict[str, Any]:
        """Return the parameters of image `number` in plain values; `tokens` are all, int64 `[B, N]`."""
        (key, subject), request = self.subject, self.request
        place = request.seeds.devices[number * request.num_candidates]
        optional = {
            "negative_prompt": _pick(self.negative, number, len(tokens)),
            "generator": None if place.type == "cpu" else str(place),
            "prompt_embeds": subject is None,
            "stopped": stats.stopped,
            "method": None if _is_known(request.method) else "your own",
            "guidance_interval": request.guidance.interval,
            "model_digest": self._model_digest,
            **self.others,
        }
        return {
            key: "" if subject is None else _pick(subject, number, len(tokens)),
            **describe_seed(stats, number),
            "tokens_digest": tokens_digest(tokens[number]),
            "model": _model_title(self.folder) if self.folder else self.model,
            **self.environment,
            "accelerator": request.method.name,
            "guidance_scale": request.guidance.scale,
            **{name: getattr(request.sampling, name) for name in _SAMPLING[1:]},
            **{name: value for name, value in optional.items() if value is not None and value is not False},
        }

    @cached_property
    def _model_digest(self) -> str | None:
        return model_digest(self.folder) if self.folder else None


def _is_known(method: Any) -> bool:
    """Whether its name is enough to make it again."""
    try:
        return resolve_method(method.name, method.paradigm) == method
    except (ValueError, TypeError):
        return False


def _pick(given: Any, number: int, images: int) -> Any:
    """Return the value for an image: the only one, or of a list of values for equally many images."""
    return given[number * len(given) // images] if isinstance(given, list | tuple) else given


def describe_seed(stats: DecodeStats, number: int) -> dict[str, Any]:
    """Return the `seed` of image `number` and, if a scorer was used, `scorer` and `score`.

    If there were several candidates, also `candidates`, the scores of all, and `asked_seed`, the seed of the first.
    """
    if stats.scorer is None:
        return {"seed": stats.seeds[number]}
    scores, seeds = stats.scores[number], stats.candidate_seeds[number]
    several = {"candidates": scores, "asked_seed": seeds[0]} if len(scores) > 1 else {}
    score = scores[seeds.index(stats.seeds[number])]
    return {"seed": stats.seeds[number], "scorer": stats.scorer, "score": score, **several}


def validate_regenerable(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError if parameters cannot be generated from alone."""
    given = {what: parameters[name] for name, what in _SOURCES.items() if parameters.get(name)}
    if found := [f"{what} {short_repr(file)}" if isinstance(file, str) else what for what, file in given.items()]:
        raise ValueError(f"the image was generated from {' and '.join(found)}, which its parameters do not contain")
    if found := [name for name in _UNKNOWN if parameters.get(name)]:
        raise ValueError(f"the image was generated with {', '.join(found)}, which its parameters do not contain")
    seed = parameters.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"the image must carry a seed from 0 to 2^63 - 1, got {seed!r}")


def regenerate(pipe: VisualPipeline, parameters: Mapping[str, Any], original: Image.Image) -> Regeneration:
    """Generate an image again by the parameters of the original, and compare it."""
    validate_regenerable(parameters)
    names = [*_SAMPLING, "guidance_interval", "clean_prompt", *getattr(pipe, "recorded_arguments", ())]
    names += [] if pipe.is_class_conditional else ["prompt", "negative_prompt"]
    given = {name: parameters[name] for name in names if parameters.get(name) is not None}
    if pipe.is_class_conditional:
        label = parameters.get("class_label", parameters.get("prompt"))
        given["class_labels"] = int(label) if isinstance(label, str) and label.isdecimal() else label
    if "top_k" in parameters and parameters["top_k"] is None:
        given["top_k"] = pipe.vocab_size
    result = pipe(
        **given,
        accelerator=parameters.get("accelerator") or pipe.default_method,
        generator=torch.Generator(parameters.get("generator") or "cpu").manual_seed(parameters["seed"]),
    )
    return compare_images(parameters, original, result.images[0], result.parameters())


def compare_images(
    parameters: Mapping[str, Any], original: Image.Image, image: Image.Image, here: Mapping[str, Any]
) -> Regeneration:
    """Compare an image that was generated again with the original; `here` are its own parameters."""
    recorded = parameters.get("tokens_digest")
    same_tokens = None if recorded is None else recorded == here["tokens_digest"]
    same_pixels = pixels_digest(original) == pixels_digest(image)
    if same_pixels:
        return Regeneration(image, same_tokens, True)
    levels = 255
    if original.size == image.size:
        one, other = (np.asarray(each.convert("RGB"), dtype=np.int16) for each in (original, image))
        levels = int(np.abs(one - other).max())
    return Regeneration(image, same_tokens, False, explain_difference(parameters, here), levels)


def explain_difference(parameters: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each recorded fact that can change an image and is different here."""
    facts = {
        "model": "model",
        "weights of the model (digest)": "model_digest",
        "dtype": "dtype",
        "quantization": "quantization",
        "processor, whose float32 sums round differently": "processor",
        "torch version": "torch",
    }
    there, own = ({"quantization": "none", **each} for each in (parameters, here))
    for each in (there, own):
        each["torch"] = each["versions"].get("torch") if isinstance(each.get("versions"), Mapping) else None
    return tuple(
        f"Another {what}: {there[name]} there, {own[name]} here."
        for what, name in facts.items()
        if there.get(name) is not None and own.get(name) is not None and there[name] != own[name]
    )
