"""The causal video transformer against an independent port, block by block through a cache; tensors of the official sizes."""

import json
from pathlib import Path

import pytest
import torch
from golden_causal_video import CASES, HEIGHT, SHAPE, TIMESTEPS, WIDTH, noisy_block, run_port
from safetensors.torch import load_file
from tiny_video import randomised
from wan_port import PortCache, port

from vargen.convert.wan_transformer import to_diffusers
from vargen.models.causal_video import CausalVideoTransformer

from diffusers import WanTransformer3DModel  # isort: skip  (after the torchvision guard)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "causal_video.safetensors"
MANIFEST = json.loads((Path(__file__).resolve().parents[1] / "golden" / "causal_video_manifest.json").read_text())
SIZES = {
    "1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}
STEPS = (1000.0, 625.0)


def network(shape, seed=0):
    """With every weight random, and norms around 1, so that no step is lost in a small number."""
    model = randomised(CausalVideoTransformer(channels=16, height=4, width=6, text_dim=8, freq_dim=16, **shape), seed)
    for name, value in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            value += 1
    return model


@torch.no_grad()
def both(shape, frames, count, window=None, sinks=0, text_rows=5, seed=0):
    """Outputs of the port and of ours: for each block, all denoising steps, then the clean pass that fills the cache."""
    model = network(shape, seed)
    state, generator = dict(model.state_dict()), torch.Generator().manual_seed(seed)
    text = torch.randn(text_rows, 8, generator=generator)
    cache, theirs = model.new_cache(1, count, window=window, sinks=sinks), PortCache(window, sinks)
    rows, start, expected, found = model.text_cache(text[None]), 0, [], []
    for frames_of_block in frames:
        clean, noise = torch.randn(2, frames_of_block, 16, 4, 6, generator=generator).unbind()
        cache.begin_block(frames_of_block)
        for t in (*STEPS, 0.0):
            noisy = clean + (t / 1000) * (noise - clean)
            found.append(model(noisy[None], torch.tensor([t]), rows, cache)[0])
            expected.append(port(state, model.config.num_heads, noisy, t, text, theirs, start, t == 0))
        cache.commit()
        start += frames_of_block
    return torch.cat(found), torch.cat(expected).float()


@pytest.mark.parametrize(
    ("shape", "frames", "window", "sinks"),
    [
        ({"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 3}, (3, 3, 3), None, 0),
        ({"dim": 40, "ffn_dim": 32, "num_heads": 2, "num_layers": 2}, (3, 3, 3, 3), 7, 2),
        ({"dim": 24, "ffn_dim": 32, "num_heads": 1, "num_layers": 2, "block_frames": 1}, (1,) * 5, 3, 1),
        ({"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2}, (1, 3, 3), None, 0),
    ],
    ids=["all frames", "window and sinks", "one frame a block", "first frame alone"],
)
def test_blocks_are_those_of_an_independent_port(shape, frames, window, sinks):
    found, expected = both(shape, frames, sum(frames), window, sinks)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_stored_tensors(case):
    """The port wrote them: neither it nor the network can change unnoticed."""
    golden, (window, sinks, blocks) = load_file(GOLDEN), CASES[case]
    state = {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}
    model = CausalVideoTransformer(height=HEIGHT, width=WIDTH, **SHAPE)
    model.load_state_dict(state)
    cache = model.eval().new_cache(1, sum(blocks), window=window, sinks=sinks)
    text, found = model.text_cache(golden["text"][None]), []
    for number, frames in enumerate(blocks):
        cache.begin_block(frames)
        for t in TIMESTEPS:
            found.append(model(noisy_block(golden, number, t)[None], torch.tensor([t]), text, cache)[0])
        cache.commit()
    expected = golden[f"velocity.{case}"]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    torch.testing.assert_close(run_port(golden, case), expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_the_port_notices_a_wrong_weight():
    shape = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2}
    model = network(shape)
    state, text, block = dict(model.state_dict()), torch.randn(3, 8), torch.randn(3, 16, 4, 6)
    right = port(state, 2, block, 900.0, text, PortCache(), 0, False)
    for name in ("blocks.1.norm3.bias", "blocks.0.modulation", "head.modulation", "blocks.0.cross_attn.norm_k.weight"):
        changed = {**state, name: state[name] + 0.1}
        assert not torch.allclose(port(changed, 2, block, 900.0, text, PortCache(), 0, False), right, atol=1e-3)
    later = port(state, 2, block, 900.0, text, PortCache(), 3, False)
    torch.testing.assert_close(later, right, msg="positions are relative while nothing is cached")


@pytest.mark.parametrize("size", SIZES)
def test_tensors_of_the_official_sizes(size):
    with torch.device("meta"):
        model = CausalVideoTransformer(**SIZES[size])
    expected = dict(MANIFEST[size]["tensors"])
    for layer in range(MANIFEST[size]["layers"]):
        expected |= {f"blocks.{layer}.{name}": shape for name, shape in MANIFEST[size]["block"].items()}
    assert {name: list(value.shape) for name, value in model.state_dict().items()} == expected
    assert sum(value.numel() for value in model.parameters()) == MANIFEST[size]["parameters"]


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
    assert {to_diffusers(name) for name in ours} == theirs.keys()
