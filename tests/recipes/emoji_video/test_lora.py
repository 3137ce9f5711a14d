"""Training a LoRA for start images: its passes and gradients are those of the network, and the network stays as it is."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_clips import CPU, SHAPE, VAE, Bank, data
from tiny_stills import stills
from tiny_training import check_resumes

from recipes.emoji_video import lora as trainer
from recipes.emoji_video.batches import ClipBatch, encode_captions
from recipes.emoji_video.teacher_forcing import CleanContext
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.lora import CausalVideoLoRA
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.augment import SamplingWeights
from vargen.training.config import Schedule

CONFIG = trainer.LoRAConfig(
    model={"rank": 2}, schedule=Schedule(steps=6, learning_rate=1e-2, warmup_steps=1), batch_size=4, max_caption_tokens=6,
    still_fraction=0.5, still_weights=SamplingWeights(groups={}), euler_steps=4, levels=[1000, 500],
    self_rollout_probability=0.5, evaluate_every=4, checkpoint_every=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_a_text_encoder(monkeypatch):
    monkeypatch.setattr(trainer, "CaptionBank", Bank)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The folders of an autoencoder and of a network, both untrained."""
    torch.manual_seed(0)
    vae, network = tmp_path_factory.mktemp("vae"), tmp_path_factory.mktemp("network")
    CausalVideoVAE(**VAE).save_pretrained(vae)
    CausalVideoTransformer(**SHAPE).save_pretrained(network)
    return vae, network


def train(folder, parts, config=CONFIG):
    vae, network = parts
    return trainer.train_video_lora(config, data(), vae, vae, folder, CPU, network, stills())


def example(network, count=2, frames=6):
    clean = torch.randn(count, frames, 4, 2, 2)
    batch = ClipBatch(clean, torch.ones(count, frames, 1, 2, 2), ["a", "b"], torch.full((count,), 2))
    return batch, encode_captions(network, Bank(), batch.texts)


def test_blocks_after_a_clean_context_are_predicted_as_by_the_network(parts):
    network = CausalVideoTransformer.from_pretrained(parts[1])
    batch, text = example(network)
    b, noisy, steps = network.geometry.block_frames, torch.randn_like(batch.clean), torch.rand(2, 6) * 1000
    expected = network(noisy, steps, text, context=batch.clean)[:, b:]
    given = CleanContext(network, batch.clean, text)
    found = given.velocity(network, noisy[:, b:], steps[:, b:], text)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given.velocity(network, noisy[:, b:], steps[:, b:], text), expected, rtol=1e-5, atol=1e-6)
    other = CleanContext(network, batch.clean.roll(1, 0), text).velocity(network, noisy[:, b:], steps[:, b:], text)
    assert (other - expected).abs().max() > 1e-3


def test_the_gradients_are_those_of_the_product(parts):
    network, original = (CausalVideoTransformer.from_pretrained(parts[1]) for _ in range(2))
    size = network.config
    lora = CausalVideoLoRA(size.dim, size.ffn_dim, size.num_layers, 2)
    for parameter in lora.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    lora.write(network, original)
    lora.require_gradients(network)
    batch, _ = example(network)

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self):
            text = encode_captions(network, Bank(), batch.texts)
            return network(batch.clean, torch.full((2,), 300.0), text).square().mean()

    Loss()().backward()
    lora.take_gradients(network)
    assert all(parameter.grad is None for parameter in network.parameters())
    updates = list(lora.updates())
    pairs = [(update.A.detach().requires_grad_(), update.B.detach().requires_grad_()) for _, update in updates]
    matrices = {
        f"network.{name}.weight": original.get_submodule(name).weight.detach() + B @ A
        for (name, _), (A, B) in zip(updates, pairs, strict=True)
    }
    torch.func.functional_call(Loss(), matrices, ()).backward()
    for (_, update), (A, B) in zip(updates, pairs, strict=True):
        torch.testing.assert_close(update.A.grad, A.grad)
        torch.testing.assert_close(update.B.grad, B.grad)
        assert A.grad.abs().max() > 0 and B.grad.abs().max() > 0


def test_training_writes_a_lora_and_keeps_the_network(tmp_path, parts):
    found = train(tmp_path / "run", parts)
    assert set(found) == {"motion", "static_fraction", "psnr"} and all(np.isfinite(list(found.values())))
    lora = CausalVideoLoRA.from_pretrained(tmp_path / "run/lora")
    assert lora.config.rank == 2 and any(update.B.abs().max() > 1e-4 for _, update in lora.updates())
    settings = json.loads((tmp_path / "run/sampling.json").read_text())
    assert settings["image"] and settings["image_frames"] == SHAPE["block_frames"] and "bouncing" in settings["motions"]
    assert (tmp_path / "run/samples.png").is_file()


def test_it_learns(tmp_path, parts):
    vae, network = parts
    longer = replace(CONFIG, schedule=Schedule(steps=60, learning_rate=1e-2, warmup_steps=1), self_rollout_probability=0.0)
    run = trainer.LoRATrainer(longer, data(), vae, vae, tmp_path / "run", CPU, network, stills())
    batch = run.batches(0)
    before = run.loss(0, batch)[0].item()
    run.batches = lambda step: batch
    for step in range(60):
        run.step(step)
    assert run.loss(0, batch)[0].item() < 0.8 * before
    names = [
        name for name, value in run.network.state_dict().items() if not torch.equal(value, run.original.state_dict()[name])
    ]
    assert names and all(name.startswith("blocks.") and name.endswith("weight") and "norm" not in name for name in names)


def test_a_killed_run_resumes(tmp_path, parts):
    check_resumes(lambda folder: train(folder, parts), tmp_path, killed_at=5, part="lora")


def test_what_does_not_fit_is_refused(tmp_path, parts):
    rejects(lambda: replace(CONFIG, model={"rank": 2, "dim": 8}), "model")
    rejects(lambda: replace(CONFIG, sampling_levels_fraction=2.0), "sampling_levels_fraction")
    rejects(lambda: train(tmp_path / "run", parts, replace(CONFIG, model={"rank": 0})), "rank")
