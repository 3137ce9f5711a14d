"""Files that cannot become a causal video model are refused by name, and nothing is written."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_wan import State, save_self_forcing, save_wan, transformer_state

from vargen.convert.causal_video import REFUSED, parse_steps

from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers  # isort: skip  (after the torchvision guard)


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
