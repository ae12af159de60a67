"""RUNS ON THE NODE: the kernel's messages about GPUs since this boot.

The journal, which has older messages, is read first, then the kernel's ring buffer. A log without
read permission is `no_permission`, never an empty log. A truncated beginning is reported.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Deque, Dict, List, Tuple

from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import refusal_of, run

SECONDS = {"journal": 10, "dmesg": 4}

# Lines that are kept. The module loader's refusals name no driver.
ABOUT = re.compile(
    r"NVRM|[Nn]vidia|NVIDIA|SXid|Xid|nouveau|AER:|module verification failed"
    r"|\bmce:|\bEDAC\b|\[Hardware Error\]|^Memory failure:"
    r"|Loading of (?:unsigned )?module|Lockdown:|PKCS#7 signature"
)
# The kernel's command line names drivers without their being there ("modprobe.blacklist=nouveau").
COMMAND_LINE = re.compile(r"[Cc]ommand line\b")
# "[   12.345678] text", and with the caller's thread between on some kernels.
STAMP = re.compile(r"\[\s*(\d+\.\d+)\](?:\[\s*[TC]\d+\])? ?(.*)")
# What the journal writes between: "gpu-01 kernel: ".
SENDER = re.compile(r"\S+ kernel: ")
# A kernel's first words (x86; Arm says which CPU boots before).
FIRST_WORDS = ("Linux version ", "Booting Linux on physical CPU")
START = 0.1  # seconds: nothing but a boot's own first lines is that early

# Lines that are read at most, the newest: a year's kernel log of a busy server is shorter.
JOURNAL_LINES = 200_000
KEPT = 2000
# One kind of line may be repeated thousands of times (an application's Xid 31, corrected AER
# errors) and must not drive the others out.
KEPT_OF_A_KIND = 200
TEXT = 1000  # characters of a line


class Lines:
    """Parses a kernel log in pieces, and keeps the lines about GPUs."""

    def __init__(self) -> None:
        self.rest = b""
        self.first: Tuple[float | None, str] | None = None  # the time is None if it has none
        self.now = 0.0
        self.found = 0
        self.kinds: Dict[Any, Deque[Tuple[int, float, str]]] = {}

    def take(self, piece: bytes) -> None:
        """Add the next piece of the log's text."""
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            self.add(line.decode("utf-8", "replace"))

    def end(self) -> None:
        """Add the last line, which may be incomplete."""
        if self.rest:
            self.take(b"\n")

    def add(self, line: str) -> None:
        """Add one line; a line without a timestamp belongs to the previous time."""
        if not line.strip() or line.startswith("-- "):  # the journal's remarks
            return
        stamped = STAMP.match(line)
        if stamped:
            self.now = float(stamped.group(1))
        text = SENDER.sub("", stamped.group(2) if stamped else line, count=1).strip()[:TEXT]
        if self.first is None:
            self.first = (self.now if stamped else None, text)
        if ABOUT.search(text) and not COMMAND_LINE.search(text):
            self.found += 1
            kept = self.kinds.setdefault(kind(text), deque(maxlen=KEPT_OF_A_KIND))
            kept.append((self.found, self.now, text))

    @property
    def complete(self) -> bool:
        """
        Return whether the log still has this boot's beginning.

        Without timestamps (printk.time=0) only the kernel's first message marks the boot.
        """
        if self.first is None:
            return False
        seconds, text = self.first
        return (seconds is not None and seconds < START) or text.startswith(FIRST_WORDS)

    def document(self, source: str) -> Dict[str, Any]:
        """Return the newest lines in order, and the number of omitted lines."""
        kept: List[Tuple[int, float, str]] = sorted(
            line for lines in self.kinds.values() for line in lines
        )[-KEPT:]
        return {
            "source": source,
            "complete": self.complete,
            "dropped": self.found - len(kept),
            "lines": [[seconds, text] for _, seconds, text in kept],
        }


def kind(text: str) -> Any:
    """
    Return the key of repeated messages: an Xid's GPU and number, or the text without its numbers.
    """
    xid = re.search(r"Xid \(([^)]*)\): (\d+)", text)
    return xid.groups() if xid else re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "0", text)[:60]


def kernel_log() -> Any:
    """Return the log in the form of docs/reference/probe.md. Raises `CannotRead` without a log."""
    in_journal = read(journal)
    if not is_missing(in_journal) and in_journal["complete"]:
        return in_journal
    in_ring = read(ring)
    if is_missing(in_journal):
        # The journal's own reason is the better one, unless it simply had nothing.
        other = in_journal["missing"] in {"absent", "no_program"}
        return in_ring if other or not is_missing(in_ring) else in_journal
    return in_journal if is_missing(in_ring) or not in_ring["complete"] else in_ring


def journal() -> Dict[str, Any]:
    """Return this boot's kernel log from the journal."""
    lines = Lines()
    output = run(
        "journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-n", str(JOURNAL_LINES),
        seconds=SECONDS["journal"], take=lines.take,
    )  # fmt: skip
    lines.end()
    # A user in none of the journal's groups sees only their own journal, without the kernel's.
    if "insufficient permissions" in output.err or "not seeing messages" in output.err:
        raise CannotRead("no_permission", detail="journalctl")
    if lines.first is None:
        raise CannotRead("absent", detail="the journal has no kernel log of this boot")
    return lines.document("journal")


def ring() -> Dict[str, Any]:
    """Return the kernel's ring buffer."""
    lines = Lines()
    output = run("dmesg", seconds=SECONDS["dmesg"], take=lines.take)
    lines.end()
    if lines.first is None:
        if output.status:
            raise refusal_of("dmesg", output)
        raise CannotRead("absent", detail="the kernel's log is empty")
    return lines.document("dmesg")
