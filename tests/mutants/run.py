"""Set known faults in the code, one at a time, and check that a test notices each.

    .venv/bin/python tests/mutants/run.py [NAME ...] [--no-baseline] [--write]

Names select some of the mutants; without one, all are set. A mutant is killed by a failed test, not by an error of collection
or import. Each file is restored after its tests, also if the run is interrupted or terminated. Files with uncommitted changes
are refused, so that `git checkout` restores what a killed run leaves. The exit code is 0 if all mutants are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

from mutant import Mutant, MutantError

ROOT, README = Path(__file__).resolve().parents[2], Path(__file__).with_name("README.md")
FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))["mutant"]
MUTANTS = [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in FAULTS]
TIMEOUT = 600  # seconds for the tests of one mutant
_BASELINE_TIMEOUT = 3600
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Errors of a fault that is not valid code, which any test notices.
_INVALID = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "UnboundLocalError")
_TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of the table -->)", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """The result of the tests of a mutant.

    Attributes:
        killed_by: node id of the test that failed; None if none did.
        reason: why the mutant is not killed.
    """

    mutant: Mutant
    killed_by: str | None
    reason: str
    seconds: float

    def describe(self) -> str:
        """Return the line that is printed."""
        verdict = f"killed by {self.killed_by}" if self.killed_by else f"SURVIVED ({self.reason})"
        return f"{self.mutant.name}: {self.mutant.breaks} {verdict}, {self.seconds:.0f} s"

    def to_row(self) -> str:
        """Return the row of the table."""
        killer = f"`{self.killed_by.partition('[')[0]}`" if self.killed_by else "**SURVIVED**"
        return f"| {self.mutant.name} | {self.mutant.breaks} | `{self.mutant.file}` | {killer} | {self.seconds:.0f} |"


def run_tests(tests: Sequence[str], timeout: float, *options: str) -> tuple[int | None, str | None, str]:
    """Run tests in a process of their own.

    Returns:
        The exit status, None after the timeout; the node id of the first failed test, if one failed by more than invalid code;
            and the output.
    """
    with tempfile.TemporaryDirectory(prefix="vargen-mutants-") as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        words += [f"--junit-xml={report}", "--tb=short", *options, *tests]
        # No bytecode of a fault may outlive it.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, None, ""
        finally:  # also if this run ends; processes that tests started end with theirs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, find_failure(report) if process.returncode == 1 else None, output


def find_failure(report: Path) -> str | None:
    """Return the node id of the first test in a JUnit report that failed, but not by code that is invalid."""
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        if failure is not None and not failure.get("message", "").startswith(_INVALID):
            return f"{case.get('file')}::{case.get('name')}"
    return None


@contextlib.contextmanager
def set_fault(mutant: Mutant) -> Iterator[None]:
    """Have a fault in its file while the block runs."""
    path, changed = ROOT / mutant.file, mutant.apply(ROOT)
    original, stat = path.read_bytes(), path.stat()
    try:
        path.write_bytes(changed)
        later = max(time.time_ns(), stat.st_mtime_ns + 2 * 10**9)  # Python compares seconds
        os.utime(path, ns=(later, later))
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def try_mutant(mutant: Mutant) -> Outcome:
    """Set a fault and run its tests."""
    started = time.monotonic()
    with set_fault(mutant):
        status, killer, output = run_tests(mutant.tests, TIMEOUT, "-x")
    reasons = {
        0: "all tests passed",
        None: f"no result after {TIMEOUT} s",
        1: "no test failed by itself: an error, or invalid code",
    }
    reason = reasons.get(status, f"pytest ended with {status}: not all tests could be collected")
    if killer is None and status != 0:
        print(output[-4000:], flush=True)
    return Outcome(mutant, killer, reason, time.monotonic() - started)


def select_mutants(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names; all without a name. Raises MutantError for an unknown name."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    if len(known) < len(MUTANTS):
        raise MutantError("the names of mutants must differ")
    if unknown := [name for name in names if name not in known]:
        raise MutantError(f"there is no mutant {unknown[0]}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(MUTANTS)


def check_tree(mutants: Sequence[Mutant]) -> None:
    """Raise MutantError if a mutant does not fit, its file has changes, or tests would import another tree."""
    for mutant in mutants:
        mutant.apply(ROOT)
    files = sorted({mutant.file for mutant in mutants})
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", *files], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if changed.stdout.strip():
        raise MutantError(f"commit or discard the changes of the files to change first:\n{changed.stdout.rstrip()}")
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != ROOT]
    found = importlib.util.find_spec("vargen")
    if found is None or found.origin is None or Path(found.origin).resolve() != ROOT / "vargen/__init__.py":
        place = None if found is None else found.origin
        raise MutantError(f"install this tree first (pip install -e .): tests would import {place}")


def check_baseline(mutants: Sequence[Mutant]) -> None:
    """Raise MutantError unless all tests of the mutants pass without a fault."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    whole = {test for test in tests if "::" not in test}
    tests = [test for test in tests if test in whole or test.partition("::")[0] not in whole]
    started = time.monotonic()
    status, _, output = run_tests(tests, _BASELINE_TIMEOUT)
    if status != 0:
        print(output[-8000:], flush=True)
        raise MutantError("the tests must pass without a fault first")
    print(f"without a fault: {output.strip().splitlines()[-1]} ({time.monotonic() - started:.0f} s)", flush=True)


def write_table(outcomes: Sequence[Outcome]) -> None:
    """Write the table of the README."""
    rows = ["| mutant | what it breaks | file | killed by | s |", "| --- | --- | --- | --- | ---: |"]
    rows += [outcome.to_row() for outcome in outcomes]
    text = README.read_text("utf-8")
    assert _TABLE.search(text), f"{README.name} has no place for the table"
    README.write_text(_TABLE.sub(lambda _: "\n".join(rows) + "\n", text), "utf-8")


def terminate(number: int, frame: FrameType | None) -> None:
    """End the run so that files are restored, whatever signals follow."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to set; default: all")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--write", action="store_true", help="write the table of README.md; only for all mutants")
    given = parser.parse_args()
    if given.write and given.names:
        parser.error("--write is for all mutants: leave the names out")
    for number in _SIGNALS:
        signal.signal(number, terminate)
    outcomes: list[Outcome] = []
    try:
        mutants = select_mutants(given.names)
        check_tree(mutants)
        if not given.no_baseline:
            check_baseline(mutants)
        for mutant in mutants:
            outcomes.append(try_mutant(mutant))
            print(outcomes[-1].describe(), flush=True)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    killed = sum(outcome.killed_by is not None for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed in {sum(outcome.seconds for outcome in outcomes):.0f} s")
    if given.write:
        write_table(outcomes)
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
