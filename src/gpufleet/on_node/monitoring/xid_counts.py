"""RUNS ON THE NODE: count each GPU's Xids since boot in the kernel log.

The program runs every minute, and logs may be long. So it caches the counts with its position in
the log, and reads only new lines. The source is the journal. If the journal cannot be read, the
source is the kernel's ring buffer.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict

from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import refusal_of, run
from gpufleet.on_node.common.kernel_messages import STAMP
from gpufleet.on_node.common.linux_facts import line

SECONDS = {"journal": 10, "dmesg": 4}

# "NVRM: Xid (PCI:0000:01:00): 79, ...". Some drivers write the GPU before it, or a MIG instance
# after it.
XID = re.compile(
    r"NVRM:.*?\bXid\s*\((?:PCI:)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})[^)]*\):\s*(\d+)",
    re.IGNORECASE,
)
CURSOR = re.compile(r"-- cursor: (\S+)")

Known = Dict[str, Any]


class Counted:
    """The cached counts, to which the Xids in new lines are added while the log is read."""

    def __init__(self, known: Known) -> None:
        self.counts: Dict[str, int] = dict(known.get("counts", {}))
        self.cursor: str = known.get("cursor", "")
        self.until: float = known.get("until", -1.0)
        self.rest = b""
        self.lines = 0

    def take(self, piece: bytes) -> None:
        """Add the next piece of the log's text."""
        *rows, self.rest = (self.rest + piece).split(b"\n")
        for row in rows:
            self.add(row.decode("utf-8", "replace"))

    def add(self, text: str) -> None:
        """Count the Xid in one line, or note a cursor."""
        found = CURSOR.match(text)
        if found:
            self.cursor = found.group(1)
            return
        self.lines += bool(text) and not text.startswith("-- ")
        xid = XID.search(text)
        if xid:
            place, number = xid.groups()
            key = "%s %s" % (sysfs_address(place), number)
            self.counts[key] = self.counts.get(key, 0) + 1

    def add_later(self, text: str) -> None:
        """Add one line of the ring buffer if it is newer than all lines that were read before."""
        stamped = STAMP.match(text)
        at = float(stamped.group(1)) if stamped else self.until
        if at > self.until:
            self.until = at
            self.add(text)


def sysfs_address(place: str) -> str:
    """
    Return the beginning of a GPU's address in sysfs, for example "0000:3b:00" for
    "00000000:3B:00".
    """
    domain, rest = place.lower().split(":", 1)
    return "%04x:%s" % (int(domain, 16), rest)


def count_new(known: Known) -> Known:
    """
    Return {"boot", "counts": {"0000:3b:00 79": 2}, ...} with the Xids since `known` added.

    `known` is the previous result, or {} in the first run. Raises `CannotRead` if no log can be
    read.
    """
    boot = line("/proc/sys/kernel/random/boot_id")
    if known.get("boot") != boot:
        known = {}
    found = read(journal, known if "cursor" in known else {})
    if is_missing(found):
        if found["missing"] not in {"absent", "no_program"}:
            raise CannotRead(**{"reason": found.pop("missing"), **found})
        found = ring(known if "until" in known else {})
    return {"boot": boot, **found}


def journal(known: Known) -> Known:
    """Count Xids in the journal's kernel log of this boot, from the cached position."""
    count = Counted(known)
    after = ("--after-cursor=" + count.cursor,) if count.cursor else ()
    output = run(
        "journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "--show-cursor", *after,
        seconds=SECONDS["journal"], take=count.take,
    )  # fmt: skip
    if "insufficient permissions" in output.err or "not seeing messages" in output.err:
        raise CannotRead("no_permission", detail="journalctl")
    if after and output.status:  # this position was rotated away, or it is of a different journal
        return journal({})
    if not count.lines and not after:
        raise CannotRead("absent", detail="the journal has no kernel log of this boot")
    return {"counts": count.counts, "cursor": count.cursor}


def ring(known: Known) -> Known:
    """Count Xids in the kernel's ring buffer."""
    count = Counted(known)
    add: Callable[[str], None] = count.add_later
    output = run("dmesg", seconds=SECONDS["dmesg"])
    if output.status:
        raise refusal_of("dmesg", output)
    for row in output.out.splitlines():
        add(row)
    return {"counts": count.counts, "until": count.until}
