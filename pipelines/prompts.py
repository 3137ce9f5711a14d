"""Prompts to conditions: names of emoji, cleaned captions, left-padded text features."""

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
from vargen.folders.json_files import read_object
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


# A letter after Latin ones, from which an uncased tokenizer strips the accents; single Greek letters occur as symbols.
_FOREIGN_LETTER = re.compile(r"(?![\u0370-\u03ff])[^\W\d_\x00-\u024f]")


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
    lost = ids.count(tokenizer.unk_token_id) + sum(bool(_FOREIGN_LETTER.fullmatch(piece)) for piece in pieces)
    reasons = []
    if lost and english:
        count = f"{lost} of the {len(ids)} tokens of the prompt"
        reasons.append(f"the text encoder cannot read {count}: English is what the model reads")
    if length > rows:
        count = f"the prompt has {length} tokens and the model reads {rows}: the rest is ignored"
        reasons.append(f"{count}. It was cut after {kept[-60:]!r}")
    return reasons


def clean_caption(text: str) -> str:
    """Apply diffusers' DeepFloyd caption cleaner twice, as in the training of LlamaGen."""
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

    Prompts pass through `normalize_prompt`. What the text encoder does not read of them causes a warning.

    Args:
        prompt: one prompt or several, truncated to P tokens.
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
    """Return the condition of a call's prompts or classes, with its negative, and their number."""
    negative_prompt = None if validation.is_blank(negative_prompt) else negative_prompt
    given = {"prompt": prompt, "prompt_embeds": prompt_embeds, "prompt_mask": prompt_mask}
    negative = {"prompt": negative_prompt, "prompt_embeds": negative_prompt_embeds, "prompt_mask": negative_prompt_mask}
    has_negative = any(value is not None for value in negative.values())
    if pipe.is_class_conditional:
        named = [name for name, value in given.items() if value is not None]
        named += [f"negative_{name}" for name, value in negative.items() if value is not None]
        if named or class_labels is None:
            use = f"this model is class-conditional: pass class_labels (0 to {pipe.num_classes - 1})"
            raise ValueError(f"{named[0]} is not supported: {use}" if named else use)
        labels = validation.resolve_class_labels(class_labels, pipe.num_classes, pipe.class_names)
        return Condition(class_labels=torch.tensor(labels, device=pipe._device_of(pipe.transformer))), len(labels)
    if class_labels is not None:
        raise ValueError("class_labels is not supported: this model generates from text; pass a prompt")
    features = [_read_features(pipe, "", **given), _read_features(pipe, "negative_", **negative) if has_negative else None]
    condition = features[0] or Condition(None, *pipe.encode_prompt(prompt, clean_prompt))
    count = len(condition)
    if not has_negative:
        return condition, count
    other = features[1] or Condition(None, *pipe.encode_prompt(negative_prompt, clean_prompt))
    if len(other) not in (1, count):
        raise ValueError(f"negative_prompt must be one, or one per prompt, got {len(other)} for {count}")
    return replace(condition, negative=other.repeat(count // len(other))), count


def _read_features(pipe: VisualPipeline, kind: str, prompt: Any, prompt_embeds: Any, prompt_mask: Any) -> Condition | None:
    """Validate a prompt, or its features and mask, of which the condition is returned."""
    name, embeds, device = f"{kind}prompt", prompt_embeds, pipe._device_of(pipe.transformer)
    if embeds is None:
        if prompt_mask is not None:
            raise ValueError(f"{name}_mask belongs to {name}_embeds, and none are given")
        validation.validate_prompts(prompt, name)
        return None
    shape = (pipe.max_caption_tokens, pipe.transformer.config.caption_dim)
    if prompt is not None or not isinstance(embeds, Tensor) or not len(embeds) or embeds.shape[1:] != shape:
        raise ValueError(f"{name}_embeds must be a tensor [B, {shape[0]}, {shape[1]}] without {name}, got {short_repr(embeds)}")
    if not embeds.is_floating_point() or not embeds.isfinite().all():
        raise ValueError(f"{name}_embeds must hold finite floating-point numbers, got others, of {embeds.dtype}")
    try:
        mask = torch.ones(embeds.shape[:2]) if prompt_mask is None else torch.as_tensor(prompt_mask)
        fits = mask.shape == embeds.shape[:2] and bool(((mask == 0) | (mask == 1)).all())
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{name}_mask must be {list(embeds.shape[:2])}, 1 where valid, else 0, got {short_repr(prompt_mask)}")
    return Condition(None, embeds.to(device), mask.bool().to(device))


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
_TONES = "\U0001f3fb-\U0001f3ff"  # skin tones, modifiers of a person or a hand
_MODIFIERS = f"[{_TONES}\ufe0e\ufe0f\U000e007f]*"  # and variation selectors, of which some spellings of an emoji have some
_COMBINING = f"[{_TONES}\ufe0e\ufe0f\u200d\u20e3\U000e0020-\U000e007f]*"  # meaningless without a base
_EMOJI_STYLE, _KEYCAP = "\ufe0f", "\u20e3"
_FIRST_EMOJI = "\u2190"  # characters below it, such as ©, are ordinary text unless followed by the emoji style selector
_TONE_NAME = " skin tone"


@dataclass(frozen=True)
class NormalizedPrompt:
    """A prompt with names inserted, and the names by the characters that they replaced, in order."""

    text: str
    names: dict[str, str]


class PromptNames:
    """A table of names for sequences of characters.

    Args:
        names: names by sequence. The sequences have no variation selectors and skin tones, which are recognized anywhere.
    """

    def __init__(self, names: Mapping[str, str]):
        for typed, name in names.items() if isinstance(names, Mapping) else [(names, "")]:
            if not (isinstance(typed, str) and isinstance(name, str) and typed and name.strip() and not typed.isascii()):
                raise ValueError(f"prompt_names must map characters beyond ASCII to names, got {short_repr({typed: name})}")
        self.names = dict(names)

    @classmethod
    def load(cls, folder: Path) -> PromptNames | None:
        """Read the table of a model folder; None if it has none."""
        file = folder / PROMPT_NAMES_FILE
        return cls(read_object(file)) if file.is_file() else None

    def save(self, folder: Path) -> None:
        """Write the table to a folder, one entry per line, sorted."""
        text = json.dumps(self.names, ensure_ascii=False, indent=0, sort_keys=True, separators=(",", ":"))
        (folder / PROMPT_NAMES_FILE).write_text(text + "\n", encoding="utf-8")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The longest sequence, with modifiers (group 1); the space before another (group 2)."""
        found = []
        for typed in sorted(self.names, key=len, reverse=True):
            is_text = typed[0] < _FIRST_EMOJI and _KEYCAP not in typed
            found.append(_MODIFIERS.join(map(re.escape, typed)) + _MODIFIERS + f"{_EMOJI_STYLE}{_MODIFIERS}" * is_text)
        known = "|".join(found) or "(?!)"
        return re.compile(rf"({known}){_COMBINING}(\s*(?={known}))?")

    def apply(self, text: str) -> NormalizedPrompt:
        """Replace sequences in `text` by their names, longest match first."""
        names: dict[str, str] = {}

        def replace_one(match: re.Match[str]) -> str:
            names[match[1]] = self._name(match[1])
            before, after = text[: match.start()][-1:], text[match.end() :][:1]
            return " " * before.isalnum() + names[match[1]] + (" " * after.isalnum() if match[2] is None else ", ")

        result = self._pattern.sub(replace_one, text)
        return NormalizedPrompt(result.strip() if names else text, names)

    def _name(self, typed: str) -> str:
        """Return the name of a sequence with modifiers, such as "waving hand, dark skin tone"."""
        base = typed[0] + re.sub(_MODIFIERS, "", typed[1:])
        tones = [tone for tone in dict.fromkeys(re.findall(f"[{_TONES}]", typed[1:])) if tone in self.names]
        named = " and ".join(self.names[tone].removesuffix(_TONE_NAME) for tone in tones)
        return self.names[base] + (f", {named}{_TONE_NAME}{'s' * (len(tones) > 1)}" if tones else "")
