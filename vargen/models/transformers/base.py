"""What an image language model of transformers must be for `TransformersTokenModel`, and what differs from model to model.

Shape suffixes: B images, R rows (B, times two with guidance: conditional rows first), P prompt tokens, T fed tokens, N tokens
of the grid, V tokens of the image vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.folders.transformers_networks import NetworkKind
from vargen.kernels.host import is_hooked
from vargen.models.llamagen.blocks import MAX_GRID
from vargen.models.storage import find_device
from vargen.values import parse_int, short_repr
from vargen.weight_files import weights_digest


@dataclass(frozen=True)
class PromptRows:
    """Tokenized prompts of B images.

    Attributes:
        ids, valid: int64 `[B, P]`, padded on the left, and bool `[B, P]`, which of them are tokens.
        unconditional: the prompts of the unconditional rows, of any length; None for a model without them.
        scale: guidance scale of these images in an engine of guided images. None: that of its model.
    """

    ids: Tensor
    valid: Tensor
    unconditional: PromptRows | None = None
    scale: float | None = None

    def __len__(self) -> int:
        """Number of images B."""
        return len(self.ids)

    def select_rows(self, rows: Any) -> PromptRows:
        """Return the prompts of some images, given by a slice or their indices."""
        blank = self.unconditional
        return PromptRows(self.ids[rows], self.valid[rows], blank and blank.select_rows(rows), self.scale)

    def repeat(self, count: int) -> PromptRows:
        """Repeat each prompt `count` times."""
        return self.select_rows(torch.arange(len(self), device=self.ids.device).repeat_interleave(count))

    def join(self, pad: int = 0) -> PromptRows:
        """Return conditional and unconditional rows as one table `[2 B, P]`; those without unconditional rows unchanged.

        P is the width of the wider one, also for some rows of longer prompts, which then fit beside the others.
        """
        if self.unconditional is None:
            return self
        rows = [row[valid] for each in (self, self.unconditional) for row, valid in zip(each.ids, each.valid, strict=True)]
        return pad_prompts(rows, pad, max(self.ids.shape[1], self.unconditional.ids.shape[1]))


def pad_prompts(rows: Sequence[Sequence[int] | Tensor], pad: int, width: int = 0) -> PromptRows:
    """Return rows of different lengths as one table of at least `width` columns, padded on the left with `pad`."""
    P = max(width, *(len(row) for row in rows))
    ids, valid = torch.full((len(rows), P), pad), torch.zeros(len(rows), P, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, P - len(row) :], valid[number, P - len(row) :] = torch.as_tensor(row), True
    return PromptRows(ids, valid)


def validate_size(size: Any) -> tuple[int, int]:
    """Return the rows and columns of an image; ValueError unless they are two positive whole numbers."""
    numbers = [parse_int(each, 1) for each in size] if isinstance(size, tuple | list) else []
    if len(numbers) != 2 or None in numbers:
        raise ValueError(f"size must be rows and columns of the image in tokens, such as (32, 32), got {short_repr(size)}")
    return numbers[0], numbers[1]  # type: ignore[return-value]


def force_row_ends(grid: tuple[int, int], token: int) -> Tensor:
    """Return `forced` of `ImageLanguageModel` for a grid whose rows all end with one token."""
    forced = torch.full(grid, -1)
    forced[:, -1] = token
    return forced.flatten()


class ImageLanguageModel:
    """What `TransformersTokenModel` needs to know about a model; one subclass per class of transformers.

    Attributes:
        class_name, since: name of the class in transformers, and the first version that vargen runs it with.
        stored: what a folder with the model holds.
        processor_name, tokenizer_names, image_processor_name: classes of its processor and parts; the usual tokenizer first.
        special_tokens: names of the special tokens that its prompts need.
        uses_template: whether prompts pass through the chat template of the processor.
        guidance_scale, temperature, top_k, top_p, min_p: defaults of the published model.
        guided: whether it has unconditional rows.
        has_pixels: whether it decodes its tokens to images itself.
        has_generate: whether `generate` of its class samples image tokens.
        options: names of further arguments of the constructor.
        vision_tokenizer: a `VQGANDecoder` that makes images of its tokens, which its class does not decode; None: none.
        body: the language model without its head; takes embeddings and returns hidden states after its last module, `norm`.
        vocab, grid: number V of image tokens; rows and columns.
        ids: int64 `[V]`, the image tokens in the vocabulary of text; None if they are the first of it.
        codebook: float `[V, C]`, whose distances say how similar tokens are.
        forced: int64 `[N]`, the token of positions that have only one, which occurs nowhere else; -1 elsewhere.
        low_res: a `LowResModel`, if the tokens include those of a smaller image.
        most_positions: number of positions that its passes have; None: those of its context.
    """

    class_name: str
    since: str
    processor_name: str
    stored: NetworkKind
    tokenizer_names: tuple[str, ...]
    image_processor_name: str
    uses_template: bool = False
    special_tokens: tuple[str, ...] = ("pad_token",)
    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    guided: bool = True
    has_pixels: bool = True
    has_generate: bool = True
    options: tuple[str, ...] = ()
    body: Any
    vocab: int
    grid: tuple[int, int]
    ids: Tensor | None = None
    codebook: Tensor | None = None
    forced: Tensor | None = None
    vision_tokenizer: Any = None
    low_res: Any = None
    most_positions: int | None = None
    _head: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Any):
        self.model = model
        self.device = find_device(model.get_input_embeddings())

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[R, T, D]` of image tokens `[R, T]`."""
        return self.model.get_input_embeddings()(tokens if self.ids is None else self.ids[tokens])

    def embed_with_prompts(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings of prompts, ids `[R, P]`, and of image tokens `[R, T]` behind them, for one pass over all."""
        return torch.cat([self.model.get_input_embeddings()(prompts), self.embed(tokens)], 1)

    @property
    def head_rows(self) -> Tensor | slice:
        """Which outputs of the model's head are the image tokens."""
        return slice(self.vocab) if self.ids is None else self.ids

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[R, T, V]` of image tokens, whose weights are all that is read of the model's head."""
        if self._head is None:
            with torch.inference_mode(False):  # it may be used elsewhere later
                self._head = make_sliced_head(self.model.get_output_embeddings(), self.head_rows)
        return self._head(hidden)

    def head_layers(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights `[N, C]` and biases `[N]` of the layers of `head`, with a GELU between two."""
        layer, ids = self.model.get_output_embeddings(), self.head_rows
        bias = getattr(layer, "bias", None)
        return [(layer.weight.detach()[ids], None if bias is None else bias.detach()[ids])]

    def positions(self, start: Tensor, index: Tensor) -> Tensor:
        """Position ids of image tokens, as `body` takes them: index `[R, T]` in the grid, after `start` `[R]` prompt tokens."""
        return start[:, None] + index

    def prompt_positions(self, positions: Tensor) -> Tensor:
        """Position ids of a prompt, given those of its tokens `[R, P]`, as `body` takes them."""
        return positions

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        """Tokenize prompts, and negative prompts."""
        raise NotImplementedError

    def decode_by(self, vision_tokenizer: Any, codes: int) -> None:
        """Let a `VQGANDecoder`, which must have this number of codes, make images of the tokens; None: they are returned."""
        if vision_tokenizer is None:
            return
        found = vision_tokenizer.codebook
        if len(found) != codes:
            raise ValueError(f"vision_tokenizer must have the {codes} codes of the model's image tokens, got {len(found)}")
        self.vision_tokenizer, self.has_pixels, self.codebook = vision_tokenizer, True, found.float()

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        """Images float `[B, 3, height, width]` in [0, 1] of tokens `[B, N]`, if `has_pixels`."""
        pixels = self.vision_tokenizer.decode(self.image_codes(tokens))
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    def image_codes(self, tokens: Tensor) -> Tensor:
        """The codes `[B, rows, columns]` of an image among its tokens `[B, N]`."""
        return tokens.unflatten(1, self.grid)

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Guidance scale, temperature and filters of the published model; a top-k beyond the vocabulary keeps all."""
        values = {name: getattr(self, name) for name in ("guidance_scale", "temperature", "top_k", "top_p", "min_p")}
        if self.top_k is not None and self.top_k > self.vocab:
            values["top_k"] = None
        return values

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens, so that the image fits the context."""
        (rows, columns), limit = self.grid, self.body.config.get_text_config().max_position_embeddings
        limit = min(limit, self.most_positions or limit)
        if rows * columns >= limit:
            raise ValueError(f"size must fit the context of {limit} tokens, got {rows} x {columns} tokens")
        return int(limit - rows * columns)

    def validate_lengths(self, rows: PromptRows) -> None:
        """Raise ValueError for a prompt or negative prompt that does not fit the context beside the image."""
        limit = self.max_prompt_tokens
        for name, each in (("prompt", rows), ("negative_prompt", rows.unconditional)):
            if each is not None and (found := each.ids.shape[1]) > limit:
                raise ValueError(f"{name} must be at most {limit} tokens, so that the image fits the context, got {found}")

    @property
    def head_settings(self) -> dict[str, Any]:
        """Settings of draft heads for this model, by which those of another model are refused; None for an unknown one.

        A head sees the grid as a square: with the model's columns where it fits, so that it knows rows and columns.
        """
        (rows, columns), text = self.grid, self.body.config.get_text_config()
        side = columns if rows <= columns <= MAX_GRID else math.isqrt(rows * columns - 1) + 1
        digest = None if self.model.device.type == "meta" else self.head_digest  # of the weights
        return {"dim": text.hidden_size, "vocab_size": self.vocab, "grid_size": side, "target": digest}

    @property
    def head_digest(self) -> str:
        """Digest of the weights of the image head, which identifies the model."""
        return weights_digest(self.model.get_output_embeddings())

    def mask_generated(self, length: Tensor, pixels: tuple[int, int]) -> Tensor:
        """Return which pixels, bool `[B, 1, height, width]`, show the first `length` `[B]` tokens of the grid."""
        generated = torch.arange(self.grid[0] * self.grid[1], device=length.device) < length[:, None]
        cells = generated.view(-1, 1, *self.grid).float()
        if self.forced is not None:
            cells = cells[..., self.forced.view(self.grid)[0] < 0]  # columns that are part of the image
        return torch.nn.functional.interpolate(cells, size=pixels) > 0

    def validate_draft(self, draft: ImageLanguageModel) -> None:
        """Raise ValueError unless a smaller model has the same image tokens."""
        for name in ("class_name", "vocab", "grid"):
            own, other = getattr(self, name), getattr(draft, name)
            if own != other:
                raise ValueError(f"draft_model must have the {name} of the model, {own}, got {other}")

    def validate_processor(self, processor: Any) -> None:
        """Raise TypeError for the processor of another model, ValueError for one whose tokens the model does not embed."""
        found = type(processor).__name__
        if found != self.processor_name:
            raise TypeError(f"processor must be a {self.processor_name}, that of a {self.class_name}, got {short_repr(found)}")
        missing = [name for name in self.special_tokens if getattr(processor.tokenizer, name, None) is None]
        if missing:
            raise ValueError(f"processor must have a {missing[0]}, got a tokenizer without one")
        embedded, known = self.model.get_input_embeddings().num_embeddings, len(processor.tokenizer)
        if known > embedded:
            raise ValueError(f"processor must be that of the model, which embeds {embedded} tokens, got one of {known} tokens")


def tokenize(processor: Any, prompts: Sequence[str], **options: Any) -> list[Any]:
    """Return the ids of each prompt, which is processed alone."""
    return [processor(text=[each], **options)["input_ids"][0] for each in prompts]


def make_sliced_head(module: Any, ids: Tensor | slice) -> Callable[[Tensor], Tensor]:
    """Return an output layer for some of the tokens of `module`, whose other weights are then not read.

    A layer that is quantized, adapted, hooked or replaced in part is run whole, and its logits are sliced.
    """
    changed = type(module) is not torch.nn.Linear or "forward" in vars(module) or is_hooked(module)
    if changed or module._forward_hooks or module._forward_pre_hooks or type(module.weight) is not torch.nn.Parameter:
        return lambda hidden: module(hidden)[..., ids]
    weight = module.weight.detach()
    if type(weight) is not Tensor or not weight.is_floating_point():  # of torchao
        return lambda hidden: module(hidden)[..., ids]
    part, bias = weight[ids], None if module.bias is None else module.bias.detach()[ids]
    return lambda hidden: torch.nn.functional.linear(hidden, part, bias)


def validate_network(described: ImageLanguageModel) -> None:
    """Raise ValueError if a network of transformers does not fit the cache and the mask of `TransformersTokenModel`."""
    model = described.model
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation must be sdpa or eager, whose masks may be a tree, got {short_repr(attention)}; "
            "reload the model with attn_implementation='sdpa'"
        )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other or getattr(config, "sliding_window", None):
        found = ", ".join(other) or "sliding windows"
        raise ValueError(f"layers of {type(model).__name__} must attend to all tokens, got {found}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if (kind := rope.get("rope_type", rope.get("type"))) in ("dynamic", "longrope"):
        raise ValueError(f"rotary positions of {type(model).__name__} must not depend on the length, got {kind}")
    if model.training:
        raise ValueError(f"{type(model).__name__} must be in evaluation mode, got training mode: call model.eval()")
    devices = {str(described.device): None, **{str(find_device(layer)): None for layer in described.body.layers}}
    if len(devices) > 1:
        raise ValueError(
            f"layers of {type(model).__name__} must run on one device, got {', '.join(devices)}; load it with a device_map of "
            "one device, or of one device and 'cpu' or 'disk', from where weights are then loaded in each pass"
        )
