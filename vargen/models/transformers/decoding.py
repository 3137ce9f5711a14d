"""Causal language models of transformers that generate images, as the token loop sees them.

The network is used unchanged: it gets our cache through transformers' cache interface, an additive 4-D mask, and explicit
position ids. `ImageLanguageModel` describes what differs from model to model; see `vargen.models.transformers`.

Shape suffixes: B images, R rows (B, times two with guidance: conditional rows first), P prompt tokens, T fed tokens, A path
slots, H heads, K head width, D feature width, V tokens of the image vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache

from vargen.decoding import Output, Tree
from vargen.kernels.host import captures_passes
from vargen.models.guidance import Guidance, GuidedTokenModel, apply_guidance, to_guidance, validate_skipped
from vargen.models.kv_cache import CacheView, KVCache
from vargen.models.transformers.base import ImageLanguageModel, PromptRows, validate_network

_ROOM = 64  # prompts have room for a multiple of it where passes are captured, so that longer ones capture nothing again
_FLOOR = -1e9  # logit of tokens that cannot occur: infinite logits are errors, and this survives a division by 1e-5


class _PassCache(Cache):
    """Our cache, as the layers of transformers see it during one pass. There is no `view` while the prompt is processed.

    `places` are those of the layers in the cache, by their number in the network.
    """

    is_compileable = False

    def __init__(self, cache: KVCache, places: Mapping[int, int], view: CacheView | None):  # without its own initialization
        self.cache, self.places, self.view = cache, places, view
        self.layers: list[Any] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k_RTHK, v_RTHK = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.view is None:
            self.cache.write_prefix(self.places[layer_idx], k_RTHK, v_RTHK)
            return key_states, value_states
        return self.view.layers[self.places[layer_idx]].write(torch.cat([k_RTHK, v_RTHK], dim=2))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are explicit

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.cache.slots if self.view is None else self.view.num_slots_read, 0


class PromptCache(KVCache):
    """A cache that also has the number of prompt tokens of each row, `start`: int64 `[R]`."""

    _by_row = (*KVCache._by_row, "start")

    def __init__(self, *sizes: Any, **options: Any):
        super().__init__(*sizes, **options)
        self.start = torch.zeros_like(self.length)


class TransformersTokenModel(GuidedTokenModel):
    """`TokenModel` of a causal language model of transformers.

    Args:
        guidance: classifier-free guidance, or its scale s of u + s (c - u); 1 runs without unconditional rows.
        draft_heads: by name, functions that make a draft head for this model, from networks trained on its features.
        skipped: layers to leave out, by number.
    """

    def __init__(
        self,
        language_model: ImageLanguageModel,
        guidance: Guidance | float = 1.0,
        draft_model: TransformersTokenModel | None = None,
        *,
        draft_heads: Mapping[str, Callable[[TransformersTokenModel], Any]] | None = None,
        skipped: Sequence[int] = (),
    ):
        validate_network(language_model)
        self.description, self.guidance, self.draft_model = language_model, to_guidance(guidance), draft_model
        if self.guidance.scale != 1 and not language_model.guided:
            raise ValueError(f"guidance_scale must be 1: {language_model.class_name} has no unconditional prompt")
        self.vocab, self.grid = language_model.vocab, language_model.grid
        self.codebook, self.low_res = language_model.codebook, language_model.low_res
        self.rows_per_image = self.guidance.rows_per_image
        self._scale: float | Tensor = self.guidance.scale  # of a bound model: float32 [slots, 1, 1]
        self.device = language_model.device
        self.dtype = language_model.model.get_input_embeddings().weight.dtype
        body = getattr(language_model.body, "_orig_mod", language_model.body)  # of torch.compile
        config = body.config.get_text_config()
        heads = config.num_attention_heads
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.networks = (language_model.model,)
        self._hooked = any(hasattr(module, "_hf_hook") for module in language_model.model.modules())
        kept = [layer for layer in range(len(body.layers)) if layer not in skipped]
        self._places = {layer: place for place, layer in enumerate(kept)}
        self.num_layers = len(kept)
        if self._hooked:  # a view would be run by the hooks of the network it is a view of
            self._body, self._norm = body, None
        else:
            self._norm, self._body = body.norm, copy(body)
            layers = torch.nn.ModuleList(body.layers[layer] for layer in kept)
            self._body._modules = {**body._modules, "layers": layers, "norm": torch.nn.Identity()}
        self._image_head: Callable[[Tensor], Tensor] = language_model.head
        forced = language_model.forced
        self.forced = None if forced is None else forced.to(self.device)
        self._forced_tokens = None if forced is None else forced[forced >= 0].unique().to(self.device)
        sizes = hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]
        name = f"{language_model.class_name} {sizes}, {self.dtype}, {self.rows_per_image} rows an image".replace("torch.", "")
        layers_used = f"{len(kept)} layers, " if skipped else ""
        self.cost_key = f"{name}, {layers_used}transformers {transformers_version}"
        self.make_heads(draft_heads if self._norm else None)

    @property
    def has_features(self) -> bool:
        """Whether passes return features, which draft heads take; hooks that load weights hide them."""
        return self._norm is not None

    def has_room(self, condition: PromptRows, state: PromptCache) -> bool:
        return self._join(condition).ids.shape[1] <= state.prefix

    def skip_layers(self, layers: Sequence[int]) -> TransformersTokenModel:
        """Return the same model without some of its layers, which share the weights."""
        if self._hooked:
            raise ValueError("layers cannot be skipped while hooks load or cast the weights of the model in each pass")
        validate_skipped(layers, len(self.description.body.layers))
        return TransformersTokenModel(self.description, self.guidance, skipped=layers)

    def allocate(self, condition: PromptRows, width: int, slots: int | None = None) -> PromptCache:
        joined, (rows, columns) = self._join(condition), self.grid
        R = len(joined.ids) if slots is None else slots * self.rows_per_image
        multiple = _ROOM if captures_passes(self.device) else 1
        prefix = -(-joined.ids.shape[1] // multiple) * multiple
        place: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        shape = len(self._places), R, self._kv_heads, self._head_dim
        return PromptCache(*shape, prefix=prefix, tokens=rows * columns, scratch=width, **place)

    def _join(self, condition: PromptRows) -> PromptRows:
        return condition.join() if self.rows_per_image == 2 else condition

    def prefill(self, condition: PromptRows, state: PromptCache, rows: Tensor | None = None) -> Output:
        joined = self._join(condition)
        ids, valid = joined.ids.to(self.device), joined.valid.to(self.device)
        R, P = ids.shape
        if state.prefix < P:
            raise ValueError(f"condition must have at most {state.prefix} rows, for which there is room, got {P}")
        cache = state.prefix_only(R, P)
        cache.set_prefix_bias(torch.zeros_like(cache.prefix_bias).masked_fill_(~valid, float("-inf")))
        positions = (valid.long().cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(P, P, dtype=torch.bool, device=self.device).tril()
        visible = causal & valid[:, None] | torch.eye(P, dtype=torch.bool, device=self.device)  # padding sees itself
        mask = torch.zeros(R, 1, P, P, dtype=self.dtype, device=self.device).masked_fill(~visible[:, None], float("-inf"))
        embeddings = self.description.model.get_input_embeddings()(ids)
        positions = self.description.prompt_positions(positions)
        hidden = self._run(embeddings, mask, positions, _PassCache(cache, self._places, None))[:, -1:]
        started = self.guidance.rows_of(rows, state.rows, self.device)
        state.start_rows(cache, started)
        state.start.index_copy_(0, started, valid.sum(1))
        first = torch.zeros(R // self.rows_per_image, 1, dtype=torch.int64, device=self.device)
        scale = self._scale
        if isinstance(scale, Tensor):
            scale = self.guidance.start_scales(scale, rows, condition.scale)
        return self._output(hidden, first, scale)

    def run_pass(self, tokens: Tensor, state: PromptCache, tree: Tree) -> Output:
        T = tokens.shape[1]
        ancestors = None if tree.is_chain else self.repeat_rows(tree.ancestors, 2)
        view = state.view_for_pass(T)
        mask = state.additive_mask(T, ancestors, view.num_slots_read)
        index = state.length[:, None] + self.repeat_rows(tree.depth, 1)
        positions = self.description.positions(state.start, index)
        hidden = self._run(self.embed(tokens), mask, positions, _PassCache(state, self._places, view))
        return self._output(hidden, index[: len(tokens)] + 1, self._scale)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.description.embed(self.guidance.repeat(tokens))

    def head(self, hidden: Tensor, position: Tensor) -> Tensor:
        assert self._norm is not None
        return self._logits(self._norm(hidden.to(self.dtype)), position + 1, self._scale)

    def _run(self, embeddings: Tensor, mask: Tensor, positions: Tensor, cache: _PassCache) -> Tensor:
        given = {"inputs_embeds": embeddings, "attention_mask": mask, "position_ids": positions}
        return self._body(**given, past_key_values=cache, use_cache=True).last_hidden_state

    def _output(self, hidden: Tensor, position: Tensor, scale: float | Tensor) -> Output:
        """Output of a pass from its last states, which are those before the final norm unless hooks run the network."""
        if self._norm is None:
            return Output(self._logits(hidden, position, scale))
        return Output(self._logits(self._norm(hidden), position, scale), hidden)

    def _logits(self, hidden: Tensor, position: Tensor, scale: float | Tensor) -> Tensor:
        """Guided logits `[B, T, V]` of the tokens at positions `[B, T]` of the grid."""
        logits = self._image_head(hidden).float()
        if self.rows_per_image == 2:
            conditional, unconditional = logits.chunk(2)
            logits = apply_guidance(conditional, unconditional, scale)
            if self.guidance.interval is not None:  # position 1 is decoding step 0
                logits = torch.where((position <= self.guidance.interval + 1)[..., None], logits, conditional)
        if self.forced is None:
            return logits
        assert self._forced_tokens is not None
        token = self.forced[position.clamp(max=len(self.forced) - 1)][..., None]
        certain = torch.full_like(logits, _FLOOR).scatter(-1, token.clamp(min=0), 0.0)
        return torch.where(token >= 0, certain, logits.index_fill(-1, self._forced_tokens, _FLOOR))
