"""PCIe errors by whose way they are on; GPUs that did not start, by whether they answer now."""

from __future__ import annotations

from tests.support.rows import each_row

LOADING = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.124.06"
DISK = "0000:c1:00.0"
DAY = 86400


def logged(document, *lines):
    document["kernel_log"]["lines"] += [[seconds, text] for seconds, text in lines]
    return document


def place(document, gpu=5):
    return document["gpus"][gpu]["pci"]["bus_id"]


def bridge(document, gpu=5):
    """The bridge right above a GPU."""
    own = place(document, gpu)
    path = next(each["path"] for each in document["pci"] if each["bus_id"] == own)
    return path.split("/")[-2]


RECEIVED = "pcieport 0000:00:01.0: AER: {how} error message received from {at}"
OLDER = "pcieport 0000:00:01.0: AER: {how} error received: {at}"
OWN = "nvidia {at}: AER: PCIe Bus Error: severity={how}, type=Data Link Layer, (Receiver ID)"


@each_row("shape", [RECEIVED, OLDER, OWN])
@each_row(
    ("how", "severity"),
    [
        ("Uncorrectable (Fatal)", "block"),
        ("Uncorrected (Fatal)", "block"),
        ("Uncorrectable (Non-Fatal)", "warn"),
        ("Corrected", "ok"),
        ("Correctable", "ok"),
    ],
)
def test_an_error_on_a_gpus_way_is_as_bad_as_its_kind(document, judged, shape, how, severity):
    found = document("h100x8")
    for at in (place(found), bridge(found)):
        said = judged(logged(document("h100x8"), (9000.0, shape.format(how=how, at=at))))

        assert said.worst("pcie-errors").severity.word == severity
        if severity != "ok":
            assert said.worst("pcie-errors").gpu.index == 5
            assert at in said.worst("pcie-errors").found


@each_row(
    ("how", "severity"), [("Uncorrectable (Fatal)", "warn"), ("Uncorrectable (Non-Fatal)", "info")]
)
def test_an_error_of_another_device_blocks_no_gpu(document, judged, how, severity):
    said = judged(logged(document("h100x8"), (9000.0, RECEIVED.format(how=how, at=DISK))))

    assert said.worst("pcie-errors").severity.word == severity
    assert said.worst("pcie-errors").gpu is None


@each_row(
    ("count", "apart", "severity"), [(100, 60, "warn"), (99, 60, "ok"), (150, DAY / 50, "ok")]
)
def test_corrected_errors_count_when_they_are_a_flood(document, judged, count, apart, severity):
    found = document("h100x8")
    lines = [
        (9000.0 + at * apart, shape.format(how="Corrected", at=place(found)))
        for at in range(count)
        for shape in (RECEIVED, OWN)
    ]

    assert judged(logged(found, *lines)).worst("pcie-errors").severity.word == severity


def test_what_was_before_the_driver_was_loaded_again_is_no_error(document, judged):
    found = document("h100x8")
    fatal = RECEIVED.format(how="Uncorrectable (Fatal)", at=place(found))

    assert judged(logged(found, (9000.0, fatal), (9100.0, LOADING))).troubles == set()


@each_row(
    "line",
    [
        "NVRM: GPU {at}: RmInitAdapter failed! (0x62:0x65:1860)",
        "NVRM: GPU {at}: rm_init_adapter failed, device minor number 5",
    ],
)
def test_a_gpu_that_did_not_start_blocks_unless_it_answers_now(document, judged, line):
    answers = document("h100x8")
    logged(answers, (9000.0, line.format(at=place(answers))))
    assert judged(answers).troubles == {("gpu-start", "warn", 5)}

    unlisted = logged(document("t4x1"), (9000.0, line.format(at="0000:3b:00.0")))
    assert judged(unlisted).troubles == {("gpu-start", "block", "0000:3b:00.0")}

    before = logged(document("h100x8"))
    logged(before, (9000.0, line.format(at=place(before))), (9100.0, LOADING))
    assert judged(before).troubles == set()


def test_a_log_that_cannot_be_read_is_said_once(document, judged):
    found = document("h100x8")
    found["kernel_log"] = {"missing": "no_permission"}

    said = judged(found)

    assert said.worst("pcie-errors").severity.word == "info"
    assert said.worst("gpu-start").severity.word == "info"
    assert said.worst("xid").severity.word == "unknown"


# --- machine-check


@each_row(
    "line",
    [
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: bea0000000000108",
        "{1}[Hardware Error]: event severity: recoverable",
        "[Hardware Error]: Uncorrected, software restartable error.",
        "EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0 (channel:0 slot:0)",
        "Memory failure: 0x7f3a1: recovery action for dirty LRU page: Recovered",
        "mce: Uncorrected hardware memory error in user-access at 7f3a1000",
    ],
)
def test_a_hardware_error_that_was_not_corrected_warns(document, judged, line):
    said = judged(logged(document("h100x8"), (3.0, line)))

    assert said.troubles == {("machine-check", "warn", None)}
    assert line in said.worst("machine-check").found


@each_row(
    ("line", "count", "seconds", "warns"),
    [
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#1", 100, 60, True),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#1", 99, 60, False),
        ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 8c00004000010090", 100, 60, True),
        ("{7}[Hardware Error]: event severity: corrected", 150, 3600, False),
        ("mce: CPU41: Package temperature above threshold, cpu clock throttled", 100, 60, True),
        ("mce: CPU supports 32 MCE banks", 200, 1, False),
        ("EDAC MC0: Giving out device to module i10nm_edac controller Intel", 200, 1, False),
    ],
)
def test_corrected_hardware_errors_warn_where_they_are_many_in_a_day(  # noqa: PLR0917
    document, judged, line, count, seconds, warns
):
    lines = [(9000.0 + number * seconds, line) for number in range(count)]

    said = judged(logged(document("h100x8"), *lines))

    assert (said.worst("machine-check").severity.word == "warn") is warns
