"""Videos of the pipeline against a plain loop: without cache, each pass over the whole video so far, each block in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_video import Placed
from tiny_video_folder import HOW, video_folder

from vargen import open_pipeline
from vargen.decoding import VideoMethod
from vargen.decoding.video.denoising import make_block_noise
from vargen.pipelines.causal_video import CausalVideoPipeline

PROMPT, BLOCKS, FRAMES = "a waving cat", 6, 2
MIXED = VideoMethod(policy=Placed("tddtdt"), target_blocks=())
SAMPLING: dict[str, dict[str, Any]] = {
    "fresh noise": {},
    "velocity, guidance": {"euler": True, "levels": [1.0, 0.8, 0.3], "guidance": 2.0},
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> CausalVideoPipeline:
    return open_pipeline(video_folder(tmp_path_factory.mktemp("runs")))


def plain_loop(
    pipe: Any, makers: Sequence[str], noise_seed: int, settings: dict[str, Any], window: Any, sinks: int
) -> torch.Tensor:
    """Latents `[F, C, Y, X]`: x = (1 - s) clean + s noise, and the network predicts noise - clean."""
    features, mask = pipe.encode_prompt(PROMPT)
    texts = [features[:, mask[0]]]
    if settings["guidance"] != 1:
        texts.append(pipe.encode_empty_caption().caption_embeds)
    video, levels = torch.zeros(1, 0, 4, 2, 2), settings["levels"]
    for number, maker in enumerate(makers):
        network = pipe.transformer if maker == "target" else pipe.draft_transformer

        def noise(step: int, block: int = number) -> torch.Tensor:
            return make_block_noise(noise_seed, block, step, (FRAMES, 4, 2, 2), torch.device("cpu"))

        x = noise(0)
        for step, level in enumerate(levels):
            timesteps = torch.tensor([[0.0] * video.shape[1] + [1000 * level] * FRAMES])
            whole = torch.cat([video, x], 1)
            found = [
                network(whole, timesteps, network.text_cache(text), window=window, sinks=sinks)[:, -FRAMES:] for text in texts
            ]
            velocity = found[0] if len(found) == 1 else found[1] + settings["guidance"] * (found[0] - found[1])
            clean = x - level * velocity
            if step + 1 < len(levels):
                s = levels[step + 1]
                x = x + (s - level) * velocity if settings["euler"] else (1 - s) * clean + s * noise(step + 1)
        video = torch.cat([video, clean], 1)
    return video[0]


@pytest.mark.parametrize(("method", "window", "sinks", "sampling"), [
    (MIXED, None, 0, "fresh noise"), (MIXED, 6, 2, "fresh noise"), (MIXED, 4, 0, "fresh noise"),
    (MIXED, 6, 2, "velocity, guidance"), ("target", 6, 2, "fresh noise"), ("target", None, 0, "velocity, guidance"),
])  # fmt: skip
@torch.no_grad()
def test_blocks_are_those_of_a_loop_without_cache(
    opened: CausalVideoPipeline, method: Any, window: int | None, sinks: int, sampling: str
) -> None:
    settings = {**HOW, **SAMPLING[sampling]}
    networks = {"draft_transformer": opened.draft_transformer, "defaults": settings}
    pipe = CausalVideoPipeline(opened.vae, opened.transformer, opened.text_encoder, opened.tokenizer, **networks)
    pipe.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"num_blocks": BLOCKS, "window": window, "sinks": sinks, "output_type": "latent"}
    found = pipe(PROMPT, accelerator=method, generator=torch.Generator().manual_seed(3), **options)
    seed = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(3)))
    expected = plain_loop(pipe, found.stats.sources, seed, settings, window, sinks)
    assert method != MIXED or set(found.stats.sources) == {"target", "draft"}
    torch.testing.assert_close(found.frames[0], expected, atol=5e-5, rtol=1e-4)
