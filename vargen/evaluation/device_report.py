"""The report of a device: parts that check or measure something, each in its own process and within its time.

A part is a generator of table rows. What it has yielded is on disk, so a part that runs out of time, fails or crashes the
driver keeps its finished rows and never stops the other parts.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vargen.files import atomic_file
from vargen.values import short_repr

Row = dict[str, str | int | float]
_GRACE = 2.0  # seconds after which a part that does not stop between two rows is killed
_MINIMUM = 3.0  # seconds below which a part is not started
_START = time.monotonic()  # in a part's process: the imports are part of its time
_REASON_LINES = 12  # last lines of standard error that are kept of a part that crashed


class SkipPart(Exception):
    """Raised by a part that does not apply to the device; the message is the reason."""


class WrongResult(Exception):
    """Raised by a part that has found wrong results on the device; the message names them."""


@dataclass(frozen=True)
class Part:
    """A part of the report.

    Attributes:
        title: what its table shows.
        run: yields rows for a device, such as "cuda". All rows of a part have the same columns, in the same order.
        share: of the time that is left, relative to the shares of later parts.
    """

    title: str
    run: Callable[[str], Iterator[Row]]
    share: float = 1.0


@dataclass
class PartResult:
    """What a part found.

    Attributes:
        status: "done"; "stopped" after the part's time, with the rows until then; "skipped"; or "failed".
        reason: why it was skipped, or the full error.
        command: repeats the part alone.
        rows: a table; all rows have the same columns.
    """

    name: str
    title: str
    status: str = "stopped"
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    rows: list[Row] = field(default_factory=list)


def run_part(part: Part, result: PartResult, device: str, seconds: float, save: Callable[[PartResult], None]) -> None:
    """Run a part in this process until it ends or `seconds` are over; `save` is called after each row and at the end."""
    start = time.monotonic()
    try:
        for row in part.run(device):
            result.rows.append(row)
            result.seconds = time.monotonic() - start
            save(result)
            if result.seconds > seconds:
                break
        else:
            result.status = "done"
    except SkipPart as reason:
        result.status, result.reason = "skipped", str(reason)
    except WrongResult as found:
        result.status, result.reason = "failed", str(found)
    except Exception:
        result.status, result.reason = "failed", traceback.format_exc()
    result.seconds = time.monotonic() - start
    save(result)


def run_report(
    parts: Mapping[str, Part],
    names: Sequence[str],
    device: str,
    seconds: float,
    folder: Path,
    progress: Callable[[PartResult], None] | None = None,
) -> list[PartResult]:
    """Run the named parts one after the other, each in a process of its own, within `seconds` in total.

    The time that a part leaves goes to the later ones.

    Args:
        folder: each part writes its result to `NAME.json` there.
        progress: called with the result of each part.

    Raises:
        ValueError: for an unknown part.
    """
    end = time.monotonic() + seconds
    grace = min(_GRACE, seconds / 10)
    for name in names:
        if name not in parts:
            raise ValueError(f"part must be one of {', '.join(parts)}, got {short_repr(name)}")
    results = []
    for index, name in enumerate(names):
        left = end - grace - time.monotonic()
        budget = left * parts[name].share / sum(parts[each].share for each in names[index:])
        result = PartResult(name, parts[name].title, command=f"vargen bench gpu --part {name} --device {device} -o FOLDER")
        if left < _MINIMUM:
            result.status, result.reason = "skipped", f"no time was left: give more than {seconds / 60:g} minutes"
        else:
            result = _run_in_process(result, device, budget, grace, folder)
        results.append(result)
        if progress is not None:
            progress(result)
    return results


def _run_in_process(result: PartResult, device: str, seconds: float, grace: float, folder: Path) -> PartResult:
    file = folder / f"{result.name}.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "vargen.evaluation.device_report", result.name, device, str(seconds), str(file)]
    start, late = time.monotonic(), False
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            errors = process.communicate(timeout=seconds + grace)[1]
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            errors = process.communicate()[1]
        except BaseException:
            process.kill()
            raise
    with contextlib.suppress(FileNotFoundError):
        result = PartResult(**json.loads(file.read_text("utf-8")))
    result.seconds = time.monotonic() - start
    if process.returncode and not late:
        last = "\n".join(errors.splitlines()[-_REASON_LINES:])
        code = process.returncode
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        result.status, result.reason = "failed", f"the process ended with {ended}\n{last}".rstrip()
    elif late and not result.rows:
        result.reason = f"nothing was finished in {seconds:.0f} s"
    return result


def write_markdown(results: Sequence[PartResult], facts: Mapping[str, str], folder: Path) -> Path:
    """Write `report.md` into the folder and return its path: the machine, the state of each part, and the tables.

    Args:
        facts: of the machine and the software, by name.
    """
    lines = ["# Device report", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += _table([{"part": each.name, "status": each.status, "seconds": round(each.seconds, 1)} for each in results])
    for each in results:
        lines += ["", f"## {each.title}", ""]
        if each.reason:
            lines += [f"{each.status}:", "", "```", each.reason.rstrip(), "```", ""]
        if each.rows:
            ended = {"stopped": "Stopped when its time was over. ", "failed": "Rows before the failure. "}.get(each.status, "")
            lines += [f"{ended}Command: `{each.command}`", "", *_table(each.rows)]
        if (folder / f"{each.name}.png").is_file():
            lines += ["", f"![{each.title}]({each.name}.png)"]
    path = folder / "report.md"
    with atomic_file(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _table(rows: Sequence[Row]) -> list[str]:
    from vargen.evaluation.report import format_table  # not needed by the processes of the parts

    heads = list(rows[0])
    return format_table(heads, [[_cell(row.get(name, "")) for name in heads] for row in rows])


def _cell(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ")


def _main(name: str, device: str, seconds: str, file: str) -> None:
    from vargen.evaluation import device_report  # this module under its own name, whose exceptions the parts raise
    from vargen.evaluation.device_parts import PARTS

    def save(result: device_report.PartResult) -> None:
        with atomic_file(Path(file)) as temporary:
            temporary.write_text(json.dumps(asdict(result)) + "\n", "utf-8")

    part = PARTS[name]
    command = f"vargen bench gpu --part {name} --device {device} -o FOLDER"
    left = float(seconds) - (time.monotonic() - _START)
    device_report.run_part(part, device_report.PartResult(name, part.title, command=command), device, left, save)


if __name__ == "__main__":
    _main(*sys.argv[1:])
