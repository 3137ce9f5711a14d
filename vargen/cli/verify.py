"""`vargen verify`: prove by enumeration whether a method is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vargen.cli.console import print_json, table
from vargen.cli.options import check_range

if TYPE_CHECKING:
    from vargen.decoding import Method
    from vargen.evaluation.exactness import Report

RENAMED = {"chains": "samples"}


def verify(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD|MODULE:NAME...", help="Methods, also with settings as in sjd:window=8, or your own as module:name."
        ),
    ],
    samples: Annotated[int, typer.Option(metavar="N", help="Sequences sampled per case.")] = 150_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Test by enumeration whether a method is exact.

    Samples small models with the method, and compares the frequencies with the enumerated probabilities of all their
    sequences. Exits with 1 if a method claims to be exact and is not, or if a negative control was not detected.
    """
    check_range(samples, "samples", 1000, 10**8)
    found = [load_method(method) for method in methods]

    from vargen.evaluation.exactness import check

    reports = [check(method, samples) for method in found]
    if as_json:
        print_json([report.to_dict() for report in reports])
    else:
        for report in reports:
            print(format_report(report))
    if any(not report.can_tell or (report.claims == "exact" and not report.exact) for report in reports):
        raise typer.Exit(1)


def load_method(name: str) -> Method:
    """Return a preset, with or without settings, or the Accelerator or ScaleSchedule that `module:name` names.

    Raises:
        ValueError: if there is none. TypeError: if the object is of another type.
    """
    from vargen.decoding import PRESETS, Accelerator, ScaleSchedule, resolve_method
    from vargen.specs import import_object

    preset, colon, rest = name.partition(":")
    if not colon or "=" in rest or preset in PRESETS:
        return resolve_method(name, PRESETS[preset].paradigm if preset in PRESETS else Accelerator.paradigm)
    try:
        part = import_object(name, "method")
    except ValueError as error:
        raise ValueError(f"{error}; give a preset, or module:name of an Accelerator") from error
    if not isinstance(part, Accelerator | ScaleSchedule):
        raise TypeError(f"method {name!r} must be an Accelerator or a ScaleSchedule, got {type(part).__name__}")
    return part


def format_report(report: Report) -> str:
    """Format the report for the terminal."""
    from vargen.evaluation.exactness import MOST_SPREADS

    rows = [
        [
            finding.case,
            f"{finding.distance:.4f}",
            f"{finding.floor:.4f}",
            f"{(finding.distance - finding.floor) / finding.spread:+.1f}",
            "" if not finding.impossible else f"{finding.impossible:.2g} of the sequences are impossible",
        ]
        for finding in report.findings
    ]
    verdict = "exact" if report.exact else "not exact"
    controls = ", ".join(f"{control.case} {control.times_the_floor:.1f} times the floor" for control in report.controls)
    detected = "all detected" if report.can_tell else "NOT ALL DETECTED, so this run proves nothing: increase --samples"
    return (
        f"{report.name} claims to be {report.claims} and is {verdict} ({report.chains} samples; exact means at most "
        f"{MOST_SPREADS:g} standard deviations above the noise floor)\n"
        + table(["case", "distance", "floor", "deviations", ""], rows, "<>>><")
        + f"\nnegative controls, {detected}: {controls}\n"
    )
