import torch
from typical import typical

from vargen.decoding import Draft, Noise, Tree


def test_typical_accepts_what_the_target_finds_typical():
    probs = torch.tensor([[[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3]]]).expand(2, 3, 3)
    draft = Draft(torch.tensor([[0, 2], [2, 0]]), Tree.make_chain(2), torch.full((2, 2, 3), 1 / 3))
    noise = Noise(torch.arange(2), torch.arange(3).expand(2, 3), step=1)
    verdict = typical(probs, draft, noise, torch.zeros(2))
    assert verdict.count.tolist() == [2, 1]  # the root and the likely token; the root alone
    assert verdict.relaxation.tolist() == [0.0, 0.0]  # p/q accepts the likely token, too
    certain = Draft(draft.tokens, draft.tree, torch.tensor([[0.9, 0.05, 0.05]]).expand(2, 2, 3))
    relaxation = typical(probs, certain, noise, torch.zeros(2)).relaxation[0]
    assert torch.isclose(relaxation, torch.tensor(1 - 0.7 / 0.9)), "accepted for sure, where p/q accepts with 0.7 / 0.9"
