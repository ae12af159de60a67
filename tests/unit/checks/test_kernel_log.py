"""What the kernel's log says of GPUs and NVSwitches, and when that is no longer true."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gpufleet.checks.finding import Action
from gpufleet.checks.kernel_log import Log
from gpufleet.checks.xid_table import KINDS
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.checks.conftest import PROFILES, Judged

Document = Callable[[str], Any]
Judge = Callable[..., Judged]

GPU5 = "0000:ab:00"  # h100x8's GPU 5, without its function, as the driver writes it
BLOCK5 = {("xid", "block", 5)}
LOADING = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"

# Every shape of docs/checks/xid.md: the line, the GPU that it is about, the number.
SHAPES = [
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "0000:03:00.0", 14),
    (
        "NVRM: Xid (PCI:0000:0f:00): 94, pid=2503421, name=python3, Ch 00000008",
        "0000:0f:00.0",
        94,
    ),
    (
        "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off "
        "the bus.",
        "0000:05:00.0",
        79,
    ),
    (
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: SM (0x1). RST: No",
        "0000:01:00.0",
        94,
    ),
    (
        "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0)",
        "0018:01:00.0",
        149,
    ),
    ("NVRM: Xid (PCI:0000000F:0A:00): 13, Graphics SM Warp Exception", "000f:0a:00.0", 13),
    ("NVRM: Xid (PCI:0000:b3:00.0): 31, pid=1, MMU Fault", "0000:b3:00.0", 31),
    (
        "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU "
        "Reset Required)",
        "0008:01:00.0",
        154,
    ),
    ("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.", "0000:b3:00.0", 79),
    ("NVRM:  Xid (PCI:0000:18:00): 79, two spaces", "0000:18:00.0", 79),
    ("NVRM: GPU0 Xid (PCI:0000:18:00): 79, numbered", "0000:18:00.0", 79),
    ("nvidia 0000:18:00.0: NVRM: Xid (PCI:0000:18:00): 79, by the device", "0000:18:00.0", 79),
    ("NVRM: Xid(PCI:0000:18:00):79", "0000:18:00.0", 79),
    ("NVRM: xid (PCI:0000:18:00): 79, small", "0000:18:00.0", 79),
    ("NVRM: Xid (GPU-1aff0000): 79, by its UUID", None, 79),
]


def read(*texts: str) -> list[tuple[str | None, int | None]]:
    """Return the GPU and the number of every Xid that these lines report."""
    log = Log([(float(at), text) for at, text in enumerate(texts)])
    return [(xid.bus_id, xid.number) for xid in log.xids]


def logged(document: Any, *lines: tuple[float, str]) -> Any:
    """Return the document of a node whose kernel has also said these lines."""
    document["kernel_log"]["lines"] = sorted(
        [*document["kernel_log"]["lines"], *map(list, lines)], key=lambda line: line[0]
    )
    return document


def xid(number: int, rest: str = "pid=1, name=python3", place: str = GPU5) -> str:
    return f"NVRM: Xid (PCI:{place}): {number}, {rest}"


def sxid(number: int, rest: str) -> str:
    return f"nvidia-nvswitch2: SXid (PCI:0000:c6:00.0): {number}, {rest}"


# --- reading lines


@each_row(("line", "bus_id", "number"), SHAPES, ids=lambda value: str(value)[:40])
def test_every_shape_of_an_xid_is_read(line: str, bus_id: str, number: int) -> None:
    assert read(line) == [(bus_id, number)]


def test_a_gpu_off_the_bus_is_known_by_three_lines_without_a_number() -> None:
    """Another line may come between, and another GPU's sentence is another GPU's."""
    assert read(
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:20b5) installed in this system has",
        "NVRM: GPU at PCI:0000:17:00: GPU-6b1f6a1c-0000-0000-0000-000000000000",
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:c4:00.0",
        "NVRM: (PCI ID: 10de:20b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ) == [("0000:b3:00.0", 79), ("0000:c4:00.0", 79)]


def test_a_gpu_off_the_bus_is_found_even_if_no_line_names_it() -> None:
    assert read("NVRM: fallen off the bus and is not responding to commands.") == [(None, 79)]
    far = ["NVRM: The NVIDIA GPU 0000:b3:00.0", *["NVRM: nothing"] * 9]
    assert read(*far, "NVRM: something has fallen off the bus") == [(None, 79)]


@each_row(
    "line",
    [
        LOADING,
        "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:1f02) installed in this system is not "
        "supported by this driver",
        "NVRM: GPU at PCI:0000:b3:00: GPU-6b1f6a1c-0000-0000-0000-000000000000",
        "NVRM: GPU 0000:b3:00.0: GPU serial number is 1650522003820.",
        "vllm: read 'NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.'",
        "audit: comm=nvidia-smi Xid 79",
        "usb 1-2: device has fallen off the bus",
        "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61",
    ],
)
def test_other_text_is_no_xid(line: str) -> None:
    assert read(line) == []


@each_row(
    "line",
    [
        "NVRM: Xid : 32, pid=2280636",
        "NVRM: Xid (PCI:0000:18:00): 0x4f, in hexadecimal",
        "NVRM: new words of Xid 79",
        "NVRM: GPU 3 raised xid 79",
        "nvidia 0000:18:00.0: Xid 79",
        "audit: comm=nvidia-smi Xid 79",
    ],
)
def test_a_line_about_an_xid_that_cannot_be_read_is_shown(
    document: Document, judged: Judge, line: str
) -> None:
    found = judged(logged(document("h100x8"), (99.0, line)))
    assert found.troubles == {("xid", "warn", None)}
    assert line in found.text("xid")


@pytest.mark.parametrize("line", ["RPC: nvidia-smi: xid 0x1f34 timed out", "NVRM: maxid 79"])
def test_other_numbers_that_are_called_so_are_no_xid(
    document: Document, judged: Judge, line: str
) -> None:
    assert judged(logged(document("h100x8"), (99.0, line))).troubles == set()


def test_unreadable_words_about_a_gpu_off_the_bus_are_still_79() -> None:
    assert read("NVRM: Xid : 79, GPU has fallen off the bus") == [(None, 79)]


@each_row(
    ("line", "severity", "words"),
    [
        ("nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034 Fatal Link 28", "block", "SXid 20034"),
        ("nvidia-nvswitch0: SXid (PCI:0000:c4:00.0 x): 20034, Fatal", "block", "SXid 20034"),
        ("nvidia-nvswitch: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 28", "block", "SXid 20034"),
        ("nvidia-nvswitch: SXid (PCI:0000:c4:00.0): 12028, Non-fatal", "warn", "SXid 12028"),
        ("NVRM: SXid (PCI:0000:c4:00.0): 20034, Fatal", "block", "SXid 20034"),
        (
            "nvidia-nvswitch0: SXid (garbled): 20034, Fatal",
            "block",
            "a fatal SXid cannot be parsed",
        ),
        ("nvidia-nvswitch0: SXid (PCI:..): 20034 Fatal Link", "block", "a fatal SXid cannot be"),
        ("nvidia-nvswitch0: SXid (garbled): 12028, Non-fatal", "warn", "an SXid cannot be parsed"),
        ("nvidia-nvswitch0: SXid (garbled): 12028", "warn", "an SXid cannot be parsed"),
        ("nvidia 0000:c4:00.0: SXid 12028", "warn", "an SXid cannot be parsed"),
    ],
)
def test_no_line_about_an_sxid_is_passed_over(
    document: Document, judged: Judge, line: str, severity: str, words: str
) -> None:
    found = judged(logged(document("h100x8"), (99.0, line)))
    assert found.troubles == {("sxid", severity, None)}
    assert words in found.worst("sxid").found
    assert line in found.worst("sxid").found
    resets = Action.RESET_GPU in {each.action for each in found.worst("sxid").remedy}
    assert resets is (severity == "block")


def test_an_unreadable_sxid_before_the_driver_was_loaded_again_is_history(
    document: Document, judged: Judge
) -> None:
    lines = [(99.0, "nvidia-nvswitch0: SXid (garbled): 20034, Fatal"), (120.0, LOADING)]
    found = judged(logged(document("h100x8"), *lines))
    assert found.troubles == set()
    assert found.worst("sxid").severity.word == "info"
    assert {each.action for each in found.worst("sxid").remedy} == {Action.LOOK}


# --- what a number means


@each_row(
    ("number", "severity"),
    [
        *((number, "block") for number in (46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136)),
        *((number, "block") for number in (140, 143, 155, 158, 167, 168, 171, 172)),
        *((number, "warn") for number in (63, 92, 94, 109, 121, 137, 157, 185, 999)),
    ],
)
def test_a_number_has_its_severity(
    document: Document, judged: Judge, number: int, severity: str
) -> None:
    node = logged(document("h100x8"), (864000.5 - 7200, xid(number)))
    # What the driver would still say of a GPU that nobody has reset; recovery-action's business.
    node["gpus"][5]["recovery_action"] = {"missing": "function_not_found", "code": 13}
    found = judged(node)
    assert found.troubles == {("xid", severity, 5)}
    text = found.worst("xid").found
    assert f"Xid {number}" in text
    assert "1 line 2 hours ago" in text
    assert xid(number) in text
    assert found.worst("xid").remedy


@each_row("number", [13, 31, 32, 43, 45, 68, 69, 93])
def test_a_programs_own_fault_stops_nothing(document: Document, judged: Judge, number: int) -> None:
    found = judged(logged(document("h100x8"), *((100.0 + at, xid(number)) for at in range(50))))
    assert found.troubles == set()
    (said,) = [one for one in found.of("xid") if one.severity.word == "info"]
    assert "50 lines" in said.found


def test_a_gpu_and_a_number_make_one_finding(document: Document, judged: Judge) -> None:
    node = logged(
        document("h100x8"),
        (100.0, xid(79, "GPU has fallen off the bus.")),
        (100.1, f"NVRM: GPU {GPU5}.0: GPU has fallen off the bus."),
        (101.0, xid(119)),
        (102.0, xid(119, place="0000:18:00")),
    )
    found = judged(node)
    assert [(one.gpu and one.gpu.index, one.found[:7]) for one in found.of("xid")] == [
        (0, "Xid 119"),
        (5, "Xid 79,"),
        (5, "Xid 119"),
    ]
    assert "2 lines" in found.of("xid")[1].found


def test_a_timeout_that_repeats_blocks(document: Document, judged: Judge) -> None:
    once = logged(document("h100x8"), (100.0, xid(109)))
    assert judged(once).troubles == {("xid", "warn", 5)}
    assert judged(logged(once, (200.0, xid(109)))).troubles == BLOCK5


def test_an_nvlink_error_blocks_where_replicas_span_gpus(document: Document, judged: Judge) -> None:
    vllm = {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}

    def settings(width: int) -> dict[str, Any]:
        model = {"model": "/models/m", "tensor_parallel": width}
        return {"vllm": vllm, "serving": {"m": model}}

    node = logged(document("h100x8"), (100.0, xid(74)))
    assert judged(node).troubles == BLOCK5
    assert judged(node, settings(2)).troubles == BLOCK5
    assert judged(node, settings(1)).troubles == {("xid", "warn", 5)}
    without = logged(document("l40sx8"), (100.0, xid(74, place="0000:17:00")))
    bus_id = without["gpus"][0]["pci"]["bus_id"]
    without["kernel_log"]["lines"][-1][1] = xid(74, place=bus_id.removesuffix(".0"))
    assert judged(without).troubles == {("xid", "warn", 0)}


@each_row(
    ("said", "severity"),
    [
        ("NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6)", "block"),
        ("NETIR_LINK_EVT Nonfatal XC0 i0 Link 08 (0x004505c6)", "warn"),
        ("NETIR_LINK_EVT Non-fatal XC0 i0 Link 08 (0x004505c6)", "warn"),
        ("NETIR_LINK_EVT XC0 i0 Link 08 (0x004505c6)", "block"),
    ],
)
@each_row("number", [144, 149, 150])
def test_an_nvlink5_error_says_itself_whether_it_is_fatal(
    document: Document, judged: Judge, number: int, said: str, severity: str
) -> None:
    node = document("gb200x4")
    place = node["gpus"][1]["pci"]["bus_id"].removesuffix(".0")
    assert judged(logged(node, (100.0, xid(number, said, place)))).troubles == {
        ("xid", severity, 1)
    }


def test_one_fatal_nvlink5_error_among_harmless_ones_blocks(
    document: Document, judged: Judge
) -> None:
    lines = [(100.0, xid(149, "X Fatal Link 1")), (101.0, xid(149, "X Nonfatal Link 1"))]
    assert judged(logged(document("h100x8"), *lines)).troubles == BLOCK5


def test_the_page_has_every_number_under_its_severity() -> None:
    """Beside those whose severity depends on more than the number, which it explains."""
    page = (ROOT / "docs/checks/xid.md").read_text()
    rows = dict(re.findall(r"^\| (info|warn|block)[^|]*\| ([^|]*) \|$", page, re.MULTILINE))
    for number, kind in KINDS.items():
        ranges = re.findall(r"(\d+)(?: to (\d+))?", rows[kind.severity.word])
        assert any(int(a) <= number <= int(b or a) for a, b in ranges), number


# --- which GPU


@each_row("profile", PROFILES)
def test_the_address_leads_to_the_gpu(document: Document, judged: Judge, profile: str) -> None:
    """Also in domains above zero, as Grace has them, and in capitals."""
    node = document(profile)
    last = node["gpus"][-1]
    place = last["pci"]["nvml_bus_id"].removesuffix(".0")
    found = judged(logged(node, (100.0, xid(46, place=place))))
    assert found.troubles == {("xid", "block", last["index"])}


def test_an_address_that_nvml_does_not_list_is_named(document: Document, judged: Judge) -> None:
    found = judged(logged(document("h100x8"), (100.0, xid(79, place="0000:e9:00"))))
    assert found.troubles == {("xid", "block", None)}
    assert "0000:e9:00.0" in found.worst("xid").found


def test_the_only_gpu_that_is_silent_is_the_one_that_fell_off(
    document: Document, judged: Judge
) -> None:
    node = logged(document("h100x8"), (100.0, xid(79, "GPU has fallen off the bus.")))
    node["gpus"][5] = {"index": 5, "missing": "lost", "code": 15}
    assert judged(node).worst("xid").gpu is not None
    assert judged(node).troubles >= BLOCK5
    node["pci"] = [one for one in node["pci"] if one["bus_id"] != node["gpus"][6]["pci"]["bus_id"]]
    node["gpus"][6] = {"index": 6, "missing": "lost", "code": 15}
    assert ("xid", "block", None) in judged(node).troubles  # which of the two is not known


def test_an_address_that_nothing_has_is_not_the_silent_gpus(
    document: Document, judged: Judge
) -> None:
    node = logged(document("h100x8"), (100.0, xid(79, place="0000:e9:00")))
    node["gpus"][5] = {"index": 5, "missing": "lost", "code": 15}
    assert ("xid", "block", None) in judged(node).troubles


def test_the_log_speaks_while_the_driver_is_silent(document: Document, judged: Judge) -> None:
    node = logged(document("h100x8"), (100.0, xid(79)))
    node["driver"]["init"] = {"missing": "unknown", "code": 999}
    for section in ("gpus", "nvlink", "numa", "fabric", "pcie"):
        node[section] = []
    node["p2p"] = {kind: [] for kind in node["p2p"]}
    assert ("xid", "block", None) in judged(node).troubles


# --- what is over


def test_what_was_before_the_driver_was_loaded_again_is_history(
    document: Document, judged: Judge
) -> None:
    node = logged(document("h100x8"), (100.0, xid(79)), (101.0, xid(95)), (500.0, LOADING))
    found = judged(node)
    assert found.troubles == set()
    assert "before the driver was loaded" in found.worst("xid").found
    assert judged(logged(node, (501.0, xid(79)))).troubles == BLOCK5


def test_what_was_before_the_driver_took_its_request_back_is_history(
    document: Document, judged: Judge
) -> None:
    """For that GPU alone."""
    change = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    node = logged(
        document("h100x8"),
        (100.0, xid(119)),
        (101.0, xid(119, place="0000:18:00")),
        (200.0, xid(154, change)),
    )
    assert judged(node).troubles == {("xid", "block", 0)}


@each_row(
    ("action", "counted", "ecc", "severity"),
    [
        (0, 0, 1, "warn"),
        (0, 1, 1, "block"),
        (0, 0, 0, "block"),  # without ECC nothing counts
        ({"missing": "function_not_found", "code": 13}, 0, 1, "block"),
        (0, {"missing": "timeout", "seconds": 15}, 1, "block"),
    ],
)
def test_a_memory_error_is_over_only_if_counter_and_driver_both_say_so(  # noqa: PLR0917
    document: Document, judged: Judge, action: Any, counted: Any, ecc: int, severity: str
) -> None:
    node = logged(document("h100x8"), *((100.0, xid(number)) for number in (48, 95, 140)))
    node["gpus"][5]["recovery_action"] = action
    node["gpus"][5]["ecc_uncorrected_volatile"] = counted
    node["gpus"][5]["ecc_mode"]["current"] = ecc
    assert [one.severity.word for one in judged(node).of("xid")] == [severity] * 3


@each_row(
    ("changes", "now", "severity"),
    [
        (["from 0x0 (None) to 0x2 (Node Reboot Required)"], 2, "block"),
        (["from 0x0 (None) to 0x1 (PF FLR)"], 1, "block"),
        (["from 0x0 (None) to 0x9 (Dance)"], 9, "block"),
        (["to something else"], 1, "block"),
        (["from 0x0 (None) to 0x2 (Node Reboot Required)"], 0, "warn"),
        (["from 0x1 (GPU Reset Required) to 0x0 (None)"], 0, "info"),
        (["from 0x0 (None) to 0x1 (GPU Reset Required)", "from 0x1 () to 0x0 (None)"], 0, "info"),
        (["from 0x1 () to 0x0 (None)", "from 0x0 () to 0x2 (OS Reboot)"], 2, "block"),
    ],
)
def test_the_newest_recovery_action_counts_and_nvml_more_than_it(
    document: Document, judged: Judge, changes: list[str], now: int, severity: str
) -> None:
    texts = [xid(154, f"GPU recovery action changed {change}") for change in changes]
    node = logged(document("h100x8"), *((100.0 + at, text) for at, text in enumerate(texts)))
    node["gpus"][5]["recovery_action"] = now
    assert judged(node).worst("xid", 5).severity.word == severity


@each_row(
    ("action", "words", "resets"),
    [
        (1, "the driver requests a GPU reset", True),
        (2, "the driver requests a reboot", False),
        (3, "the driver requests draining P2P", True),
        (4, "the driver requests draining and a GPU reset", True),
        (5, "the driver requests recovery of the IMEX domain", False),
        (6, "the driver requests a bus reset", False),
    ],
)
def test_what_the_driver_asks_for_is_the_remedy(
    document: Document, judged: Judge, action: int, words: str, resets: bool
) -> None:
    change = f"GPU recovery action changed from 0x0 (None) to 0x{action} (Words)"
    node = logged(document("h100x8"), (100.0, xid(154, change)))
    node["gpus"][5]["recovery_action"] = action
    actions = {each.action for each in judged(node).worst("xid", 5).remedy}
    assert words in judged(node).text("xid", 5)
    assert Action.REBOOT in actions
    assert (Action.RESET_GPU in actions) is resets


# --- a log that is not whole


def test_a_log_without_its_beginning_is_no_pass(document: Document, judged: Judge) -> None:
    node = document("h100x8")
    node["kernel_log"] |= {"source": "dmesg", "complete": False, "lines": []}
    found = judged(node)
    assert found.troubles == {("xid", "warn", None), ("sxid", "warn", None)}
    assert "dmesg" in found.text("xid")
    assert "10 days ago" in found.text("xid")


def test_repetitions_that_were_dropped_do_not_matter_lines_cut_off_do(
    document: Document, judged: Judge
) -> None:
    node = document("t4x1")
    node["kernel_log"]["dropped"] = 700
    assert judged(node).troubles == set()
    node["kernel_log"]["lines"] = [[1.0 + at, "NVRM: something"] for at in range(2000)]
    assert judged(node).troubles == {("xid", "warn", None)}
    node["kernel_log"]["dropped"] = 0
    assert judged(node).troubles == set()


@pytest.mark.parametrize(
    "why", [{"missing": "no_permission", "detail": "dmesg"}, {"missing": "timeout", "seconds": 4}]
)
def test_a_log_that_cannot_be_read_is_unknown(
    document: Document, judged: Judge, why: dict[str, Any]
) -> None:
    """And says that root could, if root did not ask. Without NVSwitches that is one trouble."""
    node = document("h100x8")
    node["kernel_log"], node["user"] = why, {"uid": 1000}
    found = judged(node)
    assert found.troubles == {("xid", "unknown", None), ("sxid", "unknown", None)}
    assert ("only root" in found.text("xid")) == (why["missing"] == "no_permission")
    node = document("l40sx8")
    node["kernel_log"] = why
    assert judged(node).troubles == {("xid", "unknown", None)}


def test_a_log_that_is_no_log_is_unknown(document: Document, judged: Judge) -> None:
    node = document("t4x1")
    node["kernel_log"] = {"source": "journal", "complete": True, "dropped": 0, "lines": [[1.0]]}
    assert ("xid", "unknown", None) in judged(node).troubles


# --- NVSwitches


@pytest.mark.parametrize(
    ("said", "severity"),
    [
        ("Fatal, Link 24 LTSSM Fault Up", "block"),
        ("Non-fatal, Link 61 egress non-posted PRIV error (First)", "warn"),
        ("Link 61 something that the driver says one day", "block"),
    ],
)
def test_a_switchs_error_blocks_unless_it_says_that_it_is_not_fatal(
    document: Document, judged: Judge, said: str, severity: str
) -> None:
    """The lines with registers, which do not repeat the word, change nothing."""
    node = logged(
        document("h100x8"),
        (100.0, sxid(20034, said)),
        (100.0, sxid(20034, "Severity 0 Engine instance 61 Sub-engine instance 00")),
        (100.0, sxid(20034, "Data {0x50610002, 0x10100030, 0x00000000}")),
    )
    found = judged(node)
    assert found.troubles == {("sxid", severity, None)}
    assert "0000:c6:00.0" in found.worst("sxid").found
    assert said in found.worst("sxid").found


def test_an_error_that_was_fatal_once_is_fatal(document: Document, judged: Judge) -> None:
    words = ("Fatal, Link 24", "Non-fatal, Link 24")
    node = logged(document("h100x8"), *((100.0, sxid(20034, said)) for said in words))
    assert judged(node).troubles == {("sxid", "block", None)}


def test_a_switchs_error_before_the_driver_was_loaded_again_is_history(
    document: Document, judged: Judge
) -> None:
    node = logged(document("h100x8"), (100.0, sxid(20034, "Fatal, Link 24")), (500.0, LOADING))
    assert judged(node).troubles == set()


def test_a_switchs_error_counts_where_no_switch_is_on_pci(
    document: Document, judged: Judge
) -> None:
    node = logged(document("b200x8"), (100.0, sxid(20034, "Fatal, Link 24 LTSSM Fault Up")))
    assert judged(node).troubles == {("sxid", "block", None)}


@each_row("profile", PROFILES)
def test_a_healthy_machines_log_is_no_trouble(
    document: Document, judged: Judge, profile: str
) -> None:
    found = judged(document(profile))
    assert {one.severity.word for check in ("xid", "sxid") for one in found.of(check)} == {"ok"}


# --- the whole catalogue

# NVIDIA's Xid catalogue of October 2025 by what it has done at once: all of 1 to 172 but those that
# the tests above have.
ACTIONS = {
    "RESTART_APP": (8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82,
                    83, 84, 85, 86, 88, 89, 94, 96, 97, 98, 99, 105, 126, 135, 139),
    "IGNORE": (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157,
               160, 161),
    "RESET_GPU": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "CONTACT_SUPPORT": (1, 7, 9, 12, 15, 24, 26, 30, 33, 36, 42, 47, 49, 53, 55, 59, 61, 65, 73, 81,
                        87, 90, 91, 111, 118, 122, 125, 138, 142),
    "UPDATE_SWFW": (78,), "CHECK_UVM": (159,), "RESTART_BM": (79,), "RESTART_VM": (151,),
    "CHECK_MECHANICALS": (54,), "WORKFLOW_NVLINK_ERR": (74,), "WORKFLOW_NVLINK5_ERR": (144, 150),
}  # fmt: skip


def test_every_number_of_nvidias_catalogue_is_in_the_table() -> None:
    assert set(range(1, 173)) <= set(KINDS)


@each_row(("action", "number"), [(a, n) for a, numbers in ACTIONS.items() for n in numbers])
def test_a_number_has_the_action_of_nvidias_catalogue(action: str, number: int) -> None:
    assert KINDS[number].action == action


def test_a_finding_names_nvidias_action(document: Document, judged: Judge) -> None:
    said = judged(logged(document("h100x8"), (100.0, xid(39)))).worst("xid", gpu=5)

    assert said.severity.word == "info"
    assert "not in gpufleet's table" not in said.found
    assert said.source.endswith("RESTART_APP")


@each_row(
    ("apart", "others", "severity"),
    [(600, 0, "warn"), (600, 5, "info"), (600, 2, "warn"), (5, 0, "info"), (30_000, 0, "info")],
)
@each_row("number", [13, 31, 39])
def test_a_programs_fault_on_one_gpu_alone_may_be_the_gpu(  # noqa: PLR0917
    document: Document, judged: Judge, number: int, apart: int, others: int, severity: str
) -> None:
    here = [(1000.0 + at * apart, xid(number)) for at in range(5)]
    there = [(1001.0 + at * apart, xid(number, place="0000:18:00")) for at in range(others)]
    said = judged(logged(document("h100x8"), *sorted([*here, *there])))

    assert said.worst("xid", gpu=5).severity.word == severity


def test_a_gpu_alone_cannot_be_told_from_its_program(document: Document, judged: Judge) -> None:
    lines = [(1000.0 + at * 600, xid(31, place="0000:00:1e")) for at in range(9)]

    assert judged(logged(document("t4x1"), *lines)).troubles == set()
