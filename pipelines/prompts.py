"""Prompts to conditions: names of emoji, cleaned captions, left-padded text features as LlamaGen was trained with."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vargen.compat import tokenized, tokenizer_lock, without_autocast
from vargen.models.guidance import Condition
from vargen.pipelines import validation
from vargen.values import require_int, short_repr

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

logger = logging.getLogger("vargen")


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Turn right padding of features `[B, P, C]` into left padding; the mask, bool `[B, P]`, is True where they are valid.

    Returns features `[B, P, C]`, zero in the padding and with valid rows last in their order, and their mask `[B, P]`.
    """
    P = mask.shape[1]
    padding = P - mask.sum(1, keepdim=True)
    index = torch.arange(P, device=mask.device) - padding
    aligned = features.gather(1, index.clamp_min(0)[..., None].expand_as(features))
    valid = index >= 0
    return aligned * valid[..., None].to(features.dtype), valid


_LATIN_ENDS = "\u0250"  # letters below it are Latin, from which an uncased tokenizer strips the accents
_GREEK = "\u0370", "\u03ff"  # single Greek letters occur as symbols in English text


def describe_unread_text(tokenizer: Any, prompt: str, rows: int, english: bool = True) -> list[str]:
    """Return a sentence for each reason why a text encoder does not read all of a prompt.

    Characters that the tokenizer does not know, or words that it splits into single letters, if it reads English only: one
    that covers a script splits its words into pieces of several letters. And tokens after `rows`, those that it reads.
    """
    ids = tokenized(tokenizer, prompt, truncation=False, add_special_tokens=False, verbose=False)["input_ids"]
    length = len(ids) + tokenizer.num_special_tokens_to_add()
    with tokenizer_lock:
        pieces = [piece.removeprefix("##").strip("\u2581") for piece in tokenizer.convert_ids_to_tokens(ids)]
        kept = tokenizer.decode(ids[: rows + len(ids) - length]) if length > rows else ""
    lost = sum(
        number == tokenizer.unk_token_id
        or (len(piece) == 1 and piece.isalpha() and piece >= _LATIN_ENDS and not _GREEK[0] <= piece <= _GREEK[1])
        for number, piece in zip(ids, pieces, strict=True)
    )
    reasons = []
    if lost and english:
        count = f"{lost} of the {len(ids)} tokens of the prompt"
        reasons.append(f"the text encoder cannot read {count}: English is what the model reads")
    if length > rows:
        count = f"the prompt has {length} tokens and the model reads {rows}: the last {length - rows} are ignored"
        reasons.append(f"{count}. It was cut after {kept[-60:]!r}")
    return reasons


def clean_caption(text: str) -> str:
    """Apply the DeepFloyd caption cleaner (of diffusers) twice, as in the training of LlamaGen's text models."""
    try:
        import bs4  # noqa: F401
        import ftfy  # noqa: F401
    except ImportError as error:
        raise ImportError("clean_prompt=True needs two packages: pip install ftfy beautifulsoup4") from error
    from diffusers.pipelines.pixart_alpha import PixArtAlphaPipeline

    for _ in range(2):
        text = PixArtAlphaPipeline._clean_caption(PixArtAlphaPipeline, text)
    return text.strip()


@without_autocast
def encode_prompt(
    pipe: VisualPipeline, prompt: str | list[str], clean: bool = False, max_sequence_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Encode prompts to `prompt_embeds` `[B, P, C]` (valid rows last, padding zero) and bool `prompt_mask` `[B, P]`.

    Prompts pass through `normalize_prompt`. What the text encoder does not read of them causes a warning, as do prompts longer
    than P tokens, which are truncated.

    Args:
        prompt: one prompt or several.
        clean: clean the prompts first; see `clean_prompt` of `__call__`.
        max_sequence_length: P. Default: the transformer's maximum; required if the pipeline has no transformer.
    """
    prompts = validation.validate_prompts(prompt)
    if pipe.text_encoder is None or pipe.tokenizer is None:
        raise ValueError("this pipeline was loaded without a text encoder: pass prompt_embeds")
    if pipe.transformer is None and max_sequence_length is None:
        raise ValueError("this pipeline was loaded without a transformer: pass max_sequence_length")
    prompts = [pipe.normalize_prompt(text).text for text in prompts]
    if clean:
        prompts = [clean_caption(text) for text in prompts]
    if max_sequence_length is not None:
        require_int("max_sequence_length", max_sequence_length, 1)
    rows = max_sequence_length or pipe.max_caption_tokens
    english = getattr(pipe.text_encoder.config, "model_type", None) != "umt5"  # which reads other languages, too
    reasons = [each for text in prompts for each in describe_unread_text(pipe.tokenizer, text, rows, english)]
    for reason in dict.fromkeys(reasons):
        logger.warning("%s", reason)
    options = {"padding": "max_length", "truncation": True, "max_length": rows, "return_tensors": "pt"}
    return left_pad(*encode_tokens(pipe, tokenized(pipe.tokenizer, prompts, **options)))


def encode_tokens(pipe: VisualPipeline, encoded: Any) -> tuple[Tensor, Tensor]:
    """Run the text encoder. Returns features `[B, P, C]` and the mask, bool `[B, P]`."""
    device = pipe._device_of(pipe.text_encoder)
    ids, mask = encoded.input_ids.to(device), encoded.attention_mask.to(device)
    embedded = getattr(pipe.text_encoder.config, "vocab_size", None)
    if embedded is not None and int(ids.max()) >= embedded:
        raise ValueError(f"prompt has the token id {int(ids.max())}, and the text encoder embeds {embedded}; use its tokenizer")
    # One prompt at a time for int8, which would amplify that float products of a batch are rounded otherwise.
    is_quantized = pipe.transformer is not None and pipe.transformer.config.get("quantization")
    parts = zip(*(each.split(1 if is_quantized else len(ids)) for each in (ids, mask)), strict=True)
    found = [pipe.text_encoder(input_ids=some, attention_mask=valid) for some, valid in parts]
    return torch.cat([each if isinstance(each, Tensor) else each[0] for each in found]), mask.bool()


def encode_condition(
    pipe: VisualPipeline,
    prompt: Any = None,
    *,
    class_labels: Any = None,
    prompt_embeds: Any = None,
    prompt_mask: Any = None,
    negative_prompt: Any = None,
    negative_prompt_embeds: Any = None,
    negative_prompt_mask: Any = None,
    clean_prompt: bool = False,
) -> tuple[Condition, int]:
    """Return the condition for prompts or classes, with its negative, and their number; arguments as of a pipeline's call.

    All arguments are validated before a prompt is encoded.
    """
    negative = (None if validation.is_blank(negative_prompt) else negative_prompt, negative_prompt_embeds, negative_prompt_mask)
    if pipe.is_class_conditional:
        given = {"prompt": prompt, "prompt_embeds": prompt_embeds, "prompt_mask": prompt_mask}
        given |= dict(zip(("negative_prompt", "negative_prompt_embeds", "negative_prompt_mask"), negative, strict=True))
        named = [name for name, value in given.items() if value is not None]
        if named or class_labels is None:
            use = f"this model is class-conditional: pass class_labels (0 to {pipe.num_classes - 1})"
            raise ValueError(f"{named[0]} is not supported: {use}" if named else use)
        labels = validation.resolve_class_labels(class_labels, pipe.num_classes, pipe.class_names)
        return Condition(class_labels=torch.tensor(labels, device=pipe._device_of(pipe.transformer))), len(labels)
    if class_labels is not None:
        raise ValueError("class_labels is not supported: this model generates from text; pass a prompt")
    has_negative = any(each is not None for each in negative)
    features = _read_features(pipe, "prompt", prompt, prompt_embeds, prompt_mask)
    other = _read_features(pipe, "negative_prompt", *negative) if has_negative else None
    condition = features or Condition(None, *pipe.encode_prompt(prompt, clean_prompt))
    count = len(condition)
    if not has_negative:
        return condition, count
    other = other or Condition(None, *pipe.encode_prompt(negative_prompt, clean_prompt))
    if len(other) not in (1, count):
        raise ValueError(f"negative_prompt must be one, or one for each of {count} prompts; got {len(other)}")
    return replace(condition, negative=other.repeat(count // len(other))), count


def _read_features(pipe: VisualPipeline, name: str, prompt: Any, embeds: Any, mask: Any) -> Condition | None:
    """Validate a prompt, or its features and mask, and return the condition of the latter; errors give the prompt's `name`."""
    if embeds is None:
        if mask is not None:
            raise ValueError(f"{name}_mask belongs to {name}_embeds, and none are given")
        validation.validate_prompts(prompt, name)
        return None
    if not isinstance(embeds, Tensor):
        raise TypeError(f"{name}_embeds must be a tensor, got {type(embeds).__name__}")
    expected = (pipe.max_caption_tokens, pipe.transformer.config.caption_dim)
    if prompt is not None or embeds.dim() != 3 or not len(embeds) or tuple(embeds.shape[1:]) != expected:
        raise ValueError(f"{name}_embeds must be [B, {expected[0]}, {expected[1]}] without {name}, got {list(embeds.shape)}")
    if not embeds.is_floating_point() or not embeds.isfinite().all():
        kind = "NaN or infinite ones" if embeds.is_floating_point() else str(embeds.dtype)
        raise ValueError(f"{name}_embeds must hold finite floating-point numbers, got {kind}")
    wanted, device = list(embeds.shape[:2]), pipe._device_of(pipe.transformer)
    try:
        given = torch.ones(wanted) if mask is None else torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}_mask must be {wanted}, 1 where valid, got {short_repr(mask)}") from error
    if list(given.shape) != wanted:
        raise ValueError(f"{name}_mask must be {wanted}, got {list(given.shape)}")
    if not ((given == 0) | (given == 1)).all():
        raise ValueError(f"{name}_mask must hold 1 where a row is valid and 0 elsewhere, got other values")
    return Condition(None, embeds.to(device), given.bool().to(device))


def scorer_prompts(pipe: VisualPipeline, prompt: Any, condition: Any) -> list[str]:
    """Return the text for the scorer of each row of the condition: normalized prompts, or class names."""
    if pipe.is_class_conditional:
        names, labels = pipe.class_names, condition.class_labels.tolist()
        if any(label not in names for label in labels):
            raise ValueError("scorer needs words, and this model's classes have no names (id2label)")
        return [names[label].split(",")[0] for label in labels]
    if prompt is None:
        raise ValueError("scorer needs words: give a prompt, not prompt_embeds")
    return [pipe.normalize_prompt(text).text for text in validation.validate_prompts(prompt)]


# A model that was trained with names, such as "grinning cat" for "😺", has a table of them in its folder.
PROMPT_NAMES_FILE = "prompt_names.json"
_MAX_BYTES = 2**22  # bytes of a table; one of all emoji has a fiftieth of that
_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))  # skin tones, modifiers of a person or a hand
_MODIFIERS = _TONES | set("\ufe0e\ufe0f\U000e007f")  # and variation selectors, of which some spellings of an emoji have some
_COMBINING = _MODIFIERS | {"\u200d", "\u20e3", *map(chr, range(0xE0020, 0xE0080))}  # meaningless without a base
_EMOJI_STYLE, _KEYCAP = "\ufe0f", "\u20e3"
_FIRST_EMOJI = "\u2190"  # characters below it, such as ©, are ordinary text unless followed by the emoji style selector
_TONE_NAME = " skin tone"


@dataclass(frozen=True)
class NormalizedPrompt:
    """A prompt with names inserted (`text`), and the names by the characters that they replaced (`names`), in order."""

    text: str
    names: dict[str, str]


class PromptNames:
    """A table of names for sequences of characters.

    Args:
        names: names by sequence. The sequences have no variation selectors and skin tones, which are recognized anywhere.
    """

    def __init__(self, names: Mapping[str, str]):
        if not isinstance(names, Mapping):
            raise ValueError(f"prompt_names must map characters to names, got {short_repr(names)}")
        for typed, name in names.items():
            if not (isinstance(typed, str) and isinstance(name, str) and typed and name.strip() and not typed.isascii()):
                raise ValueError(f"prompt_names must map characters beyond ASCII to names, got {short_repr({typed: name})}")
        self.names = dict(names)

    @classmethod
    def load(cls, folder: Path) -> PromptNames | None:
        """Read the table of a model folder; None if it has none."""
        file = folder / PROMPT_NAMES_FILE
        if not file.is_file():
            return None
        try:
            if file.stat().st_size > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES} bytes")
            return cls(json.loads(file.read_text("utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a table of names: {error}") from error

    def save(self, folder: Path) -> None:
        """Write the table to a folder, one entry per line, sorted."""
        lines = (f"{json.dumps(key, ensure_ascii=False)}:{json.dumps(name)}" for key, name in sorted(self.names.items()))
        (folder / PROMPT_NAMES_FILE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The longest of the sequences, with modifiers (group 1), and what is meaningless after it."""
        modifiers = f"[{''.join(_MODIFIERS)}]*"
        found = []
        for typed in sorted(self.names, key=len, reverse=True):
            is_text = typed[0] < _FIRST_EMOJI and _KEYCAP not in typed
            found.append(modifiers.join(map(re.escape, typed)) + modifiers + f"{_EMOJI_STYLE}{modifiers}" * is_text)
        return re.compile(f"({'|'.join(found)})[{''.join(_COMBINING)}]*" if found else "(?!)")

    def apply(self, text: str) -> NormalizedPrompt:
        """Replace sequences in `text` by their names, longest match first."""
        first, *others = self._pattern.split(text)
        typed, rests = others[::2], others[1::2]
        names = {each: self._name(each) for each in typed}
        result = first + " " * (first[-1:].isalnum() and bool(names))
        for number, (each, rest) in enumerate(zip(typed, rests, strict=True), 1):
            is_last = number == len(typed)
            if is_last or rest.strip():
                result += names[each] + " " * rest[:1].isalnum() + rest + " " * (rest[-1:].isalnum() and not is_last)
            else:  # consecutive names are separated by a comma only
                result += names[each] + ", "
        return NormalizedPrompt(result.strip() if names else text, names)

    def _name(self, typed: str) -> str:
        """Return the name of a sequence with modifiers: with "dark skin tone" or "light and dark skin tones", if it has any."""
        base = typed[0] + "".join(char for char in typed[1:] if char not in _MODIFIERS)
        tones = dict.fromkeys(char for char in typed[1:] if char in _TONES and char in self.names)
        named = [self.names[tone].removesuffix(_TONE_NAME) for tone in tones]
        return self.names[base] + (f", {' and '.join(named)}{_TONE_NAME}{'s' * (len(named) > 1)}" if named else "")
