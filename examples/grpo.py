"""Train an image model by reinforcement learning on a CPU: images by `gumbel`, rewards by a scorer, GRPO on a LoRA.

python examples/grpo.py "a fish" "a pizza"

GRPO (Shao et al. 2024, arXiv 2402.03300) generates a group of images per prompt, and makes those likelier that score above the
mean of their group. Its gradient is right if the images are samples of the model and their log-probabilities are those of the
model. Both hold for an exact method of vargen, as they do for one token at a time. Adapters change the weights in each step,
and nothing has to be rebuilt for that.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vargen
from vargen.scoring import open_scorer
from vargen.scoring.protocol import score_images

# Without guidance and filters, the sampling distribution is the model's softmax.
SAMPLING: dict[str, Any] = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
CLIP = 0.2  # of the ratio of probabilities


class LowRank(nn.Module):
    """A linear layer and a trained product of two thin matrices, zero at first (Hu et al. 2021, LoRA, arXiv 2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int = 8):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def attach_adapters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Put a `LowRank` around two projections of each layer, and freeze all else; returns the trained matrices by name."""
    transformer.requires_grad_(False)
    for layer in transformer.layers:
        layer.attention.wo = LowRank(layer.attention.wo)
        layer.feed_forward.w2 = LowRank(layer.feed_forward.w2)
    return {name: each for name, each in transformer.named_parameters() if each.requires_grad}


def generate(pipe: Any, prompts: list[str], count: int, seed: int, method: str) -> tuple[Any, float]:
    """Generate `count` images per prompt; returns the result, with log-probabilities, and the seconds."""
    seeds = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    result = pipe(
        prompts, num_images_per_prompt=count, accelerator=method, generator=seeds, output_type="pt", return_log_probs=True,
        **SAMPLING,
    )  # fmt: skip
    return result, time.perf_counter() - start


def compute_loss(pipe: Any, prompts: list[str], result: Any, rewards: Tensor) -> Tensor:
    """Return the clipped loss of GRPO; rewards float `[prompts, images of a group]`."""
    count = rewards.shape[1]
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    condition, _ = pipe.encode_condition(prompts)
    logits = pipe.transformer(result.tokens, condition.repeat(count)).logits.float()
    log_probs = logits.log_softmax(-1).gather(2, result.tokens[..., None])[..., 0]
    ratio = (log_probs - result.log_probs).exp()  # 1 in the first step after a roll-out, rounding aside
    assert (ratio.detach() - 1).abs().max() < 1e-2, "the log-probabilities are those of the model"
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Raise the score of a model's images by GRPO.")
    parser.add_argument("prompts", nargs="*", default=["a fish", "a pizza"])
    parser.add_argument("--model", default="emoji", help="a LlamaGen: packaged, a folder, or owner/name on the hub")
    parser.add_argument("--scorer", default="emoji-scorer", help="the reward; see vargen eval --help")
    parser.add_argument("--method", default="gumbel", help="an exact one")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--group", type=int, default=8, help="images per prompt and step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    pipe = vargen.open_pipeline(options.model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    scorer = open_scorer(options.scorer, torch.device("cpu"))
    adapters = attach_adapters(pipe.transformer)
    optimizer = torch.optim.AdamW(adapters.values(), lr=options.learning_rate, weight_decay=0.0)
    repeated = [prompt for prompt in options.prompts for _ in range(options.group)]
    _, sequential = generate(pipe, options.prompts, options.group, options.seed, "ar")
    spent, start = 0.0, time.perf_counter()
    for step in range(options.steps):
        result, seconds = generate(pipe, options.prompts, options.group, options.seed + step, options.method)
        rewards = score_images(scorer, result.images.float(), repeated).view(len(options.prompts), -1)
        loss = compute_loss(pipe, options.prompts, result, rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += seconds
        print(
            f"step {step}: reward {rewards.mean():.2f}, {result.stats.passes} passes, {seconds:.1f} s of roll-out", flush=True
        )
    share, before = spent / (time.perf_counter() - start), spent / options.steps / sequential
    print(f"roll-outs by {options.method} took {share:.0%} of the time; one took {before:.2f} of the time of one by ar")
    save_file({name: each.detach() for name, each in adapters.items()}, "adapters.safetensors")
    print("wrote adapters.safetensors")


if __name__ == "__main__":
    main()
