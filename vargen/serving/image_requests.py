"""Bodies of `POST /v1/images/generations`: parsed, checked and turned into tasks before anything is generated."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vargen.decoding import Sampling
from vargen.pipelines import validation
from vargen.serving.errors import APIError
from vargen.serving.limits import RequestLimits
from vargen.serving.model_card import ModelCard
from vargen.serving.tasks import ImageTask
from vargen.values import MAX_SEED, parse_int, short_repr

FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_MAX_PARTIAL_IMAGES = 16  # OpenAI's clients ask for at most 3


@dataclass(frozen=True)
class ImageGeneration:
    """A checked request for images.

    Attributes:
        tasks: one per image, with consecutive seeds.
        response_format: `"b64_json"` or `"url"`.
        output_format: one of `FORMATS`.
        stream: whether partial images are sent as server-sent events.
    """

    tasks: list[ImageTask]
    response_format: str
    output_format: str
    stream: bool


def refuse(param: str, message: str, code: str | None = "invalid_value") -> APIError:
    """Return the error for an invalid field."""
    return APIError(400, message, param=param, code=code)


def check_model(body: Mapping[str, Any], card: ModelCard) -> None:
    """Raise APIError if the body names another model."""
    if body.get("model") not in (None, card.name):
        message = f"The model {short_repr(body['model'])} does not exist; this server has {card.name!r}."
        raise APIError(404, message, param="model", code="model_not_found")


def parse_prompt(body: Mapping[str, Any], limits: RequestLimits) -> str:
    """Return the prompt. Raises APIError if it is missing, empty, too long or not text."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise refuse("prompt", f"prompt must be text, got {short_repr(prompt)}.", "missing_required_parameter")
    if len(prompt) > limits.prompt_characters:
        raise refuse("prompt", f"prompt must have at most {limits.prompt_characters} characters, got {len(prompt)}.")
    try:
        validation.validate_prompts(prompt)
    except ValueError as error:
        raise refuse("prompt", f"{error}.".replace("prompt[0]", "prompt")) from None
    return prompt


def parse_number(body: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    """Return a whole number; `default` for a missing one. Raises APIError if it is out of range."""
    value = body.get(name)
    number = default if value is None else parse_int(value, least, most)
    if number is None and value is not None:
        raise refuse(name, f"{name} must be a whole number from {least} to {most}, got {short_repr(value)}.")
    return number


def parse_choice(body: Mapping[str, Any], name: str, choices: Any) -> str:
    """Return one of several texts, the first one by default. Raises APIError for another one."""
    value = body.get(name)
    if value is None:
        return str(next(iter(choices)))
    if not isinstance(value, str) or value not in choices:
        raise refuse(name, f"{name} must be {' or '.join(map(repr, choices))}, got {short_repr(value)}.")
    return value


def check_size(body: Mapping[str, Any], card: ModelCard) -> None:
    """Raise APIError unless the size is that of the model, `"auto"` or missing."""
    if body.get("size") not in (None, "auto", card.size_name):
        raise refuse("size", f"size must be {card.size_name!r}, the only one of this model, got {short_repr(body['size'])}.")


def parse_seed(body: Mapping[str, Any], count: int) -> int:
    """Return the seed of the first of `count` images or videos; a random one if none is given."""
    seed = parse_number(body, "seed", None, 0, MAX_SEED - count + 1)
    return secrets.randbelow(2**32) if seed is None else int(seed)


def parse_image_generation(body: Mapping[str, Any], card: ModelCard, limits: RequestLimits) -> ImageGeneration:
    """Check a body and return the request.

    Fields of OpenAI's interface without a meaning here, such as `quality`, `style` and `user`, are ignored, and so are unknown
    ones. `seed`, `temperature`, `top_k` and `top_p` are additions.

    Raises:
        APIError: for an invalid field, with its name, its value and what is allowed.
    """
    check_model(body, card)
    subject = _parse_subject(body, card, limits)
    count = parse_number(body, "n", 1, 1, limits.images)
    check_size(body, card)
    if body.get("background") == "transparent":
        raise refuse("background", "background must be 'opaque' or 'auto': images of this model are opaque.")
    response_format = parse_choice(body, "response_format", ("b64_json", "url"))
    output_format = parse_choice(body, "output_format", tuple(FORMATS))
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise refuse("stream", f"stream must be true or false, got {short_repr(stream)}.")
    if stream and response_format == "url":
        raise refuse("response_format", "response_format must be 'b64_json' with stream.")
    partial = parse_number(body, "partial_images", 0, 0, _MAX_PARTIAL_IMAGES)
    if partial and not stream:
        raise refuse("partial_images", "partial_images needs stream: true.")
    sampling, first = _parse_sampling(body, card), parse_seed(body, count)
    tasks = [ImageTask(subject, first + k, sampling, partial) for k in range(count)]
    return ImageGeneration(tasks, response_format, output_format, bool(stream))


def _parse_subject(body: Mapping[str, Any], card: ModelCard, limits: RequestLimits) -> str | int:
    """Return the prompt, or the number of the class that it names."""
    prompt = parse_prompt(body, limits)
    if not card.num_classes:
        return prompt
    word = prompt.strip().lower()
    number = (
        parse_int(int(word), 0, card.num_classes - 1) if word.isdecimal() and len(word) < 10 else card.class_names.get(word)
    )
    if number is None:
        allowed = f"the number of a class, 0 to {card.num_classes - 1}" + (", or its name" if card.class_names else "")
        raise refuse("prompt", f"prompt must be {allowed}, got {short_repr(prompt)}.")
    return number


def _parse_sampling(body: Mapping[str, Any], card: ModelCard) -> Sampling:
    values = {name: card.default_sampling[name] for name in ("temperature", "top_k", "top_p")}
    for name in values:
        if body.get(name) is None:
            continue
        try:
            Sampling(**{name: body[name]}).validate_top_k(card.vocab_size)
        except ValueError as error:
            raise refuse(name, f"{error}.") from None
        values[name] = body[name]
    return Sampling(**values)
