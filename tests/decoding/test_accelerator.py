"""A method says exactly what it is, and is equal to itself however often it was bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from table_methods import METHODS, generate, table_model

from vargen.decoding import (
    PRESETS,
    Accelerator,
    Draft,
    GroupedRule,
    Jacobi,
    Noise,
    Purpose,
    Speculative,
    Tree,
    shared_noise,
    speculative_sampling,
)
from vargen.verify.tables import TableModel


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_what_they_are_in_plain_values(name: str) -> None:
    assert json.loads(json.dumps(PRESETS[name].spec())) == PRESETS[name].spec()


def test_specs_differ_wherever_methods_do() -> None:
    methods = [
        *PRESETS.values(),
        *(Accelerator(drafter=Jacobi(width), acceptance=speculative_sampling) for width in (8, 32)),
        Accelerator(drafter=Jacobi(16, "maximal"), acceptance=GroupedRule(size=15)),
        Accelerator(drafter=Speculative(3), acceptance=speculative_sampling),
    ]
    specs = [json.dumps(method.spec()) for method in methods]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("part", [lambda step: step, TableModel(vocab=4, tokens=9)])
def test_what_cannot_be_named_is_an_error_rather_than_left_out(part: Any) -> None:
    drafter = Jacobi(4, part) if callable(part) else Speculative(model=part)
    with pytest.raises(ValueError, match="cannot say what"):
        Accelerator(drafter=drafter, acceptance=speculative_sampling).spec()


def test_a_rule_bound_to_a_model_is_still_equal_to_itself() -> None:
    model = TableModel(vocab=4, tokens=9)
    model.codebook = torch.eye(4)
    rule = GroupedRule(distance=1.0)
    assert rule.bind(model) == rule and rule.bind(model) is not rule and rule.codebook is None


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_is_not_changed_by_engines_which_share_none_of_its_buffers(name: str) -> None:
    method, before = METHODS[name], dict(vars(METHODS[name].drafter))
    first, second = (vars(method.bind(table_model(), 2)[0]).values() for _ in range(2))
    generate(method)
    assert vars(method.drafter) == before and not any(isinstance(each, torch.Tensor) for each in before.values())
    assert not {id(each) for each in first if isinstance(each, torch.Tensor)} & {id(each) for each in second}


def test_ancestors_are_packed_as_words() -> None:
    generator = torch.Generator().manual_seed(0)
    parents = [-1, *(int(torch.randint(slot, (), generator=generator)) for slot in range(1, 130))]
    tree = Tree.from_parents(tuple(parents))
    assert tree.ancestor_bits.shape == (130, 3) and tree.ancestor_bits.dtype == torch.int64
    bits = (tree.ancestor_bits[:, :, None] >> torch.arange(64)) & 1
    assert torch.equal(bits.flatten(1)[:, :130].bool(), tree.ancestors)


def test_trees_per_image_are_those_of_each_image() -> None:
    rows = [(-1, 0, 0, 1, 1, 2), (-1, 0, 1, 2, 3, 4), (-1, 0, 0, 0, 0, 0)]
    together = Tree.batched(torch.tensor(rows), max_path=6, max_children=len(rows[0]) - 1)
    for row, parents in enumerate(rows):
        alone = Tree.from_parents(parents)
        assert torch.equal(together.ancestors[row], alone.ancestors) and torch.equal(together.depth[row], alone.depth)
        assert torch.equal(together.ancestor_bits[row], alone.ancestor_bits)


def test_shared_noise_judges_a_tree_of_its_own_for_each_image() -> None:
    rows = [(-1, 0, 0, 1, 1), (-1, 0, 1, 2, 0)]
    probs = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(6, (2, 4), generator=torch.Generator().manual_seed(4))
    tree = Tree.batched(torch.tensor(rows), max_path=4, max_children=len(rows[0]) - 1)
    noise = Noise(torch.arange(2), tree.depth + 1, step=2)
    agreeing = torch.stack([noise.sample(probs, Purpose.TOKEN)[row][list(rows[row][1:])] for row in range(2)])
    agreeing[[0, 0, 1], [1, 3, 3]] += 1  # siblings differ
    for drafted in (tokens, agreeing % 6):
        together = shared_noise(probs, Draft(drafted, tree), noise, torch.zeros(2))
        for row, parents in enumerate(rows):
            one = slice(row, row + 1)
            alone_noise = Noise(noise.seeds[one], noise.position[one], 2)
            alone = shared_noise(probs[one], Draft(drafted[one], Tree.from_parents(parents)), alone_noise, torch.zeros(1))
            assert alone.count[0] == together.count[row] and alone.next_token[0] == together.next_token[row]
