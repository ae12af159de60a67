"""Count which rules of `gpufleet doctor` fire on logs, and which on the healthy part of each.

    python -m tools.check_logs FOLDER

FOLDER has a folder of `*.log` for each source. The healthy part of a log ends before its first
ERROR line, traceback or killed process: it does not depend on the rules. Look at each rule that
fires there: it is a false alarm, or a failure whose line has no level. Exit status: 0 none fires, 1
some do.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.failures.diagnosis import explain
from gpufleet.failures.log_reader import LogLine, read_log

ENDS = re.compile(
    r"Traceback \(most recent|^[A-Za-z_][\w.]*(?:Error|Exception)\b"
    r"|: error: |\bKilled\b|core dumped|Segmentation fault"
)
_WORDS = ("Traceback", "Error", "Exception", ": error: ", "Killed", "core dumped", "Segment")
SHORTEST = 20
"""Lines of a healthy part that counts: a start of vLLM has more."""
LARGEST = 1 << 20
"""Bytes of a log that is read: a longer one mostly lists requests."""


@dataclass
class Count:
    """What was found in the logs of one source."""

    logs: int = 0
    lines: int = 0
    unread: int = 0
    parts: int = 0
    """Healthy parts."""
    part_lines: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of whole logs: nothing, named, unknown."""
    named: Counter[str] = field(default_factory=Counter)
    """Causes, by rule."""
    waits: int = 0
    """Healthy parts that end while the server still starts, and has waited for over a minute."""
    false: list[str] = field(default_factory=list)
    """Healthy parts in which a rule fires, with the rules."""


def healthy_part(lines: list[LogLine]) -> list[LogLine]:
    """Return the lines before the first one that reports an error."""
    for at, line in enumerate(lines):
        if any(each in line.raw for each in _WORDS) and ENDS.search(line.split().text):
            return lines[:at]
        if "ERROR" in line.raw or "CRITICAL" in line.raw:
            return lines[:at]
    return lines


def count(folder: Path) -> Count:
    """Read all logs of a source."""
    found = Count()
    for file in sorted(folder.glob("*.log")):
        if file.stat().st_size > LARGEST:
            continue
        try:
            with file.open("rb") as stream:
                lines = list(read_log(stream, file.name))
        except FleetError:
            found.unread += 1
            continue
        found.logs += 1
        found.lines += len(lines)
        whole = explain(lines)
        found.named.update(each.rule.id for each in whole.causes)
        named = "named" if whole.causes else "unknown" if whole.unknown else "nothing"
        found.outcomes[named] += 1
        part = healthy_part(lines)
        if len(part) < SHORTEST:
            continue
        found.parts += 1
        found.part_lines += len(part)
        fired = whole if len(part) == len(lines) else explain(part)
        fired_rules = [each.rule for each in (*fired.causes, *fired.consequences)]
        ids = ", ".join(each.id for each in fired_rules) or "unknown"
        # What a later line may show to have passed: the healthy part ends before that line.
        if fired_rules and all(each.until for each in fired_rules):
            found.waits += 1
        elif fired_rules or fired.unknown:
            found.false.append(f"{file}: {ids}")
    return found


def rows(counts: dict[str, Count]) -> Iterator[str]:
    """Yield the table's lines: a source each, then all."""
    yield "| source | logs | lines | healthy parts | nothing | named | unknown |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, each in counts.items():
        of = each.outcomes
        figures = (each.logs, each.lines, each.parts, of["nothing"], of["named"], of["unknown"])
        yield f"| {name} | {' | '.join(f'{figure:,}' for figure in figures)} |"


def main(words: list[str]) -> int:
    """Print the table, and the healthy parts in which rules fire."""
    if len(words) != 1:
        print(__doc__)
        return 2
    counts = {
        each.name: found
        for each in sorted(Path(words[0]).iterdir())
        if each.is_dir() and (found := count(each)).logs
    }
    total = Count()
    for each in counts.values():
        total.logs += each.logs
        total.lines += each.lines
        total.parts += each.parts
        total.part_lines += each.part_lines
        total.outcomes += each.outcomes
        total.named += each.named
        total.waits += each.waits
        total.false += each.false
    print("\n".join(rows({**counts, "all": total})))
    print(f"\nhealthy parts: {total.parts:,} with {total.part_lines:,} lines")
    print(f"of them a start that waits at their end: {total.waits:,}")
    print("causes: " + ", ".join(f"{rule} {n}" for rule, n in total.named.most_common()))
    print("\n".join(["to be looked at:", *total.false] if total.false else ["no rule fires"]))
    return int(bool(total.false))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
