"""The causal video transformer: blocks through a cache are the whole video under its mask, whatever is refused on the way."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file
from tiny_video import SHAPE as TINY_SHAPE
from tiny_video import randomised, transformer

from vargen.convert.wan import to_original_names
from vargen.models.causal_video.blocks import apply_rotary, build_rotary_3d, split_rotary_dims
from vargen.models.causal_video.cache import VideoCache, visible_frames
from vargen.models.causal_video.network import CausalVideoLoRA, CausalVideoTransformer
from vargen.models.quantization import SCALE_SUFFIX, quantize_network, quantized_layers

from diffusers import WanTransformer3DModel  # isort: skip  (after the torchvision guard)


SHAPE = {
    "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "channels": 3, "height": 4, "width": 6, "patch": 2,
    "block_frames": 2, "text_dim": 8, "text_len": None, "text_mask": True, "freq_dim": 16,
}  # fmt: skip


def a_model(seed: int = 0, **changes) -> CausalVideoTransformer:
    torch.manual_seed(seed)
    model = CausalVideoTransformer(**{**SHAPE, **changes}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> CausalVideoTransformer:
    return a_model()


def latents(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, frames, 3, 4, 6, generator=torch.Generator().manual_seed(seed)).double()


def a_text(model: CausalVideoTransformer, seed: int = 0):
    embeds = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)).double()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    return model.text_cache(embeds * mask[..., None], mask)


ZERO = torch.zeros(2)


def prefill(model, z, cache, text, steps=None):
    """Clean passes, block by block; their outputs."""
    out = []
    for i, part in enumerate(z.split(2, 1)):
        cache.begin_block(part.shape[1])
        t = ZERO if steps is None else steps[:, 2 * i : 2 * i + part.shape[1]]
        out.append(model(part, t, text, cache))
        cache.commit()
    return torch.cat(out, 1)


def same(a: VideoCache, b: VideoCache) -> bool:
    return a.frames == b.frames and torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


# -- the cache and the mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (6, 2), (5, 1), (7, 3), (4, 2), (3, 1)])
def test_blocks_through_a_cache_are_the_whole_video_under_its_mask(model, window, sinks):
    z, text = latents(14), a_text(model)
    steps = torch.rand(2, 14, generator=torch.Generator().manual_seed(1)).double() * 1000
    cache = model.new_cache(2, 14, window=window, sinks=sinks)
    found = prefill(model, z, cache, text, steps)
    expected = model(z, steps, text, window=window, sinks=sinks)
    assert torch.allclose(found, expected, atol=1e-9)
    assert cache.slots == (window or 14) and cache.frames == 14


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (5, 1), (4, 2)])
@pytest.mark.parametrize("verdicts", ["aaaaaa", "rrrrrr", "araara", "rraarr"])
def test_any_string_of_refusals_leaves_the_cache_of_a_fresh_prefill(model, window, sinks, verdicts):
    """Noisy passes, refused drafts and repeated clean passes: keys and values are those of the clean passes."""
    z, text = latents(12), a_text(model)
    cache = model.new_cache(2, 14, window=window, sinks=sinks)
    for n, verdict in enumerate(verdicts):
        draft = latents(2, seed=100 + n)
        cache.begin_block()
        for step in (1000.0, 700.0):
            model(draft, torch.full((2,), step), text, cache)
        if verdict == "r":
            cache.begin_block()
            model(draft * 2, torch.full((2,), 300.0), text, cache)
        for _ in range(2):
            model(z[:, 2 * n : 2 * n + 2], ZERO, text, cache)
        cache.commit()
    fresh = model.new_cache(2, 14, window=window, sinks=sinks)
    prefill(model, z, fresh, text)
    assert same(cache, fresh)


def test_several_blocks_pass_together_as_one_by_one(model):
    """What is clean must not see the noisy block that shares its pass."""
    z, text = latents(8), a_text(model)
    one, both = model.new_cache(2, 8), model.new_cache(2, 8)
    expected = prefill(model, z[:, :6], one, text)
    one.begin_block()
    noisy = model(z[:, 6:], torch.full((2,), 900.0), text, one)
    prefill(model, z[:, :2], both, text)
    both.begin_block(6)
    steps = torch.zeros(2, 6)
    steps[:, 4:] = 900
    found = model(z[:, 2:], steps, text, both)
    both.commit(4)
    assert torch.allclose(found, torch.cat([expected[:, 2:], noisy], 1), atol=1e-9)
    assert both.frames == 6 and both.pending == 2 and torch.allclose(both.keys, one.keys, atol=1e-9)


def test_context_is_what_the_cache_would_hold(model):
    """Training sees clean blocks before a noisy one, and of its own block only the noisy frames."""
    z, noisy, text = latents(6), latents(6, seed=5), a_text(model)
    steps = torch.rand(2, 6, generator=torch.Generator().manual_seed(1)) * 1000
    found = model(noisy, steps, text, context=z)
    for n in range(3):
        cache = model.new_cache(2, 6)
        if n:
            prefill(model, z[:, : 2 * n], cache, text)
        cache.begin_block()
        part = slice(2 * n, 2 * n + 2)
        assert torch.allclose(found[:, part], model(noisy[:, part], steps[:, part], text, cache), atol=1e-9)


def test_a_short_first_block_and_a_block_that_is_replaced(model):
    z, text = latents(7), a_text(model)
    cache, kept = model.new_cache(2, 8), model.new_cache(2, 8)
    for each in (cache, kept):
        for count, part in ((1, z[:, :1]), (2, z[:, 1:3])):
            each.begin_block(count)
            model(part, ZERO, text, each)
            each.commit()
    cache.begin_block(2)
    model(z[:, 3:5], ZERO, text, cache)
    for each in (cache, kept):
        each.begin_block()
    new = z[:, 5:]
    assert torch.equal(model(new, ZERO, text, cache), model(new, ZERO, text, kept))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"window": 3, "sinks": 2}, "window"), ({"sinks": 1}, "sinks"),
     ({"window": -1}, "window"), ({"window": 4.0}, "window"), ({"frames": 0}, "frames")],
)  # fmt: skip
def test_caches_that_cannot_be_are_refused(model, arguments, message):
    rejects(lambda: model.new_cache(1, **arguments), message)


def test_a_cache_says_what_it_cannot_do(model):
    cache, text = model.new_cache(2, 4), a_text(model)
    with pytest.raises(ValueError, match="0 frames were begun"):
        model(latents(2), ZERO, text, cache)
    cache.begin_block()
    with pytest.raises(ValueError, match="2 frames were begun"):
        model(latents(3), ZERO, text, cache)
    rejects(lambda: cache.commit(3), "frames")
    rejects(lambda: model(latents(2), ZERO, text, cache, context=latents(2)), "context")
    cache.commit()
    with pytest.raises(ValueError, match="the cache is for 4 frames, got 6"):
        cache.begin_block(4)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="frames"):
            cache.begin_block(bad)


def test_a_ring_that_has_lost_frames_says_so(model):
    cache, text = model.new_cache(2, window=4), a_text(model)
    prefill(model, latents(4), cache, text)
    with pytest.raises(ValueError, match="frames"):
        cache.begin_block(4)
    cache.begin_block(2)
    model(latents(2), ZERO, text, cache)
    with pytest.raises(ValueError, match="frames"):
        cache.begin_block(1)
    cache.begin_block(2)


def test_visible_frames_by_hand():
    assert visible_frames(4, 2).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert visible_frames(8, 2, window=4, sinks=1).int().tolist()[6] == [1, 0, 0, 0, 0, 1, 1, 1]


# -- positions, text, modulation ---------------------------------------------------------------------------------------


def test_rope_is_relative_and_split_as_published():
    assert split_rotary_dims(128) == (44, 42, 42) and split_rotary_dims(32) == (12, 10, 10)
    x = torch.randn(1, 6, 1, 128)
    for shift in (1, 1000):
        near, far = build_rotary_3d(128, 0, 3, 1, 2, x.device), build_rotary_3d(128, shift, 3, 1, 2, x.device)
        scores = [apply_rotary(x, table)[0, :, 0] @ apply_rotary(x, table)[0, :, 0].T for table in (near, far)]
        assert torch.allclose(*scores, atol=2e-3) and not torch.allclose(apply_rotary(x, near), apply_rotary(x, far), atol=0.1)


def test_padding_of_captions_is_hidden_or_seen(model):
    embeds = torch.randn(2, 5, 8).double()
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    z = latents(2)
    other = embeds.clone()
    other[:, 3:] += 1
    assert torch.equal(*(model(z, ZERO, model.text_cache(e, mask)) for e in (embeds, other)))
    assert torch.allclose(
        model(z, ZERO, model.text_cache(embeds, mask)), model(z, ZERO, model.text_cache(embeds[:, :3])), atol=1e-9
    )
    official = a_model(text_mask=False, text_len=7)
    short, long = embeds[:, :3], torch.cat([embeds[:, :3], torch.zeros(2, 4, 8).double()], 1)
    assert torch.equal(*(official(z, ZERO, official.text_cache(e)) for e in (short, long)))
    rejects(lambda: official.text_cache(torch.zeros(1, 8, 8).double()), "embeds")


def test_a_level_of_motion_is_one_more_row():
    model, z = a_model(motion_levels=3), latents(2)
    embeds = torch.randn(2, 4, 8).double()
    outs = [model(z, ZERO, model.text_cache(embeds, motion_B=torch.tensor([level] * 2))) for level in range(4)]
    assert torch.equal(outs[3], model(z, ZERO, model.text_cache(embeds))) and not torch.allclose(outs[0], outs[1], atol=1e-4)
    rejects(lambda: model.text_cache(embeds, motion_B=torch.tensor([0, 4])), "motion")
    rejects(lambda: a_model().text_cache(embeds, motion_B=torch.tensor([0, 0])), "motion")


def test_prompts_can_be_chosen_from_a_text_cache(model):
    text, z = a_text(model), latents(2)
    assert torch.allclose(model(z[1:], ZERO[1:], text.select_rows(slice(1, 2))), model(z, ZERO, text)[1:], atol=1e-9)
    assert torch.allclose(model(z[[1]], ZERO[1:], text.select_rows([1])), model(z, ZERO, text)[1:], atol=1e-9)
    assert text.nbytes == 2 * 2 * 2 * 5 * 24 * 8


def test_each_frame_has_its_own_timestep(model):
    z, text = latents(2), a_text(model)
    mixed = model(z, torch.tensor([[0.0, 500.0]] * 2), text)
    assert not torch.allclose(mixed, model(z, ZERO, text), atol=1e-4)
    assert torch.equal(model(z, torch.full((2, 2), 500.0), text), model(z, torch.full((2,), 500.0), text))
    rejects(lambda: model(z, torch.zeros(3), text), "timestep")


@pytest.mark.parametrize("shape", [(2, 2, 4, 4, 6), (2, 2, 3, 5, 6), (2, 3, 4, 6)])
def test_latents_of_another_shape_are_refused(model, shape):
    rejects(lambda: model(torch.zeros(shape).double(), ZERO, a_text(model)), "latents")


# -- another size ------------------------------------------------------------------------------------------------------


def test_a_video_of_another_size_has_a_cache_of_its_size(model):
    wide = dataclasses.replace(model.geometry, width=8)
    shape = len(model.blocks), 2, model.config.num_heads, model.head_dim
    cache, text = VideoCache(wide, *shape, frames=4, dtype=torch.float64), a_text(model)
    z = torch.randn(2, 4, 3, 4, 8).double()
    assert torch.allclose(prefill(model, z, cache, text), model(z, ZERO, text), atol=1e-9)


# -- LoRA --------------------------------------------------------------------------------------------------------------


SIZE = {name: TINY_SHAPE[name] for name in ("dim", "ffn_dim", "num_layers")}
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
    network = randomised(CausalVideoTransformer(**TINY_SHAPE), 0).to(torch.bfloat16)
    merged = a_lora().merge(network)
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(velocity(merged).float(), velocity(a_lora().merge(transformer(0))), rtol=0.1, atol=0.1)


def test_8_bit_products_are_of_the_updated_matrices() -> None:
    network = quantize_network(randomised(CausalVideoTransformer(**TINY_SHAPE), 0))
    merged = a_lora().merge(network)
    assert merged.config.quantization == "int8"
    plain = CausalVideoTransformer(**TINY_SHAPE)
    plain.load_state_dict(dequantized(network))
    expected, found = a_lora().merge(plain.eval()), dequantized(merged)
    for name, value in expected.state_dict().items():
        assert (found[name] - value).abs().max() <= value.abs().max() / 127
    assert torch.isfinite(velocity(merged)).all() and not torch.equal(velocity(merged), velocity(network))


def test_what_cannot_be_merged_is_refused() -> None:
    with torch.device("meta"):
        offloaded = CausalVideoTransformer(**TINY_SHAPE)
    rejects(lambda: a_lora().merge(offloaded), "LoRA")


# -- an independent port -----------------------------------------------------------------------------------------------

# The port follows the descriptions of Wan2.1 (arXiv 2503.20314) and of causal generation with a cache (arXiv 2506.08009) in
# float64; commit `a0068ee6` has it, in `tests/support/wan_port.py`.
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "causal_video.safetensors"
SIZES = {
    "1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}
# What the port ran: latents, and for each case the window, the sinks, and the frames by block.
PORTED = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "channels": 16, "text_dim": 8, "freq_dim": 16}
HEIGHT, WIDTH = 2, 4
TIMESTEPS = (1000.0, 937.5, 2500 / 3, 625.0, 0.0)  # of the distilled models, then the clean pass that fills the cache
CASES = {"all": (None, 0, (3, 3, 3)), "window": (7, 2, (3, 3, 3, 3))}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_stored_tensors(case):
    golden, (window, sinks, blocks) = load_file(GOLDEN), CASES[case]
    state = {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}
    model = CausalVideoTransformer(height=HEIGHT, width=WIDTH, **PORTED)
    model.load_state_dict(state)
    cache = model.eval().new_cache(1, sum(blocks), window=window, sinks=sinks)
    text, found = model.text_cache(golden["text"][None]), []
    for number, frames in enumerate(blocks):
        cache.begin_block(frames)
        for t in TIMESTEPS:
            clean, noise = golden["clean"][number], golden["noise"][number]
            noisy = clean + (t / 1000) * (noise - clean)
            found.append(model(noisy[None], torch.tensor([t]), text, cache)[0])
        cache.commit()
    expected = golden[f"velocity.{case}"]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_official_names_are_those_that_diffusers_converts(size):
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    shape = SIZES[size]
    heads = shape["num_heads"]
    with torch.device("meta"):
        ours = CausalVideoTransformer(**shape).state_dict()
        theirs = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=shape["dim"] // heads, ffn_dim=shape["ffn_dim"],
            num_layers=shape["num_layers"],
        ).state_dict()  # fmt: skip
    converted = convert_wan_transformer_to_diffusers(dict(ours))
    assert {name: value.shape for name, value in converted.items()} == {name: value.shape for name, value in theirs.items()}
    assert to_original_names(theirs, Path("theirs")).keys() == ours.keys()
