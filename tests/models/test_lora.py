"""A LoRA of a video network: merged, it is the network with W + B A, which shares all else; a new one changes nothing."""

from __future__ import annotations

import torch
from rejects import rejects
from tiny_video import SHAPE, randomised, transformer

from vargen.models.causal_video.network import CausalVideoLoRA, CausalVideoTransformer
from vargen.models.quantization import SCALE_SUFFIX, quantize_network, quantized_layers

SIZE = {name: SHAPE[name] for name in ("dim", "ffn_dim", "num_layers")}
LAYERS = {
    *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"), "ffn.0", "ffn.2",
}  # fmt: skip


def dequantized(network: CausalVideoTransformer) -> dict[str, torch.Tensor]:
    """The weights of an int8 network times their scales."""
    state = {name: value for name, value in network.state_dict().items() if not name.endswith(SCALE_SUFFIX)}
    for name, layer in quantized_layers(network).items():
        state[f"{name}.weight"] = layer.weight.float() * layer.weight_scale[:, None]
    return state


def a_lora(rank: int = 3, seed: int = 5, **more) -> CausalVideoLoRA:
    return randomised(CausalVideoLoRA(**{**SIZE, **more}, rank=rank), seed, 0.2)


def velocity(network: CausalVideoTransformer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    latents, embeds = torch.randn(1, 4, 4, 2, 2, generator=generator), torch.randn(1, 3, 8, generator=generator)
    with torch.no_grad():
        return network(latents, torch.full((1,), 500.0), network.text_cache(embeds))


def test_all_matrices_of_the_blocks_have_an_update_and_nothing_else() -> None:
    names = {name for name, _ in a_lora().updates()}
    assert names == {f"blocks.{number}.{layer}" for number in range(2) for layer in LAYERS}


def test_merged_is_the_network_with_the_products_added() -> None:
    network, lora = transformer(0), a_lora()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    merged = lora.merge(network)
    updates = dict(lora.updates())
    for name, value in merged.state_dict().items():
        update = updates.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        expected = before[name] if update is None else before[name] + update.B @ update.A
        torch.testing.assert_close(value, expected)
        assert update is not None or value.data_ptr() == network.state_dict()[name].data_ptr(), "shared"
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert (velocity(merged) - velocity(network)).abs().max() > 1e-3
    assert not merged.training and not any(parameter.requires_grad for parameter in merged.parameters())


def test_a_new_lora_changes_nothing() -> None:
    assert torch.equal(velocity(CausalVideoLoRA(**SIZE, rank=4).merge(transformer(0))), velocity(transformer(0)))


def test_the_dtype_is_the_networks() -> None:
    network = randomised(CausalVideoTransformer(**SHAPE), 0).to(torch.bfloat16)
    merged = a_lora().merge(network)
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(velocity(merged).float(), velocity(a_lora().merge(transformer(0))), rtol=0.1, atol=0.1)


def test_8_bit_products_are_of_the_updated_matrices() -> None:
    network = quantize_network(randomised(CausalVideoTransformer(**SHAPE), 0))
    merged = a_lora().merge(network)
    assert merged.config.quantization == "int8"
    plain = CausalVideoTransformer(**SHAPE)
    plain.load_state_dict(dequantized(network))
    expected, found = a_lora().merge(plain.eval()), dequantized(merged)
    for name, value in expected.state_dict().items():
        assert (found[name] - value).abs().max() <= value.abs().max() / 127
    assert torch.isfinite(velocity(merged)).all() and not torch.equal(velocity(merged), velocity(network))


def test_what_cannot_be_merged_is_refused() -> None:
    with torch.device("meta"):
        offloaded = CausalVideoTransformer(**SHAPE)
    rejects(lambda: a_lora().merge(offloaded), "LoRA")
