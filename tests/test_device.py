"""Threads: what a person chose stays, what is measured must pay, and the waiting threads of a program sleep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rejects import rejects

from vargen import device


@pytest.fixture(autouse=True)
def nobody_chose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no number of threads was chosen, whatever the test run around it did."""
    for name in device.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before, fixed = torch.get_num_threads(), device._state.fixed
    device._state.fixed = None
    torch.set_num_threads(device.available_cores())
    yield
    device._state.fixed = fixed
    torch.set_num_threads(before)


def test_a_choice_of_a_person_is_found_wherever_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_cores", lambda: 8)
    monkeypatch.setattr(device, "physical_cores", lambda: 4)
    for left_alone in (8, 4):  # what torch begins with
        torch.set_num_threads(left_alone)
        assert device.user_thread_count() is None
    torch.set_num_threads(3)
    assert device.user_thread_count() == (3, "torch.set_num_threads")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert device.user_thread_count() == (3, "OMP_NUM_THREADS")
    device.set_threads(1)
    assert device.user_thread_count() == (1, "--threads")


@pytest.mark.parametrize("count", [0, -1, 100_000, 10**30, True, 1.5])
def test_numbers_that_no_machine_has_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"threads must be a whole number from 1 to {os.cpu_count()}, got {count}"):
        device.set_threads(count)
    assert device.user_thread_count() is None


def test_a_block_ends_with_the_number_from_before_however_it_ends() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), device.limit_threads(1):
        assert torch.get_num_threads() == 1
        with device.limit_threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
    assert device.user_thread_count() is None


def test_blocks_beside_each_other_leave_the_number_from_before() -> None:
    """Two threads of Python whose blocks overlap: the one that ends last must not restore the other's number."""
    before = torch.get_num_threads()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with device.limit_threads(1):
            inside.set()
            assert leave.wait(20)

    beside = threading.Thread(target=other)
    with device.limit_threads(2):
        beside.start()
        assert inside.wait(20)
    leave.set()
    beside.join(20)
    assert torch.get_num_threads() == before
    assert device.user_thread_count() is None


def test_importing_the_package_lets_waiting_threads_sleep_by_default() -> None:
    code = "import os, vargen;print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"

    def policy(**own: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        return subprocess.run(
            [sys.executable, "-c", code], env={**inherited, **own}, capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()

    assert policy() == "passive None"
    assert policy(OMP_WAIT_POLICY="active") == "active None"
    assert policy(GOMP_SPINCOUNT="100") == "None 100"


@pytest.mark.parametrize("wrong", ["gpu", "cuda:999", 3.5, "", torch.float32])
def test_an_invalid_device_is_refused(wrong: Any) -> None:
    rejects(lambda: device.select_device(wrong), "device")
    assert device.select_device(torch.device("cpu")) == device.select_device("cpu") == torch.device("cpu")
