"""The frozen target of a drafter, teacher-forced over images that it generated: features, embeddings, logits.

Shape suffixes: B images, R rows (2 B with guidance, conditional first), N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding import Tree
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.pipelines.language_model import LanguageModelPipeline


class Teacher(Protocol):
    """What the training of a drafter needs of its target.

    Attributes:
        network: the target; its weights do not change.
        device, dtype: of the network.
        settings: sizes of the target, from which a drafter takes its own, and which the drafter stores.
    """

    network: Any
    device: torch.device
    dtype: torch.dtype
    settings: Mapping[str, Any]

    def outputs(self, tokens: Tensor, condition: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states `[R, N, D]`, of which row j predicts token j, embeddings of the tokens `[R, N, D]`, and guided
        logits `[B, N, V]` of each token, for tokens `[B, N]`."""

    def head(self, hidden: Tensor, first: int, scale: float) -> Tensor:
        """Return guided logits `[B, T, V]` of the tokens from number `first`, from hidden states `[R, T, D]`."""

    def token_scale(self, embeddings: Tensor) -> Tensor:
        """Return the root mean square of embeddings, of which some are given, `[R, N, D]`."""


class TransformerTeacher:
    """`Teacher` of a LlamaGen's transformer."""

    def __init__(self, network: Any):
        self.network: Any = network.eval().requires_grad_(False)
        self.device, self.dtype = network.device, network.dtype
        self.settings: Mapping[str, Any] = network.config

    def outputs(self, tokens: Tensor, condition: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        rows, guidance = tokens, None if scale == 1 else scale
        if guidance is not None:
            rows, condition = tokens.repeat(2, 1), condition.cat(self.network.null_condition(condition))
        output = self.network(rows, condition, guidance=guidance)
        return output.hidden_states.float(), self.network.tok_embeddings(rows).float(), output.logits

    def head(self, hidden: Tensor, first: int, scale: float) -> Tensor:
        found: Tensor = self.network.head(hidden.to(self.dtype), None if scale == 1 else scale)
        return found

    def token_scale(self, embeddings: Tensor) -> Tensor:
        found: Tensor = self.network.tok_embeddings.weight.float().square().mean().sqrt()
        return found


class LanguageModelTeacher:
    """`Teacher` of an image language model of transformers."""

    def __init__(self, pipe: LanguageModelPipeline):
        self.pipe = pipe
        self.network: Any = pipe.model.eval().requires_grad_(False)
        model, described = pipe.decoding_model(), pipe.language_model
        self.device, self.dtype = model.device, model.dtype
        self.settings: Mapping[str, Any] = (
            described.head_settings | _attention_settings(described) | {"grid_columns": described.grid[1]}
        )
        self._models = {1.0: model}

    def _model(self, scale: float) -> TransformersTokenModel:
        if scale not in self._models:
            self._models[scale] = self.pipe.decoding_model(scale)
        return self._models[scale]

    def outputs(self, tokens: Tensor, condition: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        model, N = self._model(scale), tokens.shape[1]
        state, first = model.start(condition, N)
        parts = [first]
        if N > 1:
            parts.append(model.forward(tokens[:, :-1], state, Tree.make_chain(N - 2, tokens.device)))
        if first.features is None:
            raise ValueError("model must be loaded without offloading: hooks that load weights hide the features of a pass")
        hidden = torch.cat([part.features for part in parts if part.features is not None], 1)
        return hidden.float(), model.embed(tokens).float(), torch.cat([part.logits for part in parts], 1)

    def head(self, hidden: Tensor, first: int, scale: float) -> Tensor:
        model = self._model(scale)
        position = torch.arange(first - 1, first - 1 + hidden.shape[1], device=hidden.device)
        return model.head(hidden, position.expand(len(hidden) // model.rows_per_image, -1))

    def token_scale(self, embeddings: Tensor) -> Tensor:
        return embeddings.square().mean().sqrt()


def _attention_settings(described: Any) -> dict[str, Any]:
    """Settings of the layer of an EAGLE head: the heads of the target, or fewer, so that two rotary axes divide them."""
    text = described.body.config.get_text_config()
    dim, heads = text.hidden_size, text.num_attention_heads
    heads = next(count for count in range(min(heads, dim // 4), 0, -1) if dim % (4 * count) == 0)
    return {"n_head": heads, "multiple_of": 256 if dim > 256 else 32, "ffn_dim_multiplier": None,
            "norm_eps": text.rms_norm_eps, "rope_base": 10000.0}  # fmt: skip


def make_teacher(pipe: Any) -> Teacher:
    """Return the teacher of a pipeline; `weights_digest(teacher.network)` identifies it."""
    return LanguageModelTeacher(pipe) if isinstance(pipe, LanguageModelPipeline) else TransformerTeacher(pipe.transformer)
