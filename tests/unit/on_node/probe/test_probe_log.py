"""The kernel log as the probe reads it: whichever program has it, however long, never invented.

The programs are scripts in a tree of the test's own, in the words of journalctl and dmesg.
"""

from __future__ import annotations

import pytest

from gpufleet.on_node.common import kernel_messages, linux_facts
from gpufleet.on_node.common.answers import read

XID = "NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FIRST = "[    0.000000] gpu-01 kernel: Linux version 6.8.0-90-generic (build@host) #91 SMP"
RING_FIRST = "[    0.000000] Linux version 6.8.0-90-generic (build@host) #91 SMP"

NOT_ALLOWED = 'echo "No journal files were opened due to insufficient permissions." >&2; exit 1'
OWN_JOURNAL_ONLY = (
    'echo "Hint: You are currently not seeing messages from other users and the system." >&2; '
    'echo "-- No entries --"'
)
NO_JOURNAL = 'echo "No journal files were found." >&2; echo "-- No entries --"'
RING_REFUSED = 'echo "dmesg: read kernel buffer failed: Operation not permitted" >&2; exit 1'


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """`logged(journalctl="...", dmesg="...")`: what the probe makes of these two scripts."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))

    def run(**scripts):
        for name, script in scripts.items():
            at = tmp_path / "usr/bin" / name
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(f"#!/bin/sh\n{script}\n")
            at.chmod(0o755)
        return read(kernel_messages.kernel_log)

    return run


def said(*lines):
    """A script that prints these lines."""
    return "cat <<'END'\n" + "\n".join(lines) + "\nEND"


def test_lines_about_gpus_are_kept_with_their_time(logged):
    found = logged(
        journalctl=said(
            FIRST,
            "[    1.500000] gpu-01 kernel: EXT4-fs (nvme0n1p2): mounted filesystem",
            f"[ 4711.123456] gpu-01 kernel: {XID}",
        )
    )

    assert found == {
        "source": "journal",
        "complete": True,
        "dropped": 0,
        "lines": [[4711.123456, XID]],
    }


@pytest.mark.parametrize(
    "line",
    [
        XID,
        "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61 egress",
        "nvidia: module verification failed: signature and/or required key missing",
        "Loading of unsigned module is rejected",
        "Loading of module with unavailable key is rejected",
        "Lockdown: modprobe: unsigned module loading is restricted",
        "nouveau 0000:01:00.0: NVIDIA GA102 (b72000a1)",
        "pcieport 0000:16:01.0: AER: Corrected error message received from 0000:18:00.0",
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
    ],
)
def test_every_shape_that_a_check_reads_is_kept(logged, line):
    found = logged(journalctl=said(FIRST, f"[   77.000000] gpu-01 kernel: {line}"))

    assert found["lines"] == [[77.0, line]]


def test_a_driver_that_is_only_named_on_the_command_line_is_not_there(logged):
    """`modprobe.blacklist=nouveau` is how one keeps it away."""
    found = logged(
        journalctl=said(
            FIRST,
            "[    0.000000] gpu-01 kernel: Command line: BOOT_IMAGE=/x modprobe.blacklist=nouveau",
            "[    0.010000] gpu-01 kernel: Kernel command line: modprobe.blacklist=nouveau",
        )
    )

    assert found["lines"] == []


@pytest.mark.parametrize("journalctl", [NOT_ALLOWED, OWN_JOURNAL_ONLY, NO_JOURNAL])
def test_a_log_that_may_not_be_read_is_not_an_empty_log(logged, journalctl):
    found = logged(journalctl=journalctl, dmesg=RING_REFUSED)

    assert found["missing"] == "no_permission"


@pytest.mark.parametrize("journalctl", [NOT_ALLOWED, OWN_JOURNAL_ONLY, NO_JOURNAL])
def test_the_ring_answers_where_the_journal_does_not(logged, journalctl):
    """Red Hat's kernels let everybody read it."""
    found = logged(journalctl=journalctl, dmesg=said(RING_FIRST, f"[  900.000000] {XID}"))

    assert (found["source"], found["complete"]) == ("dmesg", True)
    assert found["lines"] == [[900.0, XID]]


@pytest.mark.parametrize("journalctl", [NOT_ALLOWED, OWN_JOURNAL_ONLY])
def test_a_refusal_by_the_journal_is_said_where_nothing_else_can_tell(logged, journalctl):
    assert logged(journalctl=journalctl)["missing"] == "no_permission"


def test_a_log_without_a_line_is_no_log(logged):
    """A container's: that no error was logged there says nothing of the GPUs."""
    assert logged(journalctl=NO_JOURNAL, dmesg=":")["missing"] == "absent"


def test_a_machine_without_both_programs_says_so(logged):
    assert logged()["missing"] == "no_program"


def test_a_journal_that_lost_its_beginning_says_so(logged):
    """Rotated away, or never kept: what was said before is unknown."""
    found = logged(
        journalctl=said(f"[86400.000000] gpu-01 kernel: {XID}"),
        dmesg=said("[86300.000000] e1000e: eth0 NIC Link is Up"),
    )

    assert (found["source"], found["complete"]) == ("journal", False)
    assert found["lines"] == [[86400.0, XID]]


def test_the_ring_is_taken_where_it_reaches_farther_back(logged):
    found = logged(
        journalctl=said("[86400.000000] gpu-01 kernel: usb 1-1: new device"),
        dmesg=said(RING_FIRST, f"[  900.000000] {XID}"),
    )

    assert (found["source"], found["lines"]) == ("dmesg", [[900.0, XID]])


def test_the_first_line_of_an_arm_kernel_is_a_beginning_too(logged):
    found = logged(
        journalctl=NO_JOURNAL,
        dmesg=said("[    0.000000] Booting Linux on physical CPU 0x0000000000 [0x410fd4f0]"),
    )

    assert found["complete"] is True


def test_a_log_from_the_first_instant_is_whole_whatever_it_says_first(logged):
    """A kernel built to be quiet, or a ring that lost a few of its first hundred lines."""
    found = logged(journalctl=NO_JOURNAL, dmesg=said("[    0.000000] BIOS-provided RAM map:"))

    assert found["complete"] is True


@pytest.mark.parametrize(
    ("first", "complete"),
    [("Linux version 6.8.0-90-generic (build@host) #91 SMP", True), ("usb 1-1: new device", False)],
)
def test_a_ring_without_times_is_whole_only_with_the_kernels_first_words(logged, first, complete):
    """printk.time=0: a ring that wrapped must not pass for one from the first instant."""
    found = logged(journalctl=NO_JOURNAL, dmesg=said(first, XID))

    assert (found["complete"], found["lines"]) == (complete, [[0.0, XID]])


def test_callers_and_continued_lines_are_read(logged):
    """Kernels may print the thread; a message of several lines has one time."""
    found = logged(
        journalctl=NO_JOURNAL,
        dmesg=said(RING_FIRST, f"[   12.500000][  T417] {XID}", "               NVRM: more of it"),
    )

    assert found["lines"] == [[12.5, XID], [12.5, "NVRM: more of it"]]


def test_a_flood_of_one_kind_drives_nothing_out(logged):
    """An application may raise Xid 31 for hours after the line that matters."""
    flood = (
        f"[   50.000000] gpu-01 kernel: {XID}\nEOF\n"
        'seq 1 50000 | sed "s/.*/[  100.000000] gpu-01 kernel: '
        'NVRM: Xid (PCI:0000:2a:00): 31, pid=&, name=python3, MMU Fault/"'
    )

    found = logged(journalctl=f"cat <<'EOF'\n{FIRST}\n{flood}")

    assert found["lines"][0] == [50.0, XID]
    assert len(found["lines"]) == 1 + kernel_messages.KEPT_OF_A_KIND
    assert "pid=50000," in found["lines"][-1][1]  # the newest are kept
    assert found["dropped"] == 50_000 - kernel_messages.KEPT_OF_A_KIND


def test_no_more_than_two_thousand_lines_are_kept_the_newest(logged):
    """Eleven kinds of line, each below its own limit, are together above the common one."""
    lines = [
        f"[{100 * kind + n / 1000:12.6f}] gpu-01 kernel: NVRM: Xid (PCI:0000:18:00): {kind}, n={n}"
        for kind in range(1, 12)
        for n in range(200)
    ]

    found = logged(journalctl=said(FIRST, *lines))

    assert (len(found["lines"]), found["dropped"]) == (2000, 200)
    assert found["lines"][0][1].startswith("NVRM: Xid (PCI:0000:18:00): 2,")


def test_a_journal_that_hangs_leaves_the_ring(logged, monkeypatch):
    """Its files lie on a disk; the ring lies in the kernel."""
    monkeypatch.setitem(kernel_messages.SECONDS, "journal", 1)

    found = logged(journalctl="exec sleep 600", dmesg=said(RING_FIRST, f"[    9.000000] {XID}"))

    assert (found["source"], len(found["lines"])) == ("dmesg", 1)


def test_bytes_that_are_no_text_are_read_past(logged):
    found = logged(
        journalctl=f"printf '%s\\n' '{FIRST}'; printf '[  5.0] gpu-01 kernel: NVRM: \\377'"
    )

    assert found["lines"] == [[5.0, "NVRM: �"]]
