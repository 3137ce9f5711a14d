"""A drafter that reports a wrong q: `vargen verify dishonest:wrong` finds it."""

from dataclasses import replace

import torch
from lookup import Lookup

from vargen.decoding import Accelerator, speculative_sampling


class Dishonest(Lookup):
    def propose(self, state, noise, width):
        draft = super().propose(state, noise, width)
        return replace(draft, probs=torch.full((*draft.tokens.shape, state.vocab), 1 / state.vocab))


wrong = Accelerator("dishonest", Dishonest(), speculative_sampling)
