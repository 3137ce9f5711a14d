"""Examples beside a model: training pictures alone, tokens as the tokenizer gives them, and a folder that keeps them."""

import json

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, tiny_vq

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.lookup_examples import choose_examples, load_cached_tokens
from vargen import LlamaGenPipeline
from vargen.pipelines.loading import EXAMPLES_FILE, load_example_tokens, save_example_tokens
from vargen.training.token_cache import hash_tokens


@pytest.fixture(scope="module")
def data() -> EmojiDataset:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    return EmojiDataset(images, [{"split": "validation" if i % 5 == 0 else "train"} for i in range(40)])  # type: ignore[typeddict-item]


def test_examples_are_training_images_as_the_tokenizer_sees_them(data):
    vqvae = tiny_vq()
    everything = vqvae.encode(torch.from_numpy(data.images).movedim(-1, 1) / 127.5 - 1).flatten(1)
    steps = []
    tokens = choose_examples(vqvae, data, 1000, progress=lambda done, of: steps.append((done, of)))
    assert len(tokens) == 32 and steps[-1] == (32, 32)
    held_out = {tuple(everything[i].tolist()) for i in range(0, 40, 5)}
    assert not held_out & {tuple(row) for row in tokens.tolist()}
    fewer = choose_examples(vqvae, data, 7)
    assert torch.equal(fewer, tokens[:7])  # the first of the same order


def test_tokens_that_a_run_kept_are_taken(data, tmp_path, monkeypatch):
    vqvae = tiny_vq()
    tokens = choose_examples(vqvae, data, 32)
    everything = vqvae.encode(torch.from_numpy(data.images).movedim(-1, 1) / 127.5 - 1).flatten(1).numpy()
    kept = np.stack([everything + 1, np.ones_like(everything)], axis=1).astype(np.uint16)
    kept[10:20] = 0
    kept[21, 0, 8:] = 0  # the run was killed while it wrote
    np.save(tmp_path / f"tokens-{hash_tokens(vqvae)}-0-8-2.npy", kept)
    asked = []
    encode = vqvae.encode
    monkeypatch.setattr(vqvae, "encode", lambda pixels: asked.append(len(pixels)) or encode(pixels))
    assert torch.equal(choose_examples(vqvae, data, 32, load_cached_tokens(tmp_path, vqvae, 40)), tokens)
    assert sum(asked) == 1 + 9  # an empty picture; of 10 to 19 two are held out


def test_a_run_of_another_tokenizer_or_data_set_is_refused(tmp_path):
    vqvae = tiny_vq()
    with pytest.raises(ValueError, match="contains no cached tokens"):
        load_cached_tokens(tmp_path, vqvae, 40)
    np.save(tmp_path / "tokens-0123-0-8-2.npy", np.zeros((40, 1, 16), np.uint16))
    with pytest.raises(ValueError, match="another tokenizer"):
        load_cached_tokens(tmp_path, vqvae, 40)
    own = tmp_path / f"tokens-{hash_tokens(vqvae)}-0-8-2.npy"
    np.save(own, np.zeros((9, 1, 16), np.uint16))
    with pytest.raises(ValueError, match="40"):
        load_cached_tokens(tmp_path, vqvae, 40)
    own.write_bytes(b"no array")
    rejects(lambda: load_cached_tokens(tmp_path, vqvae, 40), "damaged")


def test_a_folder_keeps_examples_and_lookup_uses_them(tmp_path):
    pipe = class_pipeline()
    pipe.example_tokens = torch.randint(64, (50, 16), generator=torch.Generator().manual_seed(1))
    pipe.save_pretrained(tmp_path)
    opened = LlamaGenPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert torch.equal(opened.example_tokens.long(), pipe.example_tokens) and opened.example_tokens.dtype == torch.int16
    assert opened.decoding_model(1.0).example_tokens is opened.example_tokens
    assert LlamaGenPipeline.from_pipe(opened).example_tokens is opened.example_tokens
    opened.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    assert opened(class_labels=3, accelerator="lookup", generator=generator, output_type="latent").stats.tokens == 16
    opened.example_tokens = None
    opened.save_pretrained(tmp_path)
    assert not (tmp_path / EXAMPLES_FILE).exists()


@pytest.mark.parametrize("damage", ["cut", "no tokens", "floats", "another grid", "another vocabulary"])
def test_damaged_examples_are_named(tmp_path, damage):
    from safetensors.torch import save_file

    pipe = class_pipeline()
    pipe.save_pretrained(tmp_path)
    tokens = torch.zeros(5, 9 if damage == "another grid" else 16, dtype=torch.int64)
    if damage == "another vocabulary":
        tokens += 64
    save_example_tokens(tokens, tmp_path)
    if damage == "cut":
        (tmp_path / EXAMPLES_FILE).write_bytes((tmp_path / EXAMPLES_FILE).read_bytes()[:20])
    if damage in ("no tokens", "floats"):
        save_file({"tokens" if damage == "floats" else "other": torch.zeros(5, 16)}, tmp_path / EXAMPLES_FILE)
    rejects(lambda: LlamaGenPipeline.from_pretrained(tmp_path), "examples")


def test_wide_vocabularies_take_wider_numbers(tmp_path):
    save_example_tokens(torch.tensor([[2**15 - 1]]), tmp_path)
    assert load_example_tokens(tmp_path).dtype == torch.int16
    save_example_tokens(torch.tensor([[2**15]]), tmp_path)
    assert load_example_tokens(tmp_path).tolist() == [[2**15]]


def test_the_command_writes_them_beside_the_model(tmp_path, data, monkeypatch):
    from typer.testing import CliRunner

    from recipes import looks
    from recipes.__main__ import app

    class_pipeline().save_pretrained(tmp_path)
    monkeypatch.setattr(looks, "_load_data", lambda folder: data)
    done = CliRunner().invoke(app, ["lookup-examples", "--model", str(tmp_path), "--count", "6", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["images"] == 6
    assert torch.equal(load_example_tokens(tmp_path).long(), choose_examples(tiny_vq(), data, 6))
    missing = CliRunner().invoke(app, ["lookup-examples", "--model", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "model" in missing.output
