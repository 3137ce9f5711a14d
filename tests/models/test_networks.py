"""What every network does: it is saved and opened as it is, its rows stand alone, bfloat16 stays near, sizes that cannot be are
refused by name, and tensors have the names, shapes and counts of the official files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_models import attentive_transformer, tiny_multi_scale_vq, tiny_var, tiny_vq
from tiny_video import preview, randomised, transformer, vae
from torch import Tensor

from vargen.models.causal_video.cache import VideoGeometry
from vargen.models.causal_video.network import CausalVideoLoRA, CausalVideoTransformer
from vargen.models.guidance import Condition
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.llamagen.network import SIZES, LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.multi_scale_vq import SCALES_256, SCALES_512, MultiScaleVQModel
from vargen.models.tokenizers.video_vae import CausalVideoVAE, PreviewDecoder
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var.network import VARTransformer, is_derived_buffer, official_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ROWS = 4


def bank(*shape: int, seed: int = 0, integers: int = 0) -> Tensor:
    """Inputs of all rows: normal numbers, or tokens of a vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, *shape)
    return torch.randint(integers, shape, generator=generator) if integers else torch.randn(shape, generator=generator)


VISIBLE = torch.arange(6) >= torch.arange(ROWS)[:, None] + 1  # of captions of 6 tokens
LABELS, CAPTIONS, TOKENS = torch.arange(ROWS), bank(6, 12), bank(16, integers=40)
FEATURES = torch.stack([bank(7, 32), bank(7, 32, seed=1)])


def captions(rows: Any, dtype: torch.dtype) -> Condition:
    return Condition(None, (CAPTIONS * VISIBLE[..., None])[rows].to(dtype), VISIBLE[rows])


def run_video(network: Any, rows: Any, dtype: torch.dtype) -> Tensor:
    text = network.text_cache(bank(5, 8, seed=1)[rows].to(dtype))
    return network(bank(4, 4, 2, 2)[rows].to(dtype), torch.tensor([0.0, 300.0, 700.0, 900.0])[rows], text)


HEADS = {"dim": 32, "vocab_size": 64, "grid_size": 4}
LOW, SIDE = {"vocab_size": 32, "low_grid": 4, "grid_size": 8, "dim": 16, "blocks": 2}, {"caption_dim": 12, "caption_rows": 6}
MAKERS: dict[str, Callable[[], Any]] = {
    "LlamaGen class": attentive_transformer,
    "LlamaGen text": lambda: attentive_transformer("text"),
    "VAR class": lambda: tiny_var("class"),
    "VAR text": lambda: tiny_var(**SIDE),
    "VQModel": tiny_vq,
    "MultiScaleVQModel": tiny_multi_scale_vq,
    "hybrid": lambda: tiny_multi_scale_vq(architecture="hybrid", patch_size=2, transformer_blocks=1),
    "CausalVideoTransformer": lambda: copy.deepcopy(transformer()),
    "CausalVideoVAE": lambda: copy.deepcopy(vae()),
    "PreviewDecoder": lambda: copy.deepcopy(preview()),
    "EagleDrafter": lambda: randomised(EagleDrafter(n_head=2, multiple_of=32, **HEADS), 1),
    "MedusaDrafter": lambda: randomised(MedusaDrafter(32, 64, 4), 2),
    "TokenUpsampler": lambda: randomised(TokenUpsampler(**LOW), 3),
    "MiniLMTextEncoder": lambda: randomised(MiniLMTextEncoder(40, 64, 2, 2, 96, 12, weight_format="float32"), 4),
}


def decode_scales(network: Any, rows: Any, dtype: torch.dtype) -> Tensor:
    return network.decode([TOKENS[rows, : side**2] for side in (1, 2, 3, 4)])


def upsample(network: Any, rows: Any, dtype: torch.dtype) -> Tensor:
    features = network.features(bank(4, 4, integers=32)[rows])
    return network(features, bank(64, integers=32)[rows], bank(64)[rows] < 0.5)


# The output for some rows, of inputs of a dtype.
RUNS: dict[str, Callable[[Any, Any, torch.dtype], Tensor]] = {
    "LlamaGen class": lambda net, rows, dtype: net(TOKENS[rows], Condition(LABELS[rows])).logits,
    "LlamaGen text": lambda net, rows, dtype: net(TOKENS[rows], captions(rows, dtype)).logits,
    "VAR class": lambda net, rows, dtype: net(bank(29, 8)[rows].to(dtype), Condition(LABELS[rows])).logits,
    "VAR text": lambda net, rows, dtype: net(bank(29, 8)[rows].to(dtype), captions(rows, dtype)).logits,
    "VQModel": lambda net, rows, dtype: net.decode(TOKENS[rows]),
    "MultiScaleVQModel": decode_scales,
    "hybrid": decode_scales,
    "CausalVideoTransformer": run_video,
    "CausalVideoVAE": lambda net, rows, dtype: net.decode(bank(3, 4, 2, 2)[rows].to(dtype)),
    "PreviewDecoder": lambda net, rows, dtype: net(bank(3, 4, 2, 2)[rows].to(dtype)),
    "EagleDrafter": lambda net, rows, dtype: net.merge_inputs(*FEATURES[:, rows].to(dtype)),
    "MedusaDrafter": lambda net, rows, dtype: net(*FEATURES[:, rows].to(dtype)),
    "TokenUpsampler": upsample,
    "MiniLMTextEncoder": lambda net, rows, dtype: net(TOKENS[rows, :6], VISIBLE[rows]),
}
every_network = pytest.mark.parametrize("name", MAKERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_network
def test_a_network_that_is_saved_and_opened_is_the_same(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    network = MAKERS[name]().to(dtype)
    network.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "diffusion_pytorch_model.safetensors"}
    opened = type(network).from_pretrained(tmp_path, torch_dtype=dtype)
    expected, found = network.state_dict(), opened.state_dict()
    assert expected.keys() == found.keys() and not opened.training
    assert all(torch.equal(value, found[key]) and value.dtype == found[key].dtype for key, value in expected.items())
    settings = [json.dumps({key: value for key, value in each.config.items() if key[0] != "_"}) for each in (network, opened)]
    assert settings[0] == settings[1]


@every_network
@torch.inference_mode()
def test_rows_do_not_depend_on_their_batch_and_bfloat16_is_near(name: str) -> None:
    make, run = MAKERS[name], RUNS[name]
    exact = run(make(), slice(None), torch.float32).float()
    spread = exact.std()
    assert all(not torch.allclose(exact[0], row) for row in exact[1:]), "rows differ"
    for dtype, near, bound in ((torch.float32, 1e-6, 2e-5), (torch.bfloat16, 0.06, 0.06)):
        network = make().to(dtype)
        together = run(network, slice(None), dtype).float()
        assert (together - exact).square().mean().sqrt() <= near * spread
        for row in range(ROWS):
            alone = run(network, slice(row, row + 1), dtype).float()
            assert (alone[0] - together[row]).abs().max() <= bound * exact.abs().max()


# -- the official files ----------------------------------------------------------------------------------------------------

LLAMAGEN, VAR, VIDEO = (
    json.loads((GOLDEN / f"{name}_manifest.json").read_text()) for name in ("llamagen", "var", "causal_video")
)
CONDITIONS = {"c2i": "class", "t2i": "text"}
MULTIPLIERS = {"VQ-16": (1, 1, 2, 2, 4), "VQ-8": (1, 2, 2, 4)}
VIDEO_MODELS = {
    "1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}


def make_official(name: str) -> tuple[Any, dict[str, list[int]], int]:
    """A network of an official size without weights, the tensors of the official file, and its number of parameters."""
    if name in LLAMAGEN:
        size, *kind = name.split("/")
        mult = {"encoder_ch_mult": MULTIPLIERS.get(name), "decoder_ch_mult": MULTIPLIERS.get(name)}
        network: Any = LlamaGenTransformer(CONDITIONS[kind[0]], **SIZES[size[4:]]) if kind else VQModel(**mult)  # type: ignore[arg-type]
        return network, LLAMAGEN[name]["tensors"], LLAMAGEN[name]["params"]
    if name in VIDEO:
        tensors = dict(VIDEO[name]["tensors"])
        for layer in range(VIDEO[name]["layers"]):
            tensors |= {f"blocks.{layer}.{part}": shape for part, shape in VIDEO[name]["block"].items()}
        return CausalVideoTransformer(**VIDEO_MODELS[name]), tensors, VIDEO[name]["parameters"]
    tensors, count = VAR[name]["tensors"], VAR[name]["params"]
    if name == "vae_ch160v4096z32":
        return MultiScaleVQModel(scales=SCALES_256), tensors, count
    depth = int(name.removeprefix("var_d"))
    network = VARTransformer(**official_config(depth, 512 if depth == 36 else 256))
    assert list(network.scales) == VAR[name]["patch_nums"] and network.tokens == tensors["pos_1LC"][1]
    assert list(network.lvl_1L.shape) == tensors["lvl_1L"]
    return network, {key: shape for key, shape in tensors.items() if not is_derived_buffer(key)}, count


@pytest.mark.parametrize("name", [*LLAMAGEN, *VAR, *VIDEO])
def test_tensors_and_parameters_are_the_official_ones(name: str) -> None:
    with torch.device("meta"):
        network, tensors, count = make_official(name)
    assert {key: list(value.shape) for key, value in network.state_dict().items()} == tensors
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_every_released_size_is_known_and_grids_change_no_tensor() -> None:
    assert {name.split("/")[0][4:] for name in LLAMAGEN if name.startswith("GPT-")} == SIZES.keys()
    with torch.device("meta"):
        for grid in (16, 24, 32):
            network = LlamaGenTransformer("class", grid_size=grid, **SIZES["B"])  # type: ignore[arg-type]
            assert network.tokens == grid**2 and network.rotary.shape == (grid**2, 32, 2)
            assert network.state_dict().keys() == LLAMAGEN["GPT-B/c2i/256"]["tensors"].keys()
        for scales in (SCALES_256, SCALES_512):
            tokenizer = MultiScaleVQModel(scales=scales)
            assert tokenizer.downsampling == 16 and tokenizer.image_size == 16 * scales[-1]
            assert tokenizer.state_dict().keys() == VAR["vae_ch160v4096z32"]["tensors"].keys()
        for name in MULTIPLIERS:
            assert f"VQ-{make_official(name)[0].downsampling}" == name


# -- sizes that cannot be --------------------------------------------------------------------------------------------------

VIDEO_SIZES, UPSAMPLER = (
    {"dim": 24, "height": 4, "width": 6, "patch": 2},
    {"vocab_size": 32, "low_grid": 4, "grid_size": 8, "dim": 16},
)
# By class: arguments, and the one that the error names.
REFUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    LlamaGenTransformer: [
        ({"condition": "image"}, "condition"), ({"dim": 50, "n_head": 4}, "n_head"), ({"dim": 24, "n_head": 4}, "n_head"),
    ],
    VARTransformer: [
        ({"condition": "words"}, "condition"), ({"dim": 50, "n_head": 3}, "dim"), ({"scales": (1, 3, 2)}, "scales"),
        ({"scales": ()}, "scales"),
    ],
    VQModel: [
        ({"ch": 48}, "ch"), ({"encoder_ch_mult": (1, 2)}, "encoder_ch_mult"), ({"decoder_ch_mult": [1]}, "decoder_ch_mult"),
    ],
    MultiScaleVQModel: [
        ({"architecture": "cnn"}, "architecture"), ({"scales": (1, 2, 2)}, "scales"), ({"scales": ()}, "scales"),
        ({"scales": (0, 2)}, "scales"), ({"scales": (1, 2), "scale_codes": (8,)}, "scale_codes"),
        *(({"scales": (1, 2), "scale_codes": codes}, "scale_codes") for codes in ((8, 5000), (9, 8), (0, 8))),
        ({"shared_phi": 0}, "shared_phi"), ({"ch": 48}, "ch"),
        ({"architecture": "hybrid", "ch": 8, "ch_mult": (1, 2)}, "ch_mult"),
    ],
    CausalVideoTransformer: [
        *(({**VIDEO_SIZES, "num_heads": heads}, "num_heads") for heads in (5, 6, 8)), ({**VIDEO_SIZES, "patch": 4}, "patch"),
    ],
    CausalVideoVAE: [({"size": 20}, "size"), ({"size": 0}, "size"), ({"size": 16, "widths": (8, 16, 24)}, "widths")],
    VideoGeometry: [({name: value}, name) for name, value in {
        "patch": 7, "block_frames": 0, "channels": True, "height": 2.0}.items()],
    PreviewDecoder: [({"stride": 5}, "stride")],
    CausalVideoLoRA: [({"dim": 24, "ffn_dim": 32, "num_layers": 2, "rank": rank}, "rank") for rank in (0, 25)],
    EagleDrafter: [
        ({"dim": 30, "n_head": 2}, "n_head"), ({"dim": 32, "n_head": 2, "grid_size": 0}, "grid_size"),
        ({"dim": 32, "n_head": 2, "grid_size": 10**6}, "grid_size"),
    ],
    MedusaDrafter: [({"heads": 0}, "heads")],
    TokenUpsampler: [({**UPSAMPLER, "grid_size": side}, "grid_size") for side in (9, 4)] + [({**UPSAMPLER, "dim": 12}, "dim")],
    MiniLMTextEncoder: [({"weight_format": "int7"}, "int7")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("network", "sizes", "named"),
    [(network, sizes, named) for network, rows in REFUSED.items() for sizes, named in rows],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_sizes_that_cannot_be_are_refused(network: Any, sizes: dict[str, Any], named: str) -> None:
    with torch.device("meta"):
        rejects(lambda: network(**sizes), named, ValueError)
