"""`gpufleet doctor`: explain the failures in logs of vLLM, NCCL, the driver and the kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import json_option, print_json
from gpufleet.errors import FleetError, file_fault

if TYPE_CHECKING:
    from gpufleet.doctor.log_reader import LogLine

STDIN = "-"
LONGEST_NAME = 200


@click.command()
@click.argument("logs", metavar="LOGFILE...", nargs=-1, required=True)
@json_option
def doctor(logs: tuple[str, ...], *, as_json: bool) -> int:
    """
    Explain the failures in a log, with what to do.

    Reads logs of vLLM, NCCL, the driver and the kernel, from the journal, Docker, Kubernetes or a
    file; `-` reads stdin. Several logs, as of all ranks, are joined by time. Needs no inventory.

    \b
    gpufleet doctor vllm.log
    gpufleet doctor rank0.log rank1.log kernel.log --json
    journalctl -u vllm-llama-0 -o short-iso | gpufleet doctor -

    Exit status: 0 nothing found, 1 failures found, 2 a log cannot be read.
    """
    from gpufleet.doctor.diagnosis import explain
    from gpufleet.doctor.diagnosis_text import as_json as in_json
    from gpufleet.doctor.diagnosis_text import text_lines

    _check_names(logs)
    findings = explain(_lines(logs))
    if as_json:
        print_json(in_json(findings))
    else:
        for line in text_lines(findings):
            click.echo(line)
    return 0 if findings.healthy else 1


def _check_names(logs: tuple[str, ...]) -> None:
    """Refuse names that are no logs, all of them at once, before a line is read."""
    problems = []
    for name in dict.fromkeys(logs):
        if logs.count(name) > 1:
            problems.append(f"{name}: is named {logs.count(name)} times: name a log once")
        elif name.endswith(".py"):
            problems.append(
                f"{name}: is an inventory, and this command reads logs: write "
                f"`gpufleet logs {name} REPLICA | gpufleet doctor -`"
            )
        elif name != STDIN and (problem := _not_a_file(Path(name))):
            problems.append(f"{name[:LONGEST_NAME]}: {problem}")
    if problems:
        raise FleetError(*problems)


def _not_a_file(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "is a directory: name the logs in it"
        path.stat()
    except (OSError, ValueError) as error:
        return f"cannot be read: {file_fault(error)}: name a log, or `-` for stdin"
    return None


def _lines(logs: tuple[str, ...]) -> Iterator[LogLine]:
    from gpufleet.doctor.log_reader import read_log

    for name in logs:
        if name == STDIN:
            yield from read_log(sys.stdin.buffer, "stdin")
            continue
        try:
            with Path(name).open("rb") as stream:
                yield from read_log(stream, name)
        except (OSError, ValueError) as error:
            raise FleetError(f"{name}: cannot be read: {file_fault(error)}") from None
