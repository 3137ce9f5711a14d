"""Official files of causal video models: names, what is stored with them, and which files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_wan import State, save_self_forcing, save_wan, transformer_state

from vargen.convert.causal_video import REFUSED, parse_steps
from vargen.convert.wan import to_original_names
from vargen.models.causal_video.network import CausalVideoTransformer

from diffusers import WanTransformer3DModel  # isort: skip  (after the torchvision guard)
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers  # isort: skip

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


def ours_of(theirs) -> CausalVideoTransformer:
    model = CausalVideoTransformer(**SHAPE)
    model.load_state_dict(to_original_names(theirs.state_dict(), Path("theirs")), strict=True)
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


# -- files of all kinds ------------------------------------------------------------------------------------------------


def defaults_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model_index.json").read_text())["defaults"]


def files_of(kind: str, folder: Path, state: State) -> list[Path]:
    """The same weights in files of different origin."""
    file, names = folder / "model.pt", list(state)
    if kind in ("original", "diffusers", "parts"):
        files = [folder / "model.safetensors", folder / "more.safetensors"]
        named = convert_wan_transformer_to_diffusers(dict(state)) if kind == "diffusers" else state
        save_file(dict(list(named.items())[: 9 if kind == "parts" else None]), files[0])
        if kind == "parts":
            save_file({name: named[name] for name in names[9:]}, files[1])
        return files[: 2 if kind == "parts" else 1]
    if kind == "averaged":
        return [save_self_forcing(file, state)]
    named = {f"model.{name}": value for name, value in state.items()}
    if kind == "wrapped inside":
        named = {name.replace(".self_attn", "._fsdp_wrapped_module.self_attn"): value for name, value in named.items()}
        named = {name.replace(".ffn", "._checkpoint_wrapped_module.ffn"): value for name, value in named.items()}
    elif kind == "repackaged":
        named = {f"model.diffusion_model.{name}": value for name, value in state.items()}
    elif kind == "heads of a critic":
        named |= {"_cls_pred_branch.0.weight": torch.ones(2, 2), "_register_tokens": torch.ones(1, 2)}
        named |= {"_gan_ca_blocks.0.norm.weight": torch.ones(2), "model._register_tokens": torch.ones(3)}
    torch.save(named if kind == "repackaged" else {"generator": named, "step": 3}, file)
    return [file]


@pytest.mark.parametrize(
    "kind",
    ["original", "diffusers", "parts", "averaged", "generator alone", "wrapped inside", "repackaged", "heads of a critic"],
)
def test_files_of_all_kinds_give_the_same_network(convert, tmp_path, kind):
    state = transformer_state()
    folder = convert(*files_of(kind, tmp_path, state))
    model = CausalVideoTransformer.from_pretrained(folder / "transformer")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (model.geometry.height, model.geometry.width, model.config.text_len) == (2, 4, 512)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "CausalVideoPipeline"
    assert index["transformer"] == ["vargen.models.causal_video.network", "CausalVideoTransformer"]


def test_weights_that_are_not_averaged_are_taken_on_request(convert, tmp_path):
    state = transformer_state()
    folder = convert(save_self_forcing(tmp_path / "model.pt", state), no_ema=True)
    model = CausalVideoTransformer.from_pretrained(folder / "transformer")
    assert torch.equal(model.head.head.weight, state["head.head.weight"] + 1)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_those_of_self_forcing_unless_given(convert, tmp_path):
    file = save_self_forcing(tmp_path / "model.pt", transformer_state())
    plain = defaults_of(convert(file))
    assert (plain["steps"], plain["shift"], plain["num_blocks"], plain["window"]) == ([1000, 750, 500, 250], 5.0, 7, None)
    options = {"block_frames": 2, "window": 8, "sinks": 2, "steps": "1000,500", "no_warp": True, "image": True}
    folder = convert(file, **options)
    stored = defaults_of(folder)
    assert (stored["steps"], stored["shift"], stored["num_blocks"]) == ([1000, 500], 1.0, 10)
    assert (stored["window"], stored["sinks"], stored["image"]) == (8, 2, True)
    assert json.loads((folder / "transformer" / "config.json").read_text())["block_frames"] == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("framewise-2step.pt", {"steps": [1000, 500], "num_blocks": 21, "image": True}),
        ("chunkwise/causal_forcing.pt", {"steps": [1000, 750, 500, 250], "num_blocks": 7, "image": False}),
        ("autoregressive_checkpoint/model.pt", {"steps": [1000, 757, 522], "shift": 1.0}),
        ("longlive_base.pt", {"window": 12, "sinks": 3}),
    ],
)
def test_published_files_bring_their_settings(convert, tmp_path, name, expected):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    found = defaults_of(convert(save_self_forcing(file, transformer_state())))
    assert {key: found[key] for key in expected} == expected


def test_weights_of_a_ladder_are_stored_once(convert, tmp_path):
    file = save_self_forcing(tmp_path / "model.pt", transformer_state())
    same = save_self_forcing(tmp_path / "copy.pt", transformer_state())
    folder = convert(file, draft=[same], draft_steps="1000,500")
    assert defaults_of(folder)["draft_steps"] == [1000, 500] and not (folder / "draft_transformer").exists()
    with pytest.raises(ValueError, match="holds the weights of the transformer: give draft_steps"):
        convert(file, draft=[same])


def test_a_drafter_of_fewer_steps_keeps_them(convert, tmp_path):
    target = save_self_forcing(tmp_path / "target.pt", transformer_state(block_frames=1))
    faster = save_self_forcing(tmp_path / "framewise-1step.pt", transformer_state(5))
    folder = convert(target, draft=[faster], block_frames=1)
    assert defaults_of(folder)["draft_steps"] == [1000] and (folder / "draft_transformer").is_dir()
    slower = save_self_forcing(tmp_path / "self_forcing_dmd.pt", transformer_state(5))
    folder = convert(target, draft=[slower], steps="1000")
    assert defaults_of(folder)["draft_steps"] == [1000, 750, 500, 250]
    with pytest.raises(ValueError, match="whether timesteps are warped"):
        convert(target, draft=[slower], no_warp=True)
    with pytest.raises(ValueError, match="1 and 3 latent frames per block"):
        convert(target, draft=[faster])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_latents_of_wan_22_have_another_stride_and_rate(convert, tmp_path):
    file = save_self_forcing(tmp_path / "model.pt", transformer_state(channels=48))
    with pytest.raises(ValueError, match=r"they have 16 and 48 latent channels, of which Wan2.1 has 16 and Wan2.2-TI2V-5B 48"):
        convert(file, size=(64, 96))
    with pytest.raises(ValueError, match="size must be multiples of 32 pixels"):
        convert(file, size=(480, 832 + 16))


def test_what_is_wrong_is_named_and_nothing_is_written(convert, tmp_path):
    original, file = transformer_state(), tmp_path / "model.safetensors"

    def refused(message: str, state: State, **more) -> None:
        save_file(state, file)
        with pytest.raises(ValueError, match=message):
            convert(file, **more)
        assert not (tmp_path / "out").exists()

    refused("n_head must be given: a width of 48", original, n_head=None)
    refused("missing: 1 .*norm_k", {n: v for n, v in original.items() if n != "blocks.1.self_attn.norm_k.weight"})
    refused("takes an image beside its latents", {**original, "img_emb.proj.0.weight": torch.zeros(2)})
    refused("VACE", {**original, "vace_blocks.0.ffn.0.weight": torch.zeros(2)})
    refused("is a LoRA", {"blocks.0.self_attn.q.lora_A.weight": torch.zeros(2)})
    refused("weights are quantized", {**original, "blocks.0.self_attn.q.weight_scale": torch.zeros(2)})
    refused("unexpected: 1 .*action", {**original, "action_embedding.weight": torch.zeros(2)})
    refused("float8", {name: value.to(torch.float8_e4m3fn) for name, value in original.items()})
    refused("it has no patch_embedding.weight", {"a": torch.zeros(2)})
    diffusers = convert_wan_transformer_to_diffusers(dict(original))
    refused("unexpected: 1 .*blocks.0.extra.weight", {**diffusers, "blocks.0.extra.weight": torch.zeros(2)})
    refused("NaN", {**original, "head.modulation": original["head.modulation"] * float("nan")})
    refused("20 latent channels, expected 16 or 48", transformer_state(channels=20))
    refused("size must be multiples of 16 pixels, got '480x830'", original, size=(480, 830))
    refused("dtype must be", original, dtype=torch.int8)
    refused("num_heads must divide", original, n_head=5)
    refused("block_frames must be", original, block_frames=0)
    refused("window must be at least 3", original, window=2)
    refused("sinks must be 0 without a window", original, sinks=2)
    refused("steps must fall", original, steps="1000,1000")
    refused("draft_steps must fall", original, draft_steps="a")
    with pytest.raises(ValueError, match="which an earlier file holds, too"):
        convert(file, file)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="one file or more"):
        convert()


def test_steps_are_parsed_or_refused():
    assert parse_steps("1000, 937.5", "steps") == [1000.0, 937.5]
    for wrong in ("", "1001", "500,750", "0", "nan", "1000,inf"):
        with pytest.raises(ValueError, match="steps must fall"):
            parse_steps(wrong, "steps")


@pytest.mark.parametrize("pattern", REFUSED)
def test_files_that_run_another_algorithm_are_refused_by_name(convert, tmp_path, pattern):
    file = tmp_path / pattern.replace("*", "-x")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"never opened")
    with pytest.raises(ValueError, match=f"is {REFUSED[pattern].partition(':')[0]}: "):
        convert(file)


def test_other_models_of_wan_are_refused_by_their_folder(convert, tmp_path):
    file = tmp_path / "transformer" / "diffusion_pytorch_model-00001-of-00002.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"never opened")
    (file.parent / "config.json").write_text('{"_class_name": "WanModel"}')
    with pytest.raises(ValueError, match="is not causal"):
        convert(file)
    (file.parent / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(ValueError, match="is not causal"):
        convert(file)
    (tmp_path / "model_index.json").write_text("damaged")
    (file.parent / "config.json").write_text('{"_class_name": "AnyFlowFARTransformer3DModel"}')
    with pytest.raises(ValueError, match="is AnyFlow"):
        convert(file)
    for name in ("wan2.2_t2v_A14B_high_noise_4step.safetensors", "low_noise_model/model.safetensors"):
        expert = tmp_path / name
        expert.parent.mkdir(exist_ok=True)
        expert.write_bytes(b"never opened")
        with pytest.raises(ValueError, match="two experts"):
            convert(expert)
    (tmp_path / "transformer_2").mkdir()
    with pytest.raises(ValueError, match="two experts"):
        convert(file)


def test_parts_of_another_model_are_refused(convert, tmp_path):
    target = save_self_forcing(tmp_path / "model.pt", transformer_state())
    other = save_self_forcing(tmp_path / "draft.pt", transformer_state(1, draft=True, text_dim=8))
    with pytest.raises(ValueError, match="they have 8 and 16 columns of text features"):
        convert(target, draft=[other])
    with pytest.raises(ValueError, match="16 and 8 columns of text features"):
        convert(other, n_head=2)
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(ValueError, match=r"in diffusers' format.*it has no vae/"):
        convert(target, wan=bare)
    folder = save_wan(tmp_path / "changed")
    for part, name in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        file = folder / part / f"{name}.safetensors"
        state = load_file(file)
        save_file({**state, "more.weight": torch.zeros(2)}, file)
        with pytest.raises(ValueError, match="unexpected: 1"):
            convert(target, wan=folder)
        save_file(state, file)
