"""Adapter of causal language models of transformers that generate images as tokens.

The network is used unchanged: it gets our cache through transformers' cache interface, an additive 4-D mask, and explicit
position ids. `ImageLanguageModel` describes what differs from model to model; see `image_language_models`.

Shape suffixes: B images, R rows (B, times two with guidance: conditional rows first), P prompt tokens, T fed tokens, A path
slots, H heads, K head width, V tokens of the image vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.compat import ensure_torchvision

ensure_torchvision()

from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache

from vargen.decoding import Output, TokenModel, Tree
from vargen.models.kv_cache import CacheView, KVCache
from vargen.values import short_repr

_FLOOR = -1e9  # logit of tokens that cannot occur: infinite logits are errors, and this survives a division by 1e-5
_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class PromptRows:
    """Tokenized prompts: ids int64 `[R, P]`, padded on the left, and which of them are tokens, bool `[R, P]`."""

    ids: Tensor
    valid: Tensor


class ImageLanguageModel:
    """What `TransformersTokenModel` needs to know about a model; one subclass per class of transformers.

    Args:
        model: an instance of the class.

    Attributes:
        class_name, since: name of the class in transformers, and the version that it came with.
        guidance_scale, temperature, top_k, top_p: defaults of the published model.
        has_pixels: whether it decodes its tokens to images itself.
        body: the language model without its head; takes embeddings and returns hidden states after the final norm.
        vocab: number V of image tokens.
        grid: rows and columns.
        codebook: float `[V, C]`, whose distances say how similar tokens are.
        forced: int64 `[N]`, the token of positions that have only one, which occurs nowhere else; -1 elsewhere. None if no
            position is forced.
    """

    class_name: str
    since: str
    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    has_pixels: bool = True
    body: Any
    vocab: int
    grid: tuple[int, int]
    codebook: Tensor | None = None
    forced: Tensor | None = None

    def __init__(self, model: Any):
        self.model = model

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[R, T, D]` of image tokens `[R, T]`."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[R, T, V]` of image tokens."""
        raise NotImplementedError

    def positions(self, start: Tensor, index: Tensor) -> Tensor:
        """Position ids of image tokens, as `body` takes them: index `[R, T]` in the grid, after `start` `[R]` prompt tokens."""
        return start[:, None] + index

    def prompt_positions(self, positions: Tensor) -> Tensor:
        """Position ids of a prompt, given those of its tokens `[R, P]`, as `body` takes them."""
        return positions

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None, guided: bool) -> PromptRows:
        """Tokenize prompts and, if guided, their unconditional rows."""
        raise NotImplementedError

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        """Images float `[B, 3, height, width]` in [0, 1] of tokens `[B, N]`, if `has_pixels`."""
        raise NotImplementedError


class _PassCache(Cache):
    """Our cache, as the layers of transformers see it during one pass."""

    is_compileable = False

    def __init__(self, cache: KVCache, view: CacheView | None):  # without transformers' own initialization
        self.cache, self.view = cache, view
        self.layers: list[Any] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k_RTHK, v_RTHK = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.view is None:  # the prompt
            self.cache.write_prefix(layer_idx, k_RTHK, v_RTHK)
            return key_states, value_states
        return self.view.write(layer_idx, k_RTHK, v_RTHK)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are explicit

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.cache.slots if self.view is None else self.view.num_slots_read, 0


@dataclass
class TransformersState:
    """Cache of B images, and the number of prompt tokens of each row, `[R]`."""

    cache: KVCache
    start: Tensor


class TransformersTokenModel(TokenModel):
    """`TokenModel` of a causal language model of transformers.

    Args:
        language_model: the model with its description.
        guidance_scale: s of u + s (c - u); 1 runs without unconditional rows.
        draft_model: a smaller model with the same image tokens, for speculative decoding.

    Raises:
        ValueError: if the model has layers or an attention implementation that this cache and mask do not fit; names them.
    """

    def __init__(
        self,
        language_model: ImageLanguageModel,
        guidance_scale: float = 1.0,
        draft_model: TransformersTokenModel | None = None,
    ):
        validate_network(language_model.model)
        self.description, self.guidance_scale, self.draft_model = language_model, guidance_scale, draft_model
        self.vocab, self.grid, self.codebook = language_model.vocab, language_model.grid, language_model.codebook
        self.rows_per_image = 1 if guidance_scale == 1 else 2
        weight = next(language_model.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        config = language_model.body.config.get_text_config()
        heads = config.num_attention_heads
        self._num_layers, self._kv_heads = config.num_hidden_layers, int(getattr(config, "num_key_value_heads", None) or heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        if any(hasattr(module, "_hf_hook") for module in language_model.model.modules()):
            self.capture_blocker = "weights are moved or cast by hooks in each pass"
        forced = language_model.forced
        self._forced = None if forced is None else forced.to(self.device)
        self._forced_tokens = None if forced is None else forced[forced >= 0].unique().to(self.device)
        sizes = hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]
        name = f"{language_model.class_name} {sizes}, {self.dtype}, {self.rows_per_image} rows an image".replace("torch.", "")
        self.cost_key = f"{name}, transformers {transformers_version}"

    def prefill(self, condition: PromptRows, max_width: int) -> tuple[TransformersState, Output]:
        ids, valid = condition.ids.to(self.device), condition.valid.to(self.device)
        R, P = ids.shape
        rows, columns = self.grid
        cache = KVCache(
            self._num_layers,
            R,
            self._kv_heads,
            self._head_dim,
            prefix=P,
            tokens=rows * columns,
            scratch=max_width,
            dtype=self.dtype,
            device=self.device,
        )
        cache.prefix_bias.masked_fill_(~valid, float("-inf"))
        positions = (valid.long().cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(P, P, dtype=torch.bool, device=self.device).tril()
        visible = causal & valid[:, None, :] | torch.eye(P, dtype=torch.bool, device=self.device)  # padding sees itself
        mask = torch.zeros(R, 1, P, P, dtype=self.dtype, device=self.device).masked_fill(~visible[:, None], float("-inf"))
        embeddings = self.description.model.get_input_embeddings()(ids)
        hidden = self._run(embeddings, mask, self.description.prompt_positions(positions), _PassCache(cache, None))[:, -1:]
        first = torch.zeros(R // self.rows_per_image, 1, dtype=torch.int64, device=self.device)
        return TransformersState(cache, valid.sum(1)), Output(self._logits(hidden, first), hidden)

    def forward(self, tokens: Tensor, state: TransformersState, tree: Tree) -> Output:
        cache, T = state.cache, tokens.shape[1]
        depth = self._repeat(tree.depth) if tree.depth.dim() == 2 else tree.depth
        ancestors = None
        if not tree.is_chain:
            ancestors = self._repeat(tree.ancestors) if tree.ancestors.dim() == 3 else tree.ancestors
        view = cache.view_for_pass(T)
        mask = cache.additive_mask(T, ancestors, self.dtype, view.num_slots_read)
        index = cache.length[:, None] + depth
        positions = self.description.positions(state.start, index)
        embeddings = self.description.embed(self._repeat(tokens))
        hidden = self._run(embeddings, mask, positions, _PassCache(cache, view))
        return Output(self._logits(hidden, index[: len(tokens)] + 1), hidden)

    def commit(self, state: TransformersState, path: Tensor, count: Tensor, tree: Tree) -> None:
        if tree.is_chain:
            state.cache.commit_chain(self._repeat(count))
        else:
            state.cache.commit_path(self._repeat(path), self._repeat(count))

    def rollback(self, state: TransformersState, length: Tensor) -> None:
        state.cache.rollback(self._repeat(length))

    def _run(self, embeddings: Tensor, mask: Tensor, positions: Tensor, cache: _PassCache) -> Tensor:
        out = self.description.body(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state

    def _logits(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Guided logits `[B, T, V]` of the tokens at positions `[B, T]` of the grid."""
        logits = self.description.head(hidden).float()
        if self.rows_per_image == 2:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + self.guidance_scale * (conditional - unconditional)
        if self._forced is None:
            return logits
        assert self._forced_tokens is not None
        token = self._forced[position.clamp(max=len(self._forced) - 1)][..., None]
        certain = torch.full_like(logits, _FLOOR).scatter(-1, token.clamp(min=0), 0.0)
        return torch.where(token >= 0, certain, logits.index_fill(-1, self._forced_tokens, _FLOOR))

    def _repeat(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(self.rows_per_image, *[1] * (tensor.dim() - 1))


def validate_network(model: Any) -> None:
    """Raise ValueError if a network of transformers does not fit the cache and the mask of `TransformersTokenModel`."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if attention not in _ATTENTION:
        raise ValueError(
            f"attn_implementation must be {' or '.join(_ATTENTION)}, whose masks may be a tree, got {short_repr(attention)}; "
            "reload the model with attn_implementation='sdpa'"
        )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other or getattr(config, "sliding_window", None):
        raise ValueError(
            f"layers of {type(model).__name__} must attend to all tokens, got {', '.join(other) or 'sliding windows'}"
        )
    if model.training:
        raise ValueError(f"{type(model).__name__} must be in evaluation mode, got training mode: call model.eval()")
