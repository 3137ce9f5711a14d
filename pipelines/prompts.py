"""Prompt encoding as text-conditioned LlamaGen models were trained: cleaned captions, left-padded text features."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from vargen.compat import tokenized, tokenizer_lock, without_autocast
from vargen.models.condition import Condition
from vargen.pipelines import validation as checks
from vargen.pipelines.prompt_names import NormalizedPrompt, PromptNames

logger = logging.getLogger("vargen")


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Turn right padding into left padding.

    Args:
        features: `[B, P, C]`, padded on the right.
        mask: bool `[B, P]`, True where valid.

    Returns:
        Features `[B, P, C]`, zero in the padding and with valid rows last in their original order; and their mask `[B, P]`.
    """
    P = mask.shape[1]
    padding = P - mask.sum(1, keepdim=True)
    index = torch.arange(P, device=mask.device) - padding
    aligned = features.gather(1, index.clamp_min(0)[..., None].expand_as(features))
    valid = index >= 0
    return aligned * valid[..., None].to(features.dtype), valid


def warn_if_truncated(tokenizer: Any, prompts: list[str], rows: int) -> None:
    """Warn for each prompt longer than `rows` tokens, with the number of ignored tokens and the text before the cut."""
    for text in prompts:
        ids = tokenized(tokenizer, text, truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
        if len(ids) > rows:
            with tokenizer_lock:
                kept = tokenizer.decode(ids[:rows], skip_special_tokens=True)
            logger.warning(
                "the prompt has %d tokens and the model reads %d: the last %d are ignored. It was cut after %r",
                len(ids), rows, len(ids) - rows, kept[-60:],
            )  # fmt: skip


_LATIN_ENDS = "\u0250"  # letters below it are Latin, from which an uncased tokenizer strips the accents
_GREEK = "\u0370", "\u03ff"  # single Greek letters occur as symbols in English text


def find_unreadable_words(tokenizer: Any, prompt: str) -> list[str]:
    """Return the words in other scripts that the tokenizer does not know or splits into single letters.

    Each word is listed once, in order. A tokenizer that covers a script splits its words into pieces of several letters.
    """
    found: list[str] = []
    for word in dict.fromkeys(prompt.split()):
        if word.isascii() or (len(word) == 1 and _GREEK[0] <= word <= _GREEK[1]):
            continue
        ids = tokenized(tokenizer, word, add_special_tokens=False, verbose=False)["input_ids"]
        with tokenizer_lock:
            pieces = [piece.removeprefix("##").strip("\u2581") for piece in tokenizer.convert_ids_to_tokens(ids)]
        unknown = [number == tokenizer.unk_token_id for number in ids]
        single = [len(piece) == 1 and piece >= _LATIN_ENDS and piece.isalpha() for piece in pieces]
        lost = sum(map(max, unknown, single))
        if 2 * lost > sum(not_read or any(map(str.isalnum, piece)) for not_read, piece in zip(unknown, pieces, strict=True)):
            found.append(word.strip(_PUNCTUATION) or word)
    return list(dict.fromkeys(found))


_PUNCTUATION = "\"'`.,;:!?()[]{}«»„“”‘’…、。，！？"


def describe_unreadable_words(tokenizer: Any, prompt: str) -> str | None:
    """Return a sentence that lists the `find_unreadable_words`, or None if there are none."""
    words = find_unreadable_words(tokenizer, prompt)
    if not words:
        return None
    named = ", ".join(f'"{word[:40]}"' for word in words[:5]) + (" and more" if len(words) > 5 else "")
    return f"the text encoder cannot read {named}: English is what the model reads"


def clean_caption(text: str) -> str:
    """Apply the DeepFloyd caption cleaner (of diffusers) twice, as in the training of LlamaGen's text models.

    Raises:
        ImportError: if ftfy or beautifulsoup4 is not installed.
    """
    try:
        import bs4  # noqa: F401
        import ftfy  # noqa: F401
    except ImportError as error:
        raise ImportError("clean_prompt=True needs two packages: pip install ftfy beautifulsoup4") from error
    from diffusers.pipelines.pixart_alpha import PixArtAlphaPipeline

    for _ in range(2):
        text = PixArtAlphaPipeline._clean_caption(PixArtAlphaPipeline, text)
    return text.strip()


class Conditioning:
    """Mixin of a pipeline that turns prompts and classes into conditions.

    Attributes:
        prompt_names: names that replace characters in a prompt; None if prompts are used as typed.
    """

    transformer: Any
    text_encoder: Any
    tokenizer: Any
    prompt_names: PromptNames | None
    config: Any
    _execution_device: torch.device

    @property
    def by_class(self) -> bool:
        """Whether the model is conditioned on classes instead of text."""
        return self.transformer.config.condition == "class"

    @property
    def class_names(self) -> dict[int, str]:
        """Comma-separated synonyms by class number; empty if the checkpoint has no class names."""
        return {int(number): names for number, names in (self.config.id2label or {}).items()}

    @property
    @abstractmethod
    def caption_rows(self) -> int:
        """Maximum number of caption tokens that the transformer accepts."""

    def normalize_prompt(self, prompt: str) -> NormalizedPrompt:
        """Replace characters by their names (see `prompt_names`). `names` of the result maps the typed characters to names."""
        return NormalizedPrompt(prompt, {}) if self.prompt_names is None else self.prompt_names.reading(prompt)

    @without_autocast
    def encode_prompt(
        self, prompt: str | list[str], clean: bool = False, max_sequence_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode prompts to `prompt_embeds` `[B, P, C]` (valid rows last, padding zero) and bool `prompt_mask` `[B, P]`.

        Prompts pass through `normalize_prompt`. Prompts longer than P tokens are truncated with a warning that reports how
        many tokens are ignored. Words that the text encoder cannot read cause a warning, too.

        Args:
            prompt: one prompt or several.
            clean: clean the prompts first; see `clean_prompt` of `__call__`.
            max_sequence_length: P. Default: the transformer's maximum; required if the pipeline has no transformer.

        Raises:
            ValueError, TypeError: for invalid prompts, or if the text encoder or P is missing.
        """
        prompts = checks.check_prompts(prompt)
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError("this pipeline was loaded without a text encoder: pass prompt_embeds")
        if self.transformer is None and max_sequence_length is None:
            raise ValueError("this pipeline was loaded without a transformer: pass max_sequence_length, its caption rows")
        prompts = [self.normalize_prompt(text).text for text in prompts]
        for hint in dict.fromkeys(describe_unreadable_words(self.tokenizer, text) for text in prompts):
            if hint:
                logger.warning("%s", hint)
        if clean:
            prompts = [clean_caption(text) for text in prompts]
        rows = self.caption_rows if max_sequence_length is None else checks.check_rows(max_sequence_length)
        warn_if_truncated(self.tokenizer, prompts, rows)
        options = {"padding": "max_length", "truncation": True, "max_length": rows, "return_tensors": "pt"}
        encoded = tokenized(self.tokenizer, prompts, **options)
        mask = encoded.attention_mask.to(self._execution_device)
        features = self.text_encoder(input_ids=encoded.input_ids.to(self._execution_device), attention_mask=mask)
        features = features if isinstance(features, Tensor) else features[0]
        return left_pad(features, mask.bool())

    def condition(
        self,
        prompt: Any = None,
        class_labels: Any = None,
        prompt_embeds: Any = None,
        prompt_mask: Any = None,
        clean: bool = False,
        name: str = "prompt",
    ) -> tuple[Condition, int]:
        """Return the condition for a call's prompts or classes, and their number. Arguments are validated before encoding.

        Args:
            name: name of the argument in error messages.
        """
        if prompt_embeds is not None and not isinstance(prompt_embeds, Tensor):
            raise TypeError(f"{name}_embeds must be a tensor, got {type(prompt_embeds).__name__}")
        if prompt_mask is not None and prompt_embeds is None:
            raise ValueError(f"{name}_mask belongs to {name}_embeds, and none are given")
        classes = self.transformer.config.num_classes
        if self.by_class:
            if name != "prompt" or prompt_embeds is not None:
                raise ValueError(f"this model draws classes: it takes class_labels, no {name}{'_embeds' * (prompt is None)}")
            if class_labels is None or prompt is not None:
                raise ValueError(f"this model draws classes: give class_labels (0 to {classes - 1}), no prompt")
            labels = checks.check_class_labels(class_labels, classes, self.class_names)
            return Condition(class_labels=torch.tensor(labels, device=self._execution_device)), len(labels)
        if class_labels is not None:
            raise ValueError("this model draws from text: give a prompt, not class_labels")
        if prompt_embeds is not None:
            expected = (self.caption_rows, self.transformer.config.caption_dim)
            if prompt is not None or prompt_embeds.dim() != 3 or tuple(prompt_embeds.shape[1:]) != expected:
                raise ValueError(
                    f"{name}_embeds must be [B, {expected[0]}, {expected[1]}] and come without {name}, "
                    f"got {tuple(prompt_embeds.shape)}" + (f" and {name}={prompt!r:.40}" if prompt is not None else "")
                )
            embeds, mask = checks.check_embeds(prompt_embeds, prompt_mask, name)
            embeds, mask = embeds.to(self._execution_device), mask.to(self._execution_device)
            return Condition(caption_embeds=embeds, caption_mask=mask), len(embeds)
        if prompt is None:
            raise ValueError("give a prompt, for example pipe('a red apple')")
        embeds, mask = self.encode_prompt(prompt, clean)
        return Condition(caption_embeds=embeds, caption_mask=mask), len(embeds)

    def scored_texts(self, prompt: Any, condition: Condition) -> list[str]:
        """Return the text for the scorer, one per row of the condition: normalized prompts, or class names.

        Raises:
            ValueError: if neither is available.
        """
        if condition.class_labels is not None:
            names, labels = self.class_names, condition.class_labels.tolist()
            if any(label not in names for label in labels):
                raise ValueError("scorer needs words, and this model's classes have no names (id2label)")
            return [names[label].split(",")[0] for label in labels]
        if prompt is None:
            raise ValueError("scorer needs words: give a prompt, not prompt_embeds")
        return [self.normalize_prompt(text).text for text in checks.check_prompts(prompt)]

    def negative_condition(self, prompt: Any, embeds: Any, mask: Any, clean: bool, count: int, images: int) -> Condition | None:
        """Return the negative condition with one row per image (`images` rows for `count` prompts); None if none is given."""
        if prompt is None and embeds is None and mask is None:
            return None
        negative, given = self.condition(prompt, None, embeds, mask, clean, "negative_prompt")
        if given not in (1, count):
            raise ValueError(f"negative_prompt must be one, or one for each of {count} prompts; got {given}")
        return repeat_condition(negative, images // given)


def repeat_condition(condition: Condition, count: int) -> Condition:
    """Repeat each row `count` times; the rows of prompt 0 come first."""
    parts = (condition.class_labels, condition.caption_embeds, condition.caption_mask)
    return Condition(*(None if part is None else part.repeat_interleave(count, dim=0) for part in parts))
