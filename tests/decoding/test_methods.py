"""Methods by name, with settings: one syntax for all families, and a setting that is wrong is named with what is allowed."""

import json
from typing import Any

import pytest
import torch
from table_methods import METHODS, generate, table_model

from vargen.decoding import PRESETS, Accelerator, GroupedRule, Jacobi, Speculative, resolve_method, speculative_sampling
from vargen.decoding.methods import list_settings
from vargen.verify.tables import TableModel


@pytest.mark.parametrize("wrong", ["zzz", "-7.5", "nan"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_wrong_value_of_any_setting_is_named(name: str, wrong: str) -> None:
    family = PRESETS[name].paradigm
    for setting, (_, field) in list_settings(PRESETS[name]).items():
        if wrong == "-7.5" and field in ("tau", "delta", "low"):
            continue  # a threshold of scores may be any number
        with pytest.raises(ValueError, match=f"{name}:{setting}") as caught:
            resolve_method(f"{name}:{setting}={wrong}", family)
        assert field in str(caught.value).split(": ", 1)[1], caught.value


@pytest.mark.parametrize("preset", PRESETS)
def test_an_unknown_setting_names_the_known_ones(preset: str) -> None:
    family = PRESETS[preset].paradigm
    with pytest.raises(ValueError, match="has no setting 'wndow'"):
        resolve_method(f"{preset}:wndow=8", family)


def test_settings_of_every_family_reach_their_parts() -> None:
    assert resolve_method("gumbel:window=8").drafter.window == 8
    assert resolve_method("code:until.1=-3", "next-scale").stages[0].until == -3
    made = resolve_method("sdvg:tau=2.5,target_blocks=0+3,lazy=false", "video")
    assert (made.threshold, made.target_blocks, made.lazy) == (2.5, (0, 3), False)
    assert resolve_method("stride:every=4", "video").policy.every == 4


def test_a_method_is_called_as_it_was_written_and_a_bare_name_is_the_preset() -> None:
    assert resolve_method("gumbel:window=8").name == "gumbel:window=8"
    assert resolve_method("gumbel") is PRESETS["gumbel"]


@pytest.mark.parametrize("wrong", ["gumbel:window", "gumbel:=8", "gumbel:window=8,window=9", "gumbol:window=8", "sdvg:tau=1"])
def test_what_is_written_wrongly_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        resolve_method(wrong)


# -- what a method says of itself --------------------------------------------------------------------------------------


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
