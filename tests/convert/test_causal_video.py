"""Names of causal video transformers, original and diffusers', and the files that hold them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from vargen.convert.causal_video import convert_causal_video, to_diffusers, to_original
from vargen.models.causal_video import CausalVideoTransformer

from diffusers import WanTransformer3DModel  # isort: skip  (after the torchvision guard)

SHAPE = {
    "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "channels": 4, "height": 4, "width": 6, "patch": 2,
    "block_frames": 3, "text_dim": 8, "text_len": 7, "freq_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> WanTransformer3DModel:
    """diffusers' network with every weight drawn."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5))
    return model.eval()


def state_of(theirs) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in theirs.state_dict().items()}


def ours_of(theirs) -> CausalVideoTransformer:
    model = CausalVideoTransformer(**SHAPE)
    model.load_state_dict({to_original(name): value for name, value in theirs.state_dict().items()}, strict=True)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 3])
def test_a_block_without_a_cache_is_what_diffusers_computes(theirs, frames):
    """Where the two coincide: one block, all of it seen, one timestep."""
    model, random = ours_of(theirs), torch.Generator().manual_seed(1)
    z = torch.randn(2, frames, 4, 4, 6, generator=random)
    embeds = torch.randn(2, 7, 8, generator=random)
    t = torch.tensor([900.0, 300.0])
    expected = theirs(z.transpose(1, 2), t, embeds, return_dict=False)[0].transpose(1, 2)
    found = model(z, t, model.text_cache(embeds))
    assert torch.allclose(found, expected, atol=1e-4 * expected.abs().max())
    worse = model(z, t + 1, model.text_cache(embeds))
    assert not torch.allclose(worse, expected, atol=1e-4 * expected.abs().max())


def test_names_go_both_ways_and_cover_all_parameters(theirs):
    own = CausalVideoTransformer(**SHAPE).state_dict()
    assert {to_diffusers(name) for name in own} == theirs.state_dict().keys()
    assert all(to_original(to_diffusers(name)) == name for name in own)
    assert to_diffusers("blocks.11.norm3.weight") == "blocks.11.norm2.weight"
    assert to_diffusers("blocks.0.modulation") == "blocks.0.scale_shift_table"
    for wrong in ("blocks.0.norm2.weight", "blocks.0.self_attn.x.weight", "norm.weight", "patch_embedding"):
        with pytest.raises(ValueError, match="is not a parameter"):
            to_diffusers(wrong)


@pytest.mark.parametrize("kind", ["original", "diffusers", "self-forcing", "parts"])
def test_files_of_all_kinds_give_the_same_network(theirs, tmp_path, kind):
    state = state_of(theirs)
    original = {to_original(name): value for name, value in state.items()}
    files = [tmp_path / "model.safetensors"]
    if kind == "parts":
        files.append(tmp_path / "more.safetensors")
        names = sorted(original)
        save_file({name: original[name] for name in names[:9]}, files[0])
        save_file({name: original[name] for name in names[9:]}, files[1])
    elif kind == "self-forcing":
        files = [tmp_path / "self_forcing_dmd.pt"]
        averaged = {f"model.{name}": value for name, value in original.items()}
        torch.save({"generator": {name: value + 1 for name, value in averaged.items()}, "generator_ema": averaged}, files[0])
    else:
        save_file(original if kind == "original" else state, files[0])
    folder = convert_causal_video(files, tmp_path / "out", n_head=2, size=(32, 48))
    model = CausalVideoTransformer.from_pretrained(folder / "transformer")
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
    assert (model.geometry.height, model.geometry.width, model.config.text_len) == (4, 6, 512)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "CausalVideoPipeline"
    assert index["transformer"] == ["vargen.models.causal_video", "CausalVideoTransformer"]


def test_what_is_wrong_is_named_and_nothing_is_written(theirs, tmp_path):
    original = {to_original(name): value for name, value in state_of(theirs).items()}
    file, out = tmp_path / "model.safetensors", tmp_path / "out"

    def refused(message: str, state: dict[str, torch.Tensor], **more) -> None:
        save_file(state, file)
        with pytest.raises(ValueError, match=message):
            convert_causal_video([file], out, **{"n_head": 2, **more})
        assert not out.exists()

    refused("n_head must be given: a width of 24", original, n_head=None)
    refused("missing: 1 .*norm_k", {n: v for n, v in original.items() if n != "blocks.1.self_attn.norm_k.weight"})
    refused("takes an image beside its latents", {**original, "img_emb.proj.0.weight": torch.zeros(2)})
    refused("it has no patch_embedding.weight", {"a": torch.zeros(2)})
    refused("is not a parameter", {**state_of(theirs), "blocks.0.extra.weight": torch.zeros(2)})
    refused("NaN", {**original, "head.modulation": original["head.modulation"] * float("nan")})
    refused("size must be multiples of 16 pixels, got 480x830", original, size=(480, 830))
    refused("dtype must be", original, dtype=torch.int8)
    refused("num_heads must divide", original, n_head=5)
    with pytest.raises(ValueError, match="which an earlier file holds, too"):
        convert_causal_video([file, file], out)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert_causal_video([tmp_path / "none.pt"], out)
    with pytest.raises(ValueError, match="one file or more"):
        convert_causal_video([], out)
