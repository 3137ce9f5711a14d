"""Language models of transformers with 8-bit integer products on a CPU: Llama-like layers, by compiled passes or by operators.

Each layer has RMS norms, rotary positions of halves, grouped-query attention and SwiGLU, as those of Janus-Pro (Llama), Emu3
and GLM-Image; queries and keys of each head may have RMS norms, as those of Emu3.5. Matrices are quantized one layer after the
other. The bits of a row depend neither on the batch nor on the number of tokens of a pass; see
`vargen.kernels.int8.arithmetic`.

Shape suffixes: R rows, P prompt tokens, T tokens of a pass, D width, F hidden width, H query heads, G key heads, K head width,
L layers, S positions, V image tokens, N outputs and C inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.int8.arithmetic import (
    attend_int8,
    exact_rms_norm,
    exact_swiglu,
    int8_linear,
    quantize_activations,
    quantize_weight_rows,
    rotate_pairs,
)
from vargen.kernels.int8.cores import share_products
from vargen.kernels.int8.format import join_layers, make_buffers, make_team, pack_matrix
from vargen.kernels.int8.load import LANGUAGE_PASS
from vargen.models.int8_cache import Int8Cache
from vargen.models.quantization import as_array
from vargen.models.transformers.base import ImageLanguageModel
from vargen.values import short_repr

MOST_POSITIONS = 16384  # of prompt and image together: the precision of values depends on how many slots may be visible
_PARTS = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
_GATES = ("mlp.gate_up_proj.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_INNER_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_OUTER_NORMS = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")


def validate_int8(quantization: str | None, device: torch.device) -> str | None:
    """Return the format of a language model's 8-bit passes; ValueError for one that there is not, or not on a device."""
    if quantization not in (None, "int8"):
        raise ValueError(f"quantization must be 'int8' or None for an image language model, got {short_repr(quantization)}")
    if quantization is not None and device.type not in ("cpu", "meta"):
        other = "on a GPU, quantization_config of transformers quantizes weights"
        raise ValueError(f"quantization='int8' of an image language model runs on a CPU, got device {str(device)!r}; {other}")
    return quantization


def quantize_layers(described: ImageLanguageModel) -> Int8Network:
    """Quantize the layers of a model, which keeps its own; raises as `validate_layers` and `Int8Network`."""
    validate_int8("int8", described.device)
    validate_layers(described.body)
    layers = described.body.layers
    return Int8Network(described.body, lambda number: layers[number].state_dict(), len(layers))


def validate_layers(body: Any) -> None:
    """Raise ValueError unless the layers of a network have the form that 8-bit passes compute; weights are not read."""
    config, known = body.config.get_text_config(), {*_NORMS, *_OUTER_NORMS, *_INNER_NORMS}
    known |= {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    known |= {f"{part}{each}" for part in _PARTS for each in ("weight", "bias")} | {*_GATES[0], *_GATES[1]}
    for layer in body.layers:
        other = sorted(set(layer.state_dict()) - known)
        other += [f"another forward of a {type(each).__name__}" for each in layer.modules() if "forward" in vars(each)]
        other += ["states that mark image tokens"] * hasattr(body.embed_tokens, "embed_image_tokens")
        if other:
            raise ValueError(f"quantization='int8' runs layers like those of Llama, and {type(body).__name__} has {other[0]}")
    if config.hidden_act != "silu":
        raise ValueError(f"quantization='int8' runs feed-forwards with silu, and {type(body).__name__} has {config.hidden_act}")


class Int8Product:
    """A product with a matrix that is quantized when it is made, and a bias.

    Args:
        weight: `[N, C]`, floating-point.
        bias: `[N]`; None: zeros.
        compiled: module of compiled passes; None: torch operators compute it.

    Raises:
        ValueError: for weights that are not finite.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, compiled: Any):
        values, scale = _quantize(weight)
        self.compiled, self.shape = compiled, tuple(weight.shape)
        self.bias = torch.zeros(len(weight)) if bias is None else bias.detach().float()
        if compiled is None:
            self.values, self.scale = values, scale
        else:
            self.matrix, self.team = pack_matrix(as_array(values), as_array(scale)), make_team(weight.numel())

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 `[..., N]` for float32 `[..., C]`."""
        if self.compiled is None:
            return int8_linear(*quantize_activations(x), self.values, self.scale).add_(self.bias)
        (N, C), rows = self.shape, x.reshape(-1, x.shape[-1]).contiguous()
        M, padded = len(rows), -(-C // 4) * 4
        wide, pairs = np.zeros((M, padded), np.uint8), np.empty((M, padded), np.int16)
        sums, out = np.empty(M * len(self.matrix.start), np.int32), torch.empty(M, N)
        scale = np.empty(M, np.float32)
        inputs = self.matrix, as_array(self.bias), rows.numpy()
        with share_products(self.compiled, self.team):
            self.compiled.run_linear(*inputs, wide, scale, pairs, self.team, sums, out.numpy())
        return out.view(*x.shape[:-1], N)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    if type(weight) not in (Tensor, torch.nn.Parameter) or not weight.is_floating_point() or weight.device.type != "cpu":
        found = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
        raise ValueError(f"quantization='int8' needs floating-point weights in the memory of the CPU, got {found}")
    if not torch.isfinite(weight).all():
        raise ValueError("quantization='int8' needs finite weights, got NaN or infinite ones")
    return quantize_weight_rows(weight)


class Int8Network:
    """The layers of a language model, quantized, and its final norm. Embeddings and the head stay in its modules.

    Args:
        body: the network, whose own layers are not run; see `ImageLanguageModel.body`.
        read: returns the weights of a layer by its number, with their names in the layer.
        count: number of layers.

    Attributes:
        positions: number of positions S that prompt and image have together, at most.

    Raises:
        ValueError: for weights that are not finite, or not floating-point.
    """

    def __init__(self, body: Any, read: Callable[[int], Mapping[str, Tensor]], count: int):
        config = body.config.get_text_config()
        positions = min(int(config.max_position_embeddings), MOST_POSITIONS)
        heads, width = int(config.num_attention_heads), int(config.hidden_size)
        self.heads, self.key_heads = heads, int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_dim = int(getattr(config, "head_dim", None) or width // heads)
        self.width, self.hidden, self.positions = width, int(config.intermediate_size), positions
        self.compiled = LANGUAGE_PASS.load()
        self.rotary, self.axes, self.rotated = rotary_factors(body, positions, self.head_dim)
        self.eps = float(config.rms_norm_eps)
        self.norm = body.norm.weight.detach().float()
        self.layers = [self._make_layer(read(number)) for number in range(count)]
        self._weights: Any = None

    def _make_layer(self, weights: Mapping[str, Tensor]) -> Layer:
        order = _interleave_halves(self.rotated, self.head_dim)
        inner = [weights[name].detach().float()[order] for name in _INNER_NORMS if name in weights]
        parts, biases = [], []
        for part, heads in zip(_PARTS, (self.heads, self.key_heads, self.key_heads), strict=True):
            rows = torch.arange(heads * self.head_dim)
            if part != _PARTS[-1]:  # scores are the same for any order of the numbers of a head
                rows = rows.unflatten(0, (heads, -1))[:, order].flatten()
            parts.append(weights[f"{part}weight"].detach()[rows])
            bias = weights.get(f"{part}bias")
            biases.append(torch.zeros(len(rows)) if bias is None else bias.detach().float()[rows])
        gates = next(names for names in _GATES if names[0] in weights)
        products = [
            Int8Product(matrix, bias, self.compiled)
            for matrix, bias in (
                (torch.cat(parts), torch.cat(biases)),
                (weights["self_attn.o_proj.weight"], None),
                (torch.cat([weights[name].detach() for name in gates]), None),
                (weights["mlp.down_proj.weight"], None),
            )
        ]
        norms, outer = (
            [weights[name].detach().float() for name in names if name in weights] for names in (_NORMS, _OUTER_NORMS)
        )
        return Layer(products, norms, outer, inner)

    def select(self, layers: Sequence[int]) -> Int8Network:
        """Return the network with some of its layers, by number, whose weights it shares."""
        part = copy(self)
        part.layers, part._weights = [self.layers[number] for number in layers], None
        return part

    def allocate(self, rows: int, *, prefix: int, tokens: int, scratch: int) -> Int8PromptCache:
        """Return a cache; arguments as of `Int8Cache`."""
        shape, options = (len(self.layers), rows, self.key_heads, self.head_dim), {"compiled": self.compiled}
        return Int8PromptCache(*shape, prefix=prefix, tokens=tokens, scratch=scratch, most_slots=self.positions, **options)

    def final_norm(self, states: Tensor) -> Tensor:
        """Final norm of residuals `[..., D]`."""
        return exact_rms_norm(states, self.norm, self.eps)

    def run(
        self,
        states: Tensor,
        cache: Int8PromptCache,
        positions: Tensor,
        visible: Tensor | None,
        ancestors: Tensor | None,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        """Run embedded tokens, after the pointers of the rows, which are not moved.

        Args:
            states: float32 `[R, T, D]`.
            positions: `[R, T]`, or `[3, R, T]` for three axes.
            visible: bool `[R, T]`, which tokens are no padding; None: all.
            ancestors: bool `[R or 1, T, T]`, for each token the ones of the pass that it attends to; None: a chain.
            place: slot of the first token after pointers that are 0.

        Returns:
            Residuals float32 `[R, T, D]` before and after the final norm.
        """
        T = states.shape[1]
        places = positions.expand(3, *positions.shape[-2:])[self.axes].clamp(max=self.positions - 1)  # [K/2, R, T]
        rotary = self.rotary[places.permute(1, 2, 0), torch.arange(len(self.axes))]  # [R, T, K/2, 2]
        if self.compiled is None:
            states = self._run_operators(states, cache, rotary, visible, ancestors, place)
            return states, self.final_norm(states)
        reach = torch.arange(1, T + 1) if ancestors is None else torch.full((T,), T)
        reach = reach.expand(cache.rows, T) if visible is None else torch.where(visible, reach, 0)
        tree = np.zeros((cache.rows, 0, 0), np.bool_) if ancestors is None else as_array(ancestors.expand(cache.rows, T, T))
        states, features = states.clone(), torch.empty_like(states)
        weights, buffers = self._packed(), self._buffers(cache, T)
        inputs = states.numpy(), as_array(rotary.flatten(0, 1)), as_array(reach), tree
        with share_products(self.compiled, buffers.team):
            self.compiled.run_language_pass(weights, cache.arrays, buffers, *inputs, place, cache.tokens, features.numpy())
        return states, features

    def _packed(self) -> Any:
        """Return `compiled.LanguageWeights`."""
        if self._weights is None:
            assert self.compiled is not None
            layers = join_layers([[product.matrix for product in layer.products] for layer in self.layers])
            bias = np.zeros((len(self.layers), layers.start.shape[1]), np.float32)
            for row, layer in zip(bias, self.layers, strict=True):
                row[: len(layer.products[0].bias)] = layer.products[0].bias.numpy()
            outer = [as_array(norm) for layer in self.layers for norm in layer.outer]
            inner = [as_array(norm) for layer in self.layers for norm in layer.inner]
            self._weights = self.compiled.LanguageWeights(
                sizes=np.array([self.heads, self.hidden]),
                layers=layers,
                bias=bias,
                norms=np.stack([*(as_array(norm) for layer in self.layers for norm in layer.norms), as_array(self.norm)]),
                outer=np.stack(outer) if outer else np.zeros((0, self.width), np.float32),
                inner=np.stack(inner) if inner else np.zeros((0, self.head_dim), np.float32),
                eps=self.eps,
            )
        return self._weights

    def _buffers(self, cache: Int8PromptCache, T: int) -> Any:
        if cache.buffers is None or cache.buffers.places.shape[2] != max(T, cache.scratch):
            shape, width = (cache.rows, max(T, cache.scratch)), max(self.width, self.heads * self.head_dim)
            cache.buffers = make_buffers(self._packed().layers, None, cache.arrays, shape, self.heads, width, self.hidden)
        return cache.buffers

    def _run_operators(
        self, x: Tensor, cache: Int8PromptCache, rotary: Tensor, visible: Tensor | None, ancestors: Tensor | None, place: int
    ) -> Tensor:
        T = x.shape[1]
        slots = place + cache.length.clamp(max=cache.tokens)[:, None] + torch.arange(T)
        if place == cache.prefix:
            bias = cache.attention_bias(T, ancestors)
        else:  # of a prompt, where padding sees itself
            later = torch.arange(place + T) > slots[..., None]
            bias = cache.prefix_bias[:, None, : place + T].masked_fill(later, float("-inf"))
            own = torch.arange(place + T) == slots[..., None]
            assert visible is not None
            bias = bias.masked_fill(own & ~visible[..., None], 0.0)[:, None]
        for number, layer in enumerate(self.layers):
            project, out, gates, down = layer.products
            qkv = project(exact_rms_norm(x, layer.norms[0], self.eps)).unflatten(-1, (-1, self.head_dim))
            q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], dim=2)
            if layer.inner:
                q, k = (exact_rms_norm(each, norm, self.eps) for each, norm in zip((q, k), layer.inner, strict=True))
            q, k = rotate_pairs(torch.cat([q, k], 2), rotary).split([self.heads, self.key_heads], dim=2)
            cache.write(number, slots, k, v)
            attended = attend_int8(q, *cache.view(number, bias.shape[-1]), bias)
            x = x + self._add_norm(out(attended.flatten(2)), layer, 0)
            gate, up = gates(exact_rms_norm(x, layer.norms[1], self.eps)).chunk(2, dim=-1)
            x = x + self._add_norm(down(exact_swiglu(gate, up)), layer, 1)
        return x

    def _add_norm(self, added: Tensor, layer: Layer, half: int) -> Tensor:
        return exact_rms_norm(added, layer.outer[half], self.eps) if layer.outer else added


class Layer(NamedTuple):
    """A layer."""

    products: list[Int8Product]  # queries, keys and values; output of attention; gate and up; down
    norms: list[Tensor]  # of the inputs of attention and feed-forward
    outer: list[Tensor]  # of their outputs, or none
    inner: list[Tensor]  # of queries and keys, float32 `[K]`, or none


class Int8PromptCache(Int8Cache):
    """A cache that also has the number of prompt tokens of each row, `start`: int64 `[R]`."""

    def __init__(self, *shape: Any, **options: Any):
        super().__init__(*shape, **options)
        self.start = torch.zeros_like(self.length)

    @cached_property
    def conditional(self) -> Self:
        part = self.first_half()
        part.start = self.start[: part.rows]
        return part


def rotary_factors(body: Any, positions: int, head_dim: int) -> tuple[Tensor, Tensor, int]:
    """Return the factors by which positions rotate pairs of a head, and the axis of positions of each pair.

    Returns:
        float32 `[S, K/2, 2]`, cos and sin; int64 `[K/2]`; and how many pairs are rotated, the first ones: others keep their
        numbers.
    """
    module = body.rotary_emb
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
    pairs = cos.shape[-1] // 2
    factors = torch.tensor([1.0, 0.0]).repeat(positions, head_dim // 2, 1)
    factors[:, :pairs] = torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]], -1)
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    if (sections := getattr(module, "mrope_section", None)) is not None:
        axes[:pairs] = torch.cat([torch.full((size,), number % 3) for number, size in enumerate(sections)])
    return factors, axes, pairs


def _interleave_halves(pairs: int, head_dim: int) -> Tensor:
    """Return the order in which the numbers that are rotated together, `pairs` apart in transformers, lie side by side."""
    first = torch.arange(pairs)
    return torch.cat([torch.stack([first, first + pairs], -1).flatten(), torch.arange(2 * pairs, head_dim)])
