"""Print the progress, levels and result of `gpufleet measure`."""

from __future__ import annotations

from pathlib import Path

import click

from gpufleet.console import add_row, display, new_table
from gpufleet.formatting import count_of
from gpufleet.load_test import report_format, result, result_page
from gpufleet.load_test.client_process import Beat
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_runs import LevelObserver
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.rate_search import bend_sentences
from gpufleet.load_test.result import Measurement, Searched
from gpufleet.load_test.tuning import Tuning, deploy_data
from gpufleet.paths import write_whole
from gpufleet.sanitize import printable


class Progress(LevelObserver):
    """Prints a line on stderr every ten seconds of a level."""

    def __init__(self) -> None:
        self._load, self._next = 0.0, 10.0

    def began(self, load: float, /) -> None:
        """Record that a level begins."""
        self._load, self._next = load, 10.0

    def beat(self, beat: Beat) -> None:
        """Print the line if ten seconds have passed since the last one."""
        if beat.now >= self._next:
            self._next = beat.now + 10
            say(f"  {self._load:.3g}: {beat.now:.0f} s, {len(beat.in_flight)} requests running")


def say(text: str) -> None:
    """Print a progress line for the operator."""
    click.echo(printable(text), err=True)


class LevelLines:
    """Prints a table on stderr, with one row after each level."""

    _FORM = "{:>12} {:>10} {:>9} {:>8} {:>9} {:>9} {:>9} {:>8}"

    def __init__(self) -> None:
        self._unit = ""

    def __call__(self, level: LevelSummary) -> None:
        """Print the row of a level. If the unit of load has changed, print a new header first."""
        if level.unit != self._unit:
            self._unit = level.unit
            unit = "requests/s" if level.rate is not None else "concurrent"
            head = ("verdict", "requests", "kept", "TTFT p99", "ITL p99", "e2e p99", "seconds")
            say(self._FORM.format(unit, *head))
        times = (f"{v['p99']:.3f} s" if v else "" for v in (level.ttft, level.itl, level.e2e))
        kept = f"{level.kept / level.requests:.1%}" if level.requests else ""
        load = f"{level.load:.3g}"
        say(self._FORM.format(
            load, level.verdict, level.requests, kept, *times, f"{level.seconds:.0f}"
        ))  # fmt: skip
        if level.verdict == "not known" or level.ended == "over-saturated":
            say(f"{'':>12} {level.why}")


def served_by(target: Target) -> str:
    """Return how many of a model's replicas are measured, such as `2 of 3 replicas`."""
    return f"{len(target.replicas)} of {count_of(target.replicas_of, 'replica')}"


def write_result(found: Measurement, folder: Path) -> tuple[Path, ...]:
    """
    Write a result's files. Return their paths: first the result, then its page, then its reports.
    """
    file = result.write(found, folder)
    page = file.with_suffix(".html")
    write_whole(page, result_page.result_page(found))
    reports = []
    for number, each in enumerate(report_format.reports(found)):
        name = file.with_name(f"{file.stem}-{number}{result.REPORT_ENDING}")
        write_whole(name, report_format.text(each))
        reports.append(name)
    return (file, page, *reports)


def print_result(found: Measurement, files: tuple[Path, ...]) -> None:
    """Print the levels, the answer and the paths of the files."""
    _print_levels(found)
    if found.closed is not None:
        click.echo()
        _print_levels(found.as_closed())
    click.echo()
    click.echo(printable(answer(found)))
    if found.closed is not None:
        click.echo(printable(closed_answer(found.closed)))
    for each in bend_sentences(found.levels):
        click.echo(printable(each))
    for each in found.notes:
        click.echo(printable(f"note: {each}"))
    click.echo(printable(f"written: {files[0]} and {files[1].name}"))


def _print_levels(found: Measurement) -> None:
    table = new_table(
        "requests/s" if found.loop == "open" else "concurrent", "answers/s",
        "replicas", "requests", "kept", "TTFT p99", "ITL p99", "e2e p99", "verdict",
    )  # fmt: skip
    for each in sorted(found.levels, key=lambda level: level.load):
        add_row(
            table,
            f"{each.load:.3g}",
            f"{each.answered_per_second:.3g}",
            found.served_by.rpartition(" ")[0],
            str(each.requests),
            f"{each.kept / each.requests:.1%}" if each.requests else "",
            *(
                f"{times['p99']:.3f} s" if times else ""
                for times in (each.ttft, each.itl, each.e2e)
            ),
            each.verdict,
        )
    display(table)


def print_tuning(tuning: Tuning, model: str) -> None:
    """Print the trials and the proposed settings."""
    table = new_table("settings", "GPUs", "requests/s", "not met at", "result")
    for each in tuning.trials:
        found = each.measured.found if each.measured else None
        add_row(
            table,
            str(each),
            str(each.gpus or ""),
            f"{found.kept:.3g}" if found and found.kept else "",
            f"{found.missed:.3g}" if found and found.missed else "",
            each.why if found is None else found.status,
        )
    display(table)
    click.echo()
    for line in proposal_lines(tuning, model):
        click.echo(printable(line))


def proposal_lines(tuning: Tuning, model: str) -> list[str]:
    """
    Return lines that propose settings to write, or that propose to keep the declared settings.
    """
    best = tuning.proposal
    if best is None or best.measured is None:
        return [
            "no setting that was tried serves more requests per GPU by more than the "
            "noise: keep the declared settings"
        ]
    declared = tuning.trials[0]
    return [
        "proposed settings, which serve more requests per GPU by more than the noise "
        f"({best.measured.found.why}):",
        *(f"  {name}: {value}" for name, value in deploy_data(model, best.settings).items()),
        f"to compare both results: gpufleet measure --compare {declared.file} {best.file}",
    ]


def closed_answer(of: Searched) -> str:
    """Return one sentence with the result of the closed loop."""
    best = of.best
    if of.found.kept is None or best is None:
        return f"closed loop: {of.found.why}"
    missed = f", does not meet them with {of.found.missed:.3g}" if of.found.missed else ""
    return (
        f"closed loop: meets its objectives with {of.found.kept:.3g} concurrent requests, "
        f"{best.answered_per_second:.3g} answers/s{missed} ({of.found.status}). The clients "
        "of a closed loop wait for answers before they send more requests; users do not"
    )


def answer(found: Measurement) -> str:
    """Return one sentence with the result of the measurement."""
    unit = "requests/s" if found.loop == "open" else "concurrent requests"
    what = f"{found.model}, {found.target} ({found.served_by})"
    if found.found.kept is None:
        return f"{what}: {found.found.why}"
    missed = f", does not meet them at {found.found.missed:.3g}" if found.found.missed else ""
    each = found.found.kept / found.replicas
    part = f", {each:.3g} a replica" if found.replicas > 1 else ""
    return (
        f"{what}: meets its objectives at {found.found.kept:.3g} {unit}{part}"
        f"{missed} ({found.found.status}: {found.found.why})"
    )
