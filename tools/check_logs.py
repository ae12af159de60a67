"""Count the rules of `gpufleet doctor` that match whole logs, and the healthy part of each log.

    python -m tools.check_logs FOLDER

FOLDER has a folder of `*.log` files for each source. The healthy part of a log ends before its
first ERROR line, traceback or killed process, so it does not depend on the rules. Examine each rule
that matches a healthy part. The match is a false alarm, or the line of a failure has no log level.
The exit status is 0 if no rule matches a healthy part, and 1 otherwise.
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
"""Minimum lines of a healthy part that is counted; a start of vLLM has more lines."""
LARGEST = 1 << 20
"""Maximum bytes that are read of a log, because a longer log mostly lists requests."""


@dataclass
class Count:
    """The counts of the logs of one source."""

    logs: int = 0
    lines: int = 0
    unread: int = 0
    parts: int = 0
    """The number of healthy parts."""
    part_lines: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Results of whole logs: nothing, named, unknown."""
    named: Counter[str] = field(default_factory=Counter)
    """Causes, by rule."""
    waits: int = 0
    """Healthy parts at whose end the server still starts, and has waited for over a minute."""
    false: list[str] = field(default_factory=list)
    """Healthy parts that a rule matches, with the rules."""


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
        # Waits that a later line may end. The healthy part ends before that line.
        if fired_rules and all(each.until for each in fired_rules):
            found.waits += 1
        elif fired_rules or fired.unknown:
            found.false.append(f"{file}: {ids}")
    return found


def rows(counts: dict[str, Count]) -> Iterator[str]:
    """Yield the table's lines: one for each source, then the total."""
    yield "| source | logs | lines | healthy parts | nothing | named | unknown |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, each in counts.items():
        of = each.outcomes
        figures = (each.logs, each.lines, each.parts, of["nothing"], of["named"], of["unknown"])
        yield f"| {name} | {' | '.join(f'{figure:,}' for figure in figures)} |"


def main(words: list[str]) -> int:
    """Print the table, and the healthy parts that rules match."""
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
    print(f"of these, parts that end while a start waits: {total.waits:,}")
    print("causes: " + ", ".join(f"{rule} {n}" for rule, n in total.named.most_common()))
    print("\n".join(["examine these matches:", *total.false] if total.false else ["no rule fires"]))
    return int(bool(total.false))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
