"""Generate an image again from the parameters that it carries, and compare tokens and pixels with those of the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from vargen.compat import installed_version
from vargen.decoding import DecodeOutput, DecodeStats, resolve_method
from vargen.image_metadata import pixels_digest, tokens_digest
from vargen.pipelines.validation import is_blank, resolve_class_labels

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline
    from vargen.pipelines.generation import ImageRequest

_PACKAGES = ("vargen", "torch", "diffusers", "transformers")
_SAMPLING = ("guidance_scale", "temperature", "top_k", "top_p")
_SOURCES = ("image", "mask", "strength")
_UNKNOWN = ("prompt_embeds", "negative_prompt_embeds", "stopped", "method")  # of calls that parameters do not describe


@dataclass(frozen=True)
class Regeneration:
    """An image generated again.

    Attributes:
        image: the new image. same_tokens: None if the original does not record its tokens. same_pixels: compared with its file.
        reasons: why it may differ, in sentences; empty if nothing is known to differ.
    """

    image: Image.Image
    same_tokens: bool | None
    same_pixels: bool
    reasons: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the result in one or more sentences."""
        if self.same_pixels:
            tokens = {True: "tokens and pixels are", False: "pixels are, though not the tokens,", None: "pixels are"}
            return f"The same image: its {tokens[self.same_tokens]} identical."
        if self.same_tokens:
            return "The same tokens, but not the same pixels: the decoder rounds differently here."
        reasons = self.reasons or ("No recorded setting differs: rounding may have, or the file was edited.",)
        return " ".join(["Another image.", *reasons])


def environment_parameters(pipe: VisualPipeline, model: str, digest: str | None) -> dict[str, Any]:
    """Return what an image records about its model and machine, besides the arguments of the call."""
    device, quantization = pipe.device, getattr(pipe.transformer.config, "quantization", None)
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "model": model,
        **({"model_digest": digest} if digest else {}),
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        **({"quantization": quantization} if quantization else {}),
        "processor": f"{device.type} {processor}",
        "versions": {name: installed_version(name) for name in _PACKAGES},
    }


def describe_call(
    pipe: VisualPipeline,
    request: ImageRequest,
    result: DecodeOutput,
    subject: Any,
    negative_prompt: Any = None,
    clean_prompt: bool = False,
    **unknown: Any,
) -> list[dict[str, Any]]:
    """Return the parameters of each image of a call, without the digest of the model: plain values, as they are now.

    Args:
        subject: prompts or class labels as given, for each of which there are equally many images; None for embeddings.
        negative_prompt, clean_prompt: as given.
        unknown: what parameters cannot hold, such as an image to start from, by name; None if it was not given.
    """
    images = len(result.stats.seeds)

    def per_image(values: Any) -> list[Any]:
        listed = list(values) if isinstance(values, list | tuple) else [values]
        return [listed[number * len(listed) // images] for number in range(images)]

    key = "class_label" if pipe.is_class_conditional else "prompt"
    if subject is not None and pipe.is_class_conditional:
        subject = resolve_class_labels(subject, pipe.num_classes, pipe.class_names)
    try:
        is_known = resolve_method(request.method.name, pipe.paradigm) == request.method
    except (ValueError, TypeError):
        is_known = False
    optional = {
        **unknown,
        "prompt_embeds": subject is None or None,
        "stopped": result.stats.stopped or None,
        "method": None if is_known else "your own",
        "guidance_interval": request.guidance.interval,
        "clean_prompt": clean_prompt or None,
    }
    common = {
        **environment_parameters(pipe, pipe.folder.name if pipe.folder else type(pipe).__name__, None),
        "accelerator": request.method.name,
        "guidance_scale": request.guidance.scale,
        **{name: getattr(request.sampling, name) for name in _SAMPLING[1:]},
        **{name: value for name, value in optional.items() if value is not None},
    }
    places = [str(device) for device in request.seeds.devices[:: request.num_candidates]]
    negatives = [None] * images if is_blank(negative_prompt) else per_image(negative_prompt)
    return [
        {
            key: own if own is not None else "",
            **({} if negative is None else {"negative_prompt": negative}),
            **describe_image(result.stats, number),
            **({} if place == "cpu" else {"generator": place}),
            "tokens_digest": tokens_digest(result.tokens[number]),
            **common,
        }
        for number, (own, negative, place) in enumerate(zip(per_image(subject), negatives, places, strict=True))
    ]


def describe_image(stats: DecodeStats, number: int) -> dict[str, Any]:
    """Return what reproduces image `number` of a call and, if a scorer was used, its score.

    Returns:
        `seed`, and with a scorer `scorer` and `score`. If there were several candidates, also `candidates`, the scores of all
            of them, and `asked_seed`, the seed of the first.
    """
    if stats.scorer is None:
        return {"seed": stats.seeds[number]}
    scores, seeds = stats.scores[number], stats.candidate_seeds[number]
    several = {"candidates": scores, "asked_seed": seeds[0]} if len(scores) > 1 else {}
    score = scores[seeds.index(stats.seeds[number])]
    return {"seed": stats.seeds[number], "scorer": stats.scorer, "score": score, **several}


def validate_regenerable(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError if parameters cannot be generated from alone."""
    if found := [name for name in _SOURCES if parameters.get(name) is not None]:
        raise ValueError(f"the image was generated from another one ({', '.join(found)}), which its parameters do not contain")
    if found := [name for name in _UNKNOWN if parameters.get(name)]:
        raise ValueError(f"the image was generated with {', '.join(found)}, which its parameters do not contain")
    seed = parameters.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"the image must carry a seed from 0 to 2^63 - 1, got {seed!r}")


def regenerate(
    pipe: VisualPipeline, parameters: Mapping[str, Any], original: Image.Image, here: Mapping[str, Any]
) -> Regeneration:
    """Generate an image again and compare it.

    Args:
        parameters: of the original. here: what `environment_parameters` returns for this pipeline.

    Raises:
        ValueError: for parameters that this pipeline does not take.
    """
    validate_regenerable(parameters)
    subject = {"prompt": parameters.get("prompt"), "negative_prompt": parameters.get("negative_prompt")}
    if pipe.is_class_conditional:
        label = parameters.get("class_label", parameters.get("prompt"))
        subject = {"class_labels": int(label) if isinstance(label, str) and label.isdecimal() else label}
    sampling = {name: parameters[name] for name in _SAMPLING if parameters.get(name) is not None}
    if "top_k" in parameters and parameters["top_k"] is None:
        sampling["top_k"] = pipe.vocab_size
    more = {name: parameters[name] for name in ("guidance_interval", "clean_prompt") if parameters.get(name) is not None}
    tokens = pipe(
        **{name: value for name, value in subject.items() if value is not None},
        **sampling,
        **more,
        accelerator=parameters.get("accelerator") or pipe.default_method,
        generator=torch.Generator(parameters.get("generator") or "cpu").manual_seed(parameters["seed"]),
        output_type="latent",
    ).images
    return compare_images(parameters, original, tokens, pipe.decode_tokens(tokens)[0], here)


def compare_images(
    parameters: Mapping[str, Any], original: Image.Image, tokens: torch.Tensor, image: Image.Image, here: Mapping[str, Any]
) -> Regeneration:
    """Compare an image that was generated again with the original; see `regenerate`."""
    recorded = parameters.get("tokens_digest")
    same_tokens = None if recorded is None else recorded == tokens_digest(tokens)
    same_pixels = pixels_digest(original) == pixels_digest(image)
    return Regeneration(image, same_tokens, same_pixels, () if same_pixels else explain_difference(parameters, here))


def explain_difference(parameters: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each recorded fact that can change an image and is different here."""
    versions, own = parameters.get("versions") or {}, here["versions"]
    torch_versions = (versions.get("torch"), own["torch"]) if isinstance(versions, dict) else (None, None)
    facts: Sequence[tuple[str, Any, Any]] = (
        ("model", parameters.get("model"), here["model"]),
        ("weights of the model (digest)", parameters.get("model_digest"), here.get("model_digest")),
        ("dtype", parameters.get("dtype"), here["dtype"]),
        ("quantization", parameters.get("quantization") or "none", here.get("quantization") or "none"),
        ("processor, whose float32 sums round differently", parameters.get("processor"), here["processor"]),
        ("torch version", *torch_versions),
    )
    return tuple(
        f"Another {what}: {given} there, {found} here."
        for what, given, found in facts
        if given is not None and found is not None and given != found
    )
