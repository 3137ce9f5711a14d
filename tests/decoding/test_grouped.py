"""Grouped acceptance: what it grants beyond the exact rule is what it reports, and no more than its budget."""

import pytest
import torch

from vargen.decoding import Draft, GroupedRule, Noise, Purpose, Tree
from vargen.verify.tables import TableModel


def window_of_laws(images: int, vocab: int, drafts: int, seed: int = 0) -> tuple[torch.Tensor, Draft, Noise]:
    """Random target probabilities and drafts from others, some of them filtered to a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, images, drafts + 1, vocab, generator=generator) ** 4
    weights[:, ::3] *= weights[:, ::3] > weights[:, ::3].median(-1, keepdim=True).values
    probs, drafted = weights / weights.sum(-1, keepdim=True)
    drafted = drafted[:, 1:]
    seeds, position = torch.arange(images), torch.arange(drafts + 1).expand(images, -1)
    tokens = Noise(seeds + 999, position[:, 1:]).sample(drafted, Purpose.TOKEN)
    return probs, Draft(tokens, Tree.make_chain(drafts), drafted), Noise(seeds, position, 7)


def plain_group(p: list[float], token: int, size: int, delta: float) -> set[int]:
    """The published group by sorting: the nearest ranks, half above and half below, filtered."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i != token, i))
    rank = order.index(token)
    near = order[max(0, rank - size // 2) : rank] + order[rank + 1 : rank + 1 + (size + 1) // 2]
    return {i for i in near if p[i] > 0 and abs(p[i] - p[token]) < delta}


@pytest.mark.parametrize("size", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("delta", [0.05, 0.3, 1.0])
def test_groups_equal_a_plain_walk_over_ranks(size, delta):
    probs, draft, _ = window_of_laws(20, 12, 4)
    rule = GroupedRule(size=size, delta=delta)
    member = rule.group_members(probs[:, :-1], draft.tokens)
    for image in range(20):
        for slot in range(4):
            token = int(draft.tokens[image, slot])
            found = set(member[image, slot].tolist()) - {token}
            assert found == plain_group(probs[image, slot].tolist(), token, size, delta)


@pytest.mark.parametrize("delta", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_draft_is_accepted_by_the_ratio_of_the_sums_over_its_group(delta, sampled):
    """Each member counts once, and those that the filters exclude do not count."""
    probs, draft, _ = window_of_laws(20, 12, 4)
    rule = GroupedRule(size=6, delta=delta)
    found = rule.accept_prob(probs[:, :-1], draft.probs if sampled else None, draft.tokens)
    for image in range(20):
        for slot in range(4):
            token, p = int(draft.tokens[image, slot]), probs[image, slot].tolist()
            group = [token, *plain_group(p, token, 6, delta)]
            q = sum(draft.probs[image, slot, group].tolist()) if sampled else 1.0
            assert float(found[image, slot]) == pytest.approx(sum(p[member] for member in group) / q, rel=1e-5)


def test_the_distance_filter_leaves_out_codes_that_look_different():
    probs, draft, _ = window_of_laws(10, 12, 4)
    codes = torch.nn.functional.normalize(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), dim=-1)
    model = TableModel(vocab=12, tokens=4)
    model.codebook = codes
    rule = GroupedRule(size=12, delta=1.0, distance=0.8).bind(model)
    assert rule == GroupedRule(size=12, delta=1.0, distance=0.8)  # a bound rule is still the same method
    member = rule.group_members(probs[:, :-1], draft.tokens)
    gap = (codes[member] - codes[draft.tokens][..., None, :]).square().sum(-1)
    assert (gap < 0.8).all()
    loose = GroupedRule(size=12, delta=1.0).group_members(probs[:, :-1], draft.tokens)
    assert (member != draft.tokens[..., None]).sum() < (loose != draft.tokens[..., None]).sum()
