"""A method says exactly what it is, and is equal to itself however often it was bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from table_methods import METHODS, generate, table_model

from vargen.decoding import PRESETS, Accelerator, GroupedRule, Jacobi, Speculative, speculative_sampling
from vargen.evaluation.table_models import TableModel


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


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_is_not_changed_by_engines_which_share_none_of_its_buffers(name: str) -> None:
    method, before = METHODS[name], dict(vars(METHODS[name].drafter))
    first, second = (vars(method.bind(table_model(), 2)[0]).values() for _ in range(2))
    generate(method)
    assert vars(method.drafter) == before and not any(isinstance(each, torch.Tensor) for each in before.values())
    assert not {id(each) for each in first if isinstance(each, torch.Tensor)} & {id(each) for each in second}
