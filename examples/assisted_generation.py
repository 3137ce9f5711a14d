"""Exact coupled sampling inside the generation loops of transformers.

python examples/assisted_generation.py

Decoding is greedy on log p + G, where G is Gumbel noise that is a function of the seed and of the position alone (Maddison et
al. 2014). That is exact sampling, and any method whose greedy output equals greedy decoding, such as the assisted generation of
transformers, then returns the sampled tokens of plain decoding, whatever it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

from vargen.decoding import Noise, Purpose, Sampling
from vargen.decoding.sampling import to_probs


class SharedNoiseLogitsProcessor(LogitsProcessor):
    """Replaces logits by log p + G, for `generate(do_sample=False, logits_processor=[...])`.

    It comes after all processors that change the distribution. Temperature and filters are given here, because transformers
    applies its own only when it samples.

    Args:
        seeds: one integer per sequence of the batch.
        prompt_length: number of tokens of the (padded) prompt; the token after them has position 0.
        sampling: temperature and filters. Default: the unfiltered softmax.
        ids: int64 `[V]`, the ids that may occur, such as those of image tokens; noise belongs to their places in this list.
            Default: all ids.
    """

    def __init__(
        self,
        seeds: Sequence[int] | Tensor,
        prompt_length: int,
        sampling: Sampling | None = None,
        ids: Tensor | None = None,
    ):
        self.seeds = torch.as_tensor(seeds, dtype=torch.int64).reshape(-1)
        self.prompt_length, self.sampling = prompt_length, Sampling() if sampling is None else sampling
        self.ids = ids

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores `[B, V]` whose argmax is the sampled token."""
        position = torch.full((len(scores), 1), input_ids.shape[1] - self.prompt_length, device=scores.device)
        possible = scores if self.ids is None else scores[:, self.ids.to(scores.device)]
        probs = to_probs(possible[:, None], self.sampling)
        noise = Noise(self.seeds.to(scores.device), position).exponential(probs.shape[-1], Purpose.TOKEN)
        noisy = (probs / noise)[:, 0].log()
        if self.ids is None:
            return noisy
        return torch.full_like(noisy, float("-inf"))[:, :1].repeat(1, scores.shape[1]).index_copy(1, self.ids, noisy)


if __name__ == "__main__":
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()  # random weights; take a model of your own
    prompt = torch.tensor([[5, 17, 42, 5, 17]])
    noise = SharedNoiseLogitsProcessor(seeds=[7], prompt_length=prompt.shape[1])
    options = {"do_sample": False, "max_new_tokens": 20, "logits_processor": [noise]}
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assisted = model.generate(prompt, attention_mask=torch.ones_like(prompt), prompt_lookup_num_tokens=4, **options)
    print(f"the same sampled tokens: {torch.equal(plain, assisted)}")
