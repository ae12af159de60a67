"""RUNS ON THE NODE: read the kernel's messages about GPUs since this boot.

The journal is read first, because it has older messages. If the journal is missing or does not have
the beginning of this boot, the kernel's ring buffer is read too. If the user may not read the log,
the result is `no_permission`, never an empty log. If the beginning of the log is missing, this is
reported.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Deque, Dict, List, Tuple

from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import refusal_of, run

SECONDS = {"journal": 10, "dmesg": 4}

# Lines that are kept. The module loader's refusals do not contain a driver's name.
ABOUT = re.compile(
    r"NVRM|[Nn]vidia|NVIDIA|SXid|Xid|nouveau|AER:|module verification failed"
    r"|\bmce:|\bEDAC\b|\[Hardware Error\]|^Memory failure:"
    r"|Loading of (?:unsigned )?module|Lockdown:|PKCS#7 signature"
)
# The kernel's command line may contain the name of a driver that is not loaded
# ("modprobe.blacklist=nouveau").
COMMAND_LINE = re.compile(r"[Cc]ommand line\b")
# "[   12.345678] text". Some kernels write the caller's thread between time and text.
STAMP = re.compile(r"\[\s*(\d+\.\d+)\](?:\[\s*[TC]\d+\])? ?(.*)")
# What the journal writes between time and text: "gpu-01 kernel: ".
SENDER = re.compile(r"\S+ kernel: ")
# A kernel's first words. On x86 the first words are the version. On Arm the kernel first says which
# CPU boots.
FIRST_WORDS = ("Linux version ", "Booting Linux on physical CPU")
START = 0.1  # seconds: only the first lines of a boot have such an early time

# The most lines that are read, from the newest. One year's kernel log of a busy server is shorter.
JOURNAL_LINES = 200_000
KEPT = 2000
# One kind of line may be repeated thousands of times (an application's Xid 31, corrected AER
# errors). Such lines must not replace all lines of other kinds.
KEPT_OF_A_KIND = 200
TEXT = 1000  # the most characters of a line that are kept


class Lines:
    """A parser that gets a kernel log in pieces and keeps the lines about GPUs."""

    def __init__(self) -> None:
        self.rest = b""
        self.first: Tuple[float | None, str] | None = None  # (time or None, text)
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
        """Add one line. A line without a timestamp gets the time of the previous line."""
        if not line.strip() or line.startswith("-- "):  # a remark of journalctl
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
        Return whether the log still has the beginning of this boot.

        If lines have no timestamps (printk.time=0), only the kernel's first message shows that.
        """
        if self.first is None:
            return False
        seconds, text = self.first
        return (seconds is not None and seconds < START) or text.startswith(FIRST_WORDS)

    def document(self, source: str) -> Dict[str, Any]:
        """Return the kept lines from oldest to newest, and the number of omitted lines."""
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
    Return a key that is equal for repetitions of one message.

    For an Xid, the key is its GPU and number. For any other message, it is the beginning of the
    text with all numbers replaced by 0.
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
        # The journal's reason is more useful than the ring buffer's, unless the journal was empty.
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
    # A user who is in none of the journal's groups can read only the user's own journal, which has
    # no kernel messages.
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
