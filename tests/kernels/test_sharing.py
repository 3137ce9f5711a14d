"""Products that several cores share: the same sums by any number of threads, also when passes run side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from int8_passes import Images, compiled_code, quantized_transformer
from waiting import wait_until

from vargen.kernels.int8 import cores, format
from vargen.kernels.int8.format import ENDED, MOST_PARTS, make_team
from vargen.kernels.int8.load import LANGUAGE_PASS
from vargen.models.transformers.int8 import Int8Product


@pytest.fixture
def compiled() -> Any:
    return compiled_code(LANGUAGE_PASS)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def make_products(compiled: Any, monkeypatch: pytest.MonkeyPatch, N: int) -> tuple[Int8Product, Int8Product]:
    """The same product by one core, and by all."""
    weight, bias = torch.randn(N, 96, generator=torch.Generator().manual_seed(N)), torch.arange(N) / N
    alone = Int8Product(weight, bias, compiled)
    monkeypatch.setattr(format, "_SHARED_WEIGHTS", 0)
    shared = Int8Product(weight, bias, compiled)
    assert alone.team[MOST_PARTS] == 1 < shared.team[MOST_PARTS]
    return alone, shared


@pytest.mark.parametrize("N", [10, 64, 65, 640, 1090, 4000])
def test_shared_products_have_the_bits_of_one_core(
    N: int, compiled: Any, three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, shared = make_products(compiled, monkeypatch, N)
    for rows in (1, 2, 7, 33):
        x = torch.randn(rows, 96)
        expected = alone(x)
        assert all(torch.equal(shared(x), expected) for _ in range(20))


def test_a_helper_computes_parts_until_the_pass_ends(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    product = make_products(compiled, monkeypatch, 4000)[1]
    x, team = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32), product.team
    wide, scale, pairs = np.zeros((8, 96), np.uint8), np.zeros(8, np.float32), np.zeros((8, 96), np.int16)
    sums, out = np.zeros(8 * len(product.matrix.start), np.int32), np.zeros((8, 4000), np.float32)
    compiled.run_linear(product.matrix, np.zeros(4000, np.float32), x, wide, scale, pairs, team, sums, out)
    expected, parts = sums.copy(), int(team[8])  # all are done
    sums[:], team[8] = 0, 0
    team[0] = (team[0] >> 32) + 1 << 32 | parts << 16  # a product that the caller's core does not compute
    helper = threading.Thread(target=compiled.help_pass, args=(team, 7))
    helper.start()
    try:
        wait_until(lambda: team[8] == parts)
        assert helper.is_alive()
    finally:
        team[ENDED] = 7
        helper.join(20)
    assert not helper.is_alive() and (sums == expected).all()


def test_passes_side_by_side_do_not_meet(compiled: Any, three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []
    for N in (700, 1300, 1900):
        monkeypatch.setattr(format, "_SHARED_WEIGHTS", 2**24)
        pairs.append(make_products(compiled, monkeypatch, N))
    x = torch.randn(5, 96)

    def run(pair: tuple[Int8Product, Int8Product]) -> bool:
        expected = pair[0](x)
        return all(torch.equal(pair[1](x), expected) for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, pairs))


def test_a_pass_has_the_bits_of_operators(compiled: Any, three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "_SHARED_WEIGHTS", 0)
    model = quantized_transformer(n_layer=3, n_kv_head=2)
    ours, expected = (Images(model, backend, [0, 1], [5, 3]) for backend in ("compiled", "operators"))
    tokens = ours.tokens(5, 4)
    for found, known in zip(ours.feed(tokens), expected.feed(tokens), strict=True):
        assert torch.equal(found, known)
    assert ours.cache.buffers.team[ENDED] > 0, "helpers were asked"


def test_one_thread_asks_for_no_help(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cores, "_helpers", None)
    with cores.share_products(compiled, make_team(2**24 + 1)):
        pass
    assert [make_team(weights)[MOST_PARTS] > 1 for weights in (2**24, 2**24 + 1)] == [False, True]
