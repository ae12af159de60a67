"""Write a lab node's kernel log to a journal file for the node's own journalctl.

A node runs on this machine's kernel, and may not read the log of this kernel. So
`machine/kernel.log` has the lines of the simulated machine's kernel. For each boot of the node,
`write` copies these lines into a journal file of the boot, like journald does from /dev/kmsg.
systemd-journal-remote writes the file, so the lab does not implement the journal's format.

The keeper runs this program before each boot (`fake_kernel_log.py ROOT`), and `gpufleet lab fault`
runs it between boots. The program imports no module of the lab, because these imports would take
longer than the rest of a boot's preparation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MACHINE = Path("var/lib/gpufleet-lab/machine")
JOURNAL = "kernel.journal"

_WRITER = "/usr/lib/systemd/systemd-journal-remote"
_LIMIT = 30.0  # seconds; it takes 0.03
_WARNING = 4  # syslog(3): facility and level of the driver's lines

Lines = list[tuple[float, str]]


def write(root: Path) -> None:
    """
    Write `kernel.log`, if it exists, to the journal of the node's current boot.

    A line with a future time in this boot gets the current time, and keeps it until the next boot.
    """
    machine = root / MACHINE
    boot_id = (machine / "boot_id").read_text().strip()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) - float((machine / "booted_at").read_text())
    target = _folder(root) / JOURNAL
    source = machine / "kernel.log"
    if not source.exists():
        target.unlink(missing_ok=True)
        return
    lines = timed_lines(parsed(source.read_text()), _known(machine, boot_id), uptime)
    draft = machine / JOURNAL
    draft.unlink(missing_ok=True)
    subprocess.run(
        [_WRITER, f"--output={draft}", "-"],
        input=exported(lines, root, boot_id, time.time() - uptime).encode(),
        capture_output=True,
        timeout=_LIMIT,
        check=True,
    )
    # The program reserves 8 MB of disk for a few lines. journald also reads a file with holes.
    subprocess.run(["fallocate", "--dig-holes", draft], check=False, timeout=_LIMIT)
    os.chown(draft, 0, target.parent.stat().st_gid)
    draft.chmod(0o640)
    draft.rename(target)
    kept = machine / ".said.json.new"
    kept.write_text(json.dumps({"boot_id": boot_id, "lines": lines}))
    kept.rename(machine / "said.json")


def parsed(text: str) -> Lines:
    """Return the lines of `kernel.log`: seconds since boot, a tab, and the message."""
    rows = (row.split("\t", 1) for row in text.splitlines())
    return [(float(seconds), said) for seconds, said in rows]


def timed_lines(lines: Lines, known: Lines, uptime: float) -> Lines:
    """Return the lines with their times in this boot, in order."""
    left = list(known)
    timed: Lines = []
    for seconds, text in lines:
        earlier = next((line for line in left if line[1] == text), None)
        if earlier:
            left.remove(earlier)
        timed.append(earlier or (min(seconds, uptime), text))
    return sorted(timed, key=lambda line: line[0])


def exported(lines: Iterable[tuple[float, str]], root: Path, boot_id: str, booted: float) -> str:
    """Return the lines in the journal's export format (systemd.io/JOURNAL_EXPORT_FORMATS)."""
    common = {
        "_BOOT_ID": boot_id.replace("-", ""),
        "_MACHINE_ID": (root / "etc/machine-id").read_text().strip(),
        "_HOSTNAME": (root / "etc/hostname").read_text().strip(),
        "_TRANSPORT": "kernel",
        "PRIORITY": _WARNING,
        "SYSLOG_FACILITY": 0,
        "SYSLOG_IDENTIFIER": "kernel",
    }
    entries = []
    for seconds, text in lines:
        fields = {
            "__REALTIME_TIMESTAMP": int((booted + seconds) * 1e6),
            "__MONOTONIC_TIMESTAMP": int(seconds * 1e6),
            "_SOURCE_MONOTONIC_TIMESTAMP": int(seconds * 1e6),
            **common,
            "MESSAGE": text,
        }
        entries.append("".join(f"{key}={value}\n" for key, value in fields.items()))
    return "\n".join([*entries, ""])


def _known(machine: Path, boot_id: str) -> Lines:
    """Return the lines that this boot has already written."""
    try:
        kept = json.loads((machine / "said.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    return list(map(tuple, kept["lines"])) if kept["boot_id"] == boot_id else []


def _folder(root: Path) -> Path:
    """Return the node's journal directory, created like by journald at the first boot."""
    journal = root / "var/log/journal"
    folder = journal / (root / "etc/machine-id").read_text().strip()
    if not folder.exists():
        folder.mkdir(parents=True)
        os.chown(folder, 0, journal.stat().st_gid)
        folder.chmod(0o2755)
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]))
