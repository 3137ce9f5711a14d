"""What a figure says of its machine."""

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell which cores a process may use")
def test_cores_are_those_of_the_process_where_each_thread_is_bound_to_one():
    """As with OMP_PROC_BIND, without which figures of two threads are not steady: it binds the main thread to one core."""
    code = (
        "import os, threading; from vargen.evaluation.machine import usable_cores\n"
        "all_of_them = os.sched_getaffinity(0); done = threading.Event()\n"
        "other = threading.Thread(target=done.wait); other.start()\n"
        "os.sched_setaffinity(0, {min(all_of_them)})\n"
        "print(usable_cores(), len(all_of_them)); done.set()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == found[1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell which cores a process may use")
def test_cores_are_counted_before_torch_has_worked():
    """A warning about a busy machine comes first of all."""
    cores = len(os.sched_getaffinity(0))
    code = "from vargen.evaluation.machine import usable_cores; print(usable_cores())"
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(found.stdout) == cores
