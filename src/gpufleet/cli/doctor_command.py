"""`gpufleet doctor`: explain faults of a fleet or in logs, with remedies."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError, file_fault
from gpufleet.inventory.pyinfra_command import default_inventory
from gpufleet.redact import hide_in_value, hide_secrets
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.failures.log_reader import LogLine

STDIN = "-"
LONGEST_NAME = 200


@click.command(cls=StrictCommand)
@click.argument("logs", metavar="[INVENTORY] [NAME] | LOGFILE...", nargs=-1)
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.tar.gz",
    help="For a fleet: also write all collected evidence to this archive, without secrets.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=20,
    show_default=True,
    help="For a fleet: most seconds to wait for nodes. A node that takes longer than 30% "
    "of this time to connect counts as not reached.",
)
@json_option
def doctor(logs: tuple[str, ...], *, bundle: Path | None, seconds: float, as_json: bool) -> int:
    """
    Explain what is wrong with a fleet or in logs. Read-only.

    With an inventory, the command prints the problems of replicas, nodes and gateways, and the
    alerts, with the worst problem first. For each problem it prints the cause in the logs, what was
    changed before, and the command to run next. NAME is a model, a replica or a node.

    With logs of vLLM, NCCL, the driver or the kernel (from the journal, Docker, Kubernetes or a
    file), the command needs no inventory. Several logs, for example of all ranks, are merged by
    time. `-` reads standard input.

    \b
    gpufleet doctor inventories/prod.py
    gpufleet doctor inventories/prod.py llama-0
    gpufleet doctor inventories/prod.py --bundle doctor.tar.gz
    gpufleet doctor rank0.log rank1.log kernel.log --json
    journalctl -u vllm-llama-0 -o short-iso | gpufleet doctor -

    Exit status: 0: no failure was found, at most notices. 1: failures were found. 2: something
    cannot be read, or no rule explains a failure in a log.
    """
    logs = logs or (default_inventory(),)
    if logs[0].endswith(".py"):
        return _of_fleet(logs, bundle, seconds, as_json=as_json)
    if bundle:
        raise click.UsageError(
            "--bundle works only with an inventory, not with logs: remove --bundle, or give an "
            "inventory."
        )
    from gpufleet.failures.diagnosis import explain
    from gpufleet.failures.diagnosis_text import as_json as in_json
    from gpufleet.failures.diagnosis_text import text_lines

    _check_names(logs)
    with_lines: set[str] = set()
    findings = explain(_lines(logs, with_lines))
    if findings.healthy:
        _refuse_empty(logs, with_lines)
    if as_json:
        print_json(hide_in_value(in_json(findings), ()))
    else:
        for line in text_lines(findings, dt.datetime.now(dt.UTC)):
            click.echo(hide_secrets(line, ()))
    return 2 if findings.unknown else 0 if findings.healthy else 1


def _of_fleet(names: tuple[str, ...], bundle: Path | None, seconds: float, *, as_json: bool) -> int:
    """
    Diagnose an inventory's fleet. If a name is given, print only the problems of what it names.
    """
    if len(names) > 2:
        raise click.UsageError("Give an inventory and at most one model, replica or node.")
    use_gevent()
    from gpufleet.cli.doctor_session import look
    from gpufleet.doctor.fleet_text import diagnosis_lines

    seen = look(names[0], seconds)
    found = seen.diagnosis(names[1] if len(names) > 1 else "")
    if bundle:
        seen.write_bundle(bundle)
        click.echo(f"written: {bundle}", err=True)
    if as_json:
        print_json(hide_in_value(found.as_json(), ()))
    else:
        for line in diagnosis_lines(found, seen.now):
            click.echo(printable(hide_secrets(line, ())))
    return found.status


def _check_names(logs: tuple[str, ...]) -> None:
    """Raise `FleetError` with all names that are not logs. No log is read before this check."""
    problems = []
    for name in dict.fromkeys(logs):
        if logs.count(name) > 1:
            problems.append(f"{name}: is given {logs.count(name)} times: write each log once")
        elif name.endswith(".py"):
            problems.append(
                f"{name}: is an inventory: write the inventory as the first argument, and give "
                "no logs"
            )
        elif name != STDIN and (problem := _not_a_file(Path(name))):
            problems.append(f"{name[:LONGEST_NAME]}: {problem}")
    if problems:
        raise FleetError(*problems)


def _not_a_file(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "is a directory: write the names of the log files in this directory"
        path.stat()
    except (OSError, ValueError) as error:
        return (
            f"cannot be read: {file_fault(error)}: write the name of a log file, or `-` for "
            "standard input"
        )
    return None


def _refuse_empty(logs: tuple[str, ...], with_lines: set[str]) -> None:
    """
    Raise `FleetError` for logs that have no lines.

    An empty log does not prove that nothing failed.
    """
    empty = [name for name in logs if name not in with_lines]
    if empty:
        raise FleetError(
            *(
                f"{'stdin' if name == STDIN else name}: has no log lines, so gpufleet "
                "cannot know whether anything failed: correct the name of the unit or of "
                "the file, or the time. `systemctl list-units --all 'vllm-*'` prints the "
                "units. As root, `journalctl -u UNIT -o short-iso` prints all lines of one "
                "unit"
                for name in empty
            )
        )


def _lines(logs: tuple[str, ...], with_lines: set[str]) -> Iterator[LogLine]:
    """Yield the lines of all logs. If a log has lines, add its name to `with_lines`."""
    from gpufleet.failures.log_reader import is_log_line, read_log

    def lines_of(stream: BinaryIO, name: str, source: str) -> Iterator[LogLine]:
        for line in read_log(stream, source):
            if name not in with_lines and is_log_line(line.raw):
                with_lines.add(name)
            yield line

    for name in logs:
        if name == STDIN:
            yield from lines_of(sys.stdin.buffer, name, "stdin")
            continue
        try:
            with Path(name).open("rb") as stream:
                yield from lines_of(stream, name, name)
        except (OSError, ValueError) as error:
            raise FleetError(f"{name}: cannot be read: {file_fault(error)}") from None
