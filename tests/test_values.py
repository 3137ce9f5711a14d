"""One reading of numbers for every setting and count: Python's and NumPy's alike, and nothing that only looks like one."""

import inspect
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from rejects import rejects

from vargen import Accelerator
from vargen.decoding import GroupedRule, Jacobi, Sampling, Speculative
from vargen.models.guidance import Guidance
from vargen.pipelines import validation
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.values import OPTIONS, Option, parse_float, parse_int, short_repr


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.float16(2), np.float64(2), np.int64(2), np.uint8(2), Fraction(2)])
def test_real_numbers_are_read(value):
    assert parse_float(value) == 2.0 and type(parse_float(value)) is float


@pytest.mark.parametrize(
    "value",
    [True, np.bool_(True), math.nan, math.inf, np.float32("nan"), 10**400, "2", None, 2j, Decimal(2), torch.tensor(2.0)],
)
def test_what_is_no_finite_real_number_is_not(value):
    assert parse_float(value) is None


def test_whole_numbers_are_read_within_their_bounds():
    assert [parse_int(value, 1) for value in (1, np.int64(1), np.uint8(200), 10**400)] == [1, 1, 200, 10**400]
    assert all(type(parse_int(value, 1)) is int for value in (1, np.int64(1)))
    assert [parse_int(value, 1, 5) for value in (0, 6, 2.0, True, np.bool_(True), np.float32(2), "2", None)] == [None] * 8


def test_a_quoted_value_is_short_and_never_fails():
    class Broken:
        def __repr__(self):
            raise ZeroDivisionError

    assert short_repr("a cat") == "'a cat'"
    assert len(short_repr("a" * 10**6)) == 100 and len(short_repr(10**4000)) == 100
    assert short_repr(10**5000) == "a int that cannot be printed" and "Broken" in short_repr(Broken())


NUMPY = [
    (lambda x: Sampling(temperature=x).temperature, np.float32(0.5)),
    (lambda x: Sampling(top_p=x).top_p, np.float16(0.5)),
    (lambda x: Sampling(top_k=x).top_k, np.int64(7)),
    (lambda x: validation.validate_sampling({"guidance_scale": x})[0], np.float32(2.5)),
    (lambda x: Guidance(2.0, x).interval, np.int32(3)),
    (lambda x: validation.validate_num_images(x, 1), np.int64(3)),
    (lambda x: validation.resolve_class_labels(x, 10)[0], np.int64(3)),
    (lambda x: validation.resolve_class_labels([x], 10)[0], np.uint8(3)),
    (lambda x: Jacobi(window=x).window, np.int64(8)),
    (lambda x: Speculative(length=x).length, np.int64(3)),
    (lambda x: GroupedRule(size=x).size, np.int64(5)),
    (lambda x: GroupedRule(delta=x).delta, np.float32(0.5)),
    (lambda x: GroupedRule(budget=x).budget, np.float32(0.5)),
]


@pytest.mark.parametrize(("read", "value"), NUMPY)
def test_every_setting_takes_numpys_numbers_and_keeps_pythons(read, value):
    assert read(value) == value and type(read(value)) in (int, float)


def test_parts_of_an_accelerator_are_objects_not_classes():
    rejects(lambda: Accelerator(drafter=Jacobi), "drafter", TypeError)
    rejects(lambda: Jacobi(window=Jacobi), "window")
    rejects(lambda: Jacobi(window="wide"), "window")
    rejects(lambda: Jacobi(coupling=dict), "coupling", TypeError)
    rejects(lambda: Speculative(model=5), "model", TypeError)
    rejects(lambda: Speculative(shared_noise="no"), "shared_noise", TypeError)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=list(OPTIONS))
def test_an_option_has_bounds_within_which_the_control_of_the_page_stays(option: Option) -> None:
    low, high, step = option.slider
    assert step > 0 and (option.range.optional or option.range.check(option.name, low) == low)
    assert high <= option.range.most
    for wrong in (option.range.least - 1, "much", True, float("nan"), [1], *([0.0] if option.range.open_below else [])):
        rejects(lambda wrong=wrong: option.range.check(option.name, wrong), option.name, ValueError)  # type: ignore[misc]


def test_the_pipeline_and_the_page_take_the_same_ones() -> None:
    assert set(OPTIONS) <= set(inspect.signature(LlamaGenPipeline.__call__).parameters)
    assert {"guidance_scale", *Sampling.__dataclass_fields__} == set(OPTIONS)
