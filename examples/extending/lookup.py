"""A drafter: prompt lookup."""

from dataclasses import dataclass

import torch

from vargen.decoding import ChainDrafter, Draft


@dataclass(frozen=True)
class Lookup(ChainDrafter):
    """Drafts what followed the latest earlier occurrence of the root (prompt lookup decoding, Saxena 2023).

    Args:
        length: maximum number of draft tokens per pass.
    """

    length: int = 4

    def propose(self, state, noise, width):
        tokens, length = state.tokens, state.length[:, None]
        slots, position = (torch.arange(size, device=tokens.device) for size in (self.length, tokens.shape[1]))
        root = tokens.gather(1, length - 1)
        earlier = (tokens == root) & (position < length - 1)
        found = torch.where(earlier, position, -1).amax(1, keepdim=True)  # -1: the root has not occurred before
        source = found + 1 + slots
        valid = (found >= 0) & (source < length) & (length + slots < state.num_tokens)
        copied = tokens.gather(1, source.clamp(max=tokens.shape[1] - 1))
        return Draft(copied, self.chain, probs=None, valid=valid)
