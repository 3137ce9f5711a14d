"""`vargen verify`: prove whether a method is exact, by summation over everything that it can draft and decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli import common
from vargen.cli.console import print_json, progress_bar, table

if TYPE_CHECKING:
    from vargen.decoding import Method
    from vargen.verify.exactness import Report


def verify(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD|MODULE:NAME...",
            help="Methods, also with settings as in sjd:window=8, or your own method, rule or drafter as module:name. "
            "Default: a table of all methods for images.",
            show_default=False,
        ),
    ] = None,
    as_json: common.JsonFlag = False,
) -> None:
    """Prove whether a method is exact.

    On small models, sums passes of the method over all drafts and all outcomes of its rule, and compares the result with the
    model's distribution. Exits with 1 if a method that claims to be exact is not, if a relaxed one deviates by more than it
    reports, or if a negative control was not detected.
    """
    from vargen.decoding import PRESETS

    names = methods or [name for name, preset in PRESETS.items() if preset.paradigm != "video"]
    found = [load_method(name) for name in names]
    from vargen.verify.exactness import check_exactness

    reports = []
    with progress_bar("verifying", "methods") as show:
        for number, method in enumerate(found):
            show(number, len(found))
            reports.append(check_exactness(method))
    if as_json:
        print_json([report.to_dict() for report in reports])
    else:
        print("\n".join(map(format_report, reports)) if methods else format_summary(reports), flush=True)
    if not all(report.detects_controls and report.keeps_its_claim for report in reports):
        raise typer.Exit(1)


def load_method(name: str) -> Method:
    """Return a preset, with or without settings, or what `module:name` names.

    A rule of a user's own is combined with a draft model, a drafter with an exact rule.
    """
    from vargen.decoding import PRESETS, Accelerator, ScaleSchedule, resolve_method
    from vargen.specs import import_object
    from vargen.values import short_repr

    preset, colon, rest = name.partition(":")
    if not colon or "=" in rest or preset in PRESETS:
        return resolve_method(name, PRESETS[preset].paradigm if preset in PRESETS else Accelerator.paradigm)
    part = import_object(name, "method")
    found = complete_method(part, rest)
    if not isinstance(found, Accelerator | ScaleSchedule):
        raise TypeError(
            f"method {name!r} must be an Accelerator, a ScaleSchedule, a Drafter, or an AcceptanceRule: a function decorated "
            f"with acceptance_rule(exact=..., topologies=...), got {short_repr(part)}"
        )
    return found


def complete_method(part: Any, name: str) -> Any:
    """Return the method that tests an acceptance rule or a drafter; any other object unchanged."""
    from vargen.decoding import Accelerator, AcceptanceRule, Drafter, DynamicTree, Speculative, speculative_sampling
    from vargen.decoding.experimental import SampledTree, SpeculativeTree, recursive_rejection

    if isinstance(part, AcceptanceRule):
        with_replacement = "with-replacement" in part.requires
        tree = SampledTree(branching=(2, 1)) if with_replacement else SpeculativeTree(DynamicTree(5, 2, 2))
        return Accelerator(name, drafter=tree if "tree" in part.topologies else Speculative(3), acceptance=part)
    if isinstance(part, Drafter):
        rule = recursive_rejection if part.topology == "tree" else speculative_sampling
        return Accelerator(name, drafter=part, acceptance=rule)
    return part


def format_distance(value: float | None) -> str:
    """Format a total variation distance; those of exact methods are rounding errors."""
    return "" if value is None else "0" if value == 0 else f"{value:.0e}" if value < 1e-4 else f"{value:.4f}"


def format_controls(reports: list[Report]) -> str:
    """Format the negative controls as a table, each once."""
    controls = dict.fromkeys(control for report in reports for control in report.controls)
    rows = [[mistake, source, format_distance(distance)] for mistake, source, distance in controls]
    return table(["known mistake", "source", "distance"], rows, "<<>")


def format_summary(reports: list[Report]) -> str:
    """Format one row per method, and all negative controls."""
    rows = [
        [
            each.name,
            each.claims if each.keeps_its_claim else f"NOT {each.claims}",
            "summed" if each.proof == "summed" else "images compared",
            f"{sum(finding.drafts for finding in each.findings):,}",
            f"{sum(finding.outcomes for finding in each.findings):,}" if each.proof == "summed" else "",
            format_distance(each.worst),
        ]
        for each in reports
    ]
    titles = ["method", "", "", "drafts", "outcomes", "worst distance"]
    return table(titles, rows, "<<<>>>") + "\n\n" + format_controls(reports)


def format_report(report: Report) -> str:
    """Format the report of a method: its cases, and the negative controls."""
    titles = ["case", "passes", "drafts", "outcomes", "distance", "of drafts", "relaxation"]
    rows = [
        [
            each.case,
            f"{each.passes or ''}",
            f"{each.drafts:,}",
            f"{each.outcomes:,}",
            *map(format_distance, (each.distance, each.draft_distance, each.relaxation)),
        ]
        for each in report.findings
    ]
    drafts = sum(each.drafts for each in report.findings)
    verdict = f"worst total variation distance {format_distance(report.worst)} over {drafts:,} drafts"
    if report.proof == "compared":
        titles = ["case", "", "images", "", "different", "", ""]
        same = "all are the same" if report.exact else "NOT ALL ARE THE SAME"
        verdict = f"{drafts:,} images were compared with sequential decoding, token by token: {same}"
    words = "exact" if report.exact else "not exact" if report.claims == "exact" else "relaxed"
    detected = "all detected" if report.detects_controls else "NOT ALL DETECTED, so this run proves nothing"
    shown = [i for i, title in enumerate(titles) if title and any(row[i] for row in rows)]
    cases = table([titles[i] for i in shown], [[row[i] for i in shown] for row in rows], "<" + ">" * (len(shown) - 1))
    head = f"{report.name} claims to be {report.claims} and is {words}: {verdict}"
    return f"{head}\n{cases}\nnegative controls, {detected}:\n{format_controls([report])}\n"
