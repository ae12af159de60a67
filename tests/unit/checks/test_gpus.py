"""Whether every GPU is there, answers, and is what it should be."""

from __future__ import annotations

import pytest

from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Action, Severity
from tests.support.rows import each_row
from tests.unit.checks.conftest import TODAY, about
from tests.unit.checks.wiring import as_guest

OF_EACH = ("gpus", "nvlink", "numa", "fabric")
NOT_SUPPORTED = {"missing": "not_supported", "code": 3}


def not_listed(document, index):
    """NVML counts one GPU less; the PCI bus still has it. Its place is filled by the next one."""
    for section in OF_EACH:
        del document[section][index]
    for place, gpu in enumerate(document["gpus"]):
        gpu["index"] = place
    for matrix in (*document["p2p"].values(), document["pcie"]):
        del matrix[index]
        for row in matrix:
            del row[index]
    document["driver"]["gpu_count"] -= 1
    return document


def off_the_bus(document, index):
    """The GPU is gone from the PCI bus as well."""
    bus_id = document["gpus"][index]["pci"]["bus_id"]
    document["pci"] = [at for at in document["pci"] if at["bus_id"] != bus_id]
    return not_listed(document, index)


def silent(document, index, **why):
    """NVML lists the GPU, and asking it gives no answer."""
    document["gpus"][index] = {"index": index, **why}
    for section in OF_EACH[1:]:
        document[section][index] = why
    for matrix in (*document["p2p"].values(), document["pcie"]):
        for other in range(len(matrix)):
            matrix[index][other] = matrix[other][index] = {"missing": "no_gpu"}
    document["errors"].append({"about": f"gpus[{index}]", **why})
    return document


def stopped(judged, check):
    """(severity, GPU) of what a check has to say that is no pass."""
    return {(found.severity.word, about(found)) for found in judged.of(check)}


# --- gpu-count


def test_a_gpu_that_only_the_pci_bus_has_is_named(document, judged):
    found = document("h100x8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    said = judged(not_listed(found, 5))

    assert stopped(said, "gpu-count") == {("block", bus_id)}
    assert said.worst("gpu-count").found.startswith(f"7 of 8 GPUs: {bus_id} is on the PCI bus")
    assert [found.gpu.bus_id for found in said.report.missing_gpu_findings("gpu-01")] == [bus_id]
    assert f"lspci -vv -s {bus_id}" in said.text("gpu-count")


def test_siblings_tell_which_slot_is_empty(document, judged):
    found = document("h100x8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    said = judged(off_the_bus(found, 5), siblings=[document("h100x8"), document("h100x8")])

    assert stopped(said, "gpu-count") == {("warn", bus_id)}
    assert said.worst("gpu-count").found.startswith(f"7 of 8 GPUs: there is no device at {bus_id}")
    assert said.worst("gpu-count").source == "2 siblings of the same kind"
    assert "gpus.count: 7 in its host_vars" in said.text("gpu-count")


def smaller(document, count):
    """A node that was built with fewer GPUs: nothing of the others is anywhere."""
    while document["driver"]["gpu_count"] > count:
        off_the_bus(document, document["driver"]["gpu_count"] - 1)
    return document


def test_a_node_that_was_built_with_fewer_gpus_than_its_siblings_is_not_stopped(document, judged):
    """NVML and the bus agree that nothing is missing: that siblings have more proves no fault."""
    siblings = [document("l40sx8")] * 3

    said = judged(smaller(document("l40sx8"), 4), siblings=siblings)
    assert {(check, severity) for check, severity, _ in said.troubles} == {("gpu-count", "warn")}

    four = judged(smaller(document("l40sx8"), 4), {"gpus": {"count": 4}}, siblings=siblings)
    assert four.troubles == set()

    eight = judged(smaller(document("l40sx8"), 4), {"gpus": {"count": 8}}, siblings=siblings)
    assert {(check, severity) for check, severity, _ in eight.troubles} == {("gpu-count", "block")}


def test_siblings_stop_a_node_whose_bus_cannot_be_asked(document, judged):
    found = not_listed(document("l40sx8"), 5)
    found["pci"] = {"missing": "absent"}

    said = judged(found, siblings=[document("l40sx8")] * 2)

    assert {severity for severity, _ in stopped(said, "gpu-count")} == {"block"}


def test_siblings_stop_a_node_that_hides_a_gpu(document, judged):
    found = document("l40sx8")
    gpu = found["gpus"][5]
    found["driver"]["excluded"] = [{"bus_id": gpu["pci"]["bus_id"], "uuid": gpu["uuid"]}]

    said = judged(not_listed(found, 5), siblings=[document("l40sx8")] * 2)

    assert said.troubles == {("gpu-count", "block", gpu["pci"]["bus_id"])}


def test_a_list_that_is_not_as_long_as_the_count_is_no_answer(document, judged):
    found = document("l40sx8")
    found["driver"]["gpu_count"] = 9

    said = judged(found)

    assert said.troubles == {("gpu-count", "unknown", None)}
    assert "counts 9 GPUs, but the probe lists 8" in said.worst("gpu-count").found


def test_of_two_nodes_either_may_be_the_odd_one(document, judged):
    found = document("h100x8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    said = judged(off_the_bus(found, 5), siblings=[document("h100x8")])

    assert stopped(said, "gpu-count") == {("warn", bus_id)}


def test_two_missing_gpus_are_two_findings(document, judged):
    found = document("h100x8")
    at = [found["gpus"][index]["pci"]["bus_id"] for index in (2, 5)]

    said = judged(not_listed(off_the_bus(found, 5), 2), siblings=[document("h100x8")] * 2)

    assert stopped(said, "gpu-count") == {("block", at[0]), ("block", at[1])}
    assert {found.found[:11] for found in said.of("gpu-count")} == {"6 of 8 GPUs"}


def test_siblings_of_another_kind_say_nothing(document, judged):
    others = [document("a100x8"), document("a100x8")]

    said = judged(off_the_bus(document("l40sx8"), 5), siblings=others)

    assert stopped(said, "gpu-count") == {("ok", None)}


def test_the_declared_count_comes_before_the_siblings(document, judged):
    siblings = [document("t4x1")] * 3

    said = judged(document("t4x1"), settings={"gpus": {"count": 2}}, siblings=siblings)

    assert said.troubles == {("gpu-count", "block", "that is gone")}
    assert said.worst("gpu-count").source == "gpus.count in group_vars"


def test_more_gpus_than_declared_is_a_declaration_to_correct(document, judged):
    said = judged(document("h100x8"), settings={"gpus": {"count": 4}})

    assert said.troubles == {("gpu-count", "warn", None)}
    assert "gpus.count: 8" in said.text("gpu-count")


def test_as_many_as_declared_are_all_of_them(document, judged):
    assert judged(document("h100x8"), settings={"gpus": {"count": 8}}).troubles == set()


def test_siblings_that_disagree_do_not_name_a_slot(document, judged):
    """One of two has a GPU there: that is no custom of the fleet."""
    siblings = [document("h100x8"), off_the_bus(document("h100x8"), 5)]

    said = judged(
        off_the_bus(document("h100x8"), 5), settings={"gpus": {"count": 8}}, siblings=siblings
    )

    assert stopped(said, "gpu-count") == {("block", "that is gone")}


def bound_to(document, index, driver):
    """Another driver than NVIDIA's has the GPU."""
    bus_id = document["gpus"][index]["pci"]["bus_id"]
    for function in document["pci"]:
        if function["bus_id"] == bus_id:
            function["driver"] = driver
    return not_listed(document, index)


@pytest.mark.parametrize("siblings", [0, 1, 2])
def test_a_gpu_given_to_virtual_machines_is_not_missing(document, judged, siblings):
    found = document("l40sx8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    said = judged(bound_to(found, 5, "vfio-pci"), siblings=[document("l40sx8")] * siblings)

    assert said.troubles == set()
    assert said.worst("gpu-count").severity is Severity.INFO
    assert bus_id in said.worst("gpu-count").found


def test_siblings_that_gave_a_gpu_away_still_have_eight(document, judged):
    siblings = [bound_to(document("l40sx8"), 5, "vfio-pci") for _ in range(2)]
    found = document("l40sx8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    assert judged(document("l40sx8"), siblings=siblings).troubles == set()

    said = judged(off_the_bus(found, 5), siblings=siblings)
    assert said.troubles == {("gpu-count", "warn", bus_id)}


def test_a_gpu_given_away_that_is_declared_is_missing(document, judged):
    found = document("l40sx8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    said = judged(bound_to(found, 5, "vfio-pci"), {"gpus": {"count": 8}})

    assert said.troubles == {("gpu-count", "block", bus_id)}
    assert "vfio-pci" in said.worst("gpu-count").found


@pytest.mark.parametrize("driver", ["pci-stub", "nvidiafb", "nouveau"])
def test_a_gpu_that_another_driver_has_is_missing_and_the_driver_named(document, judged, driver):
    found = document("l40sx8")
    bus_id = found["gpus"][5]["pci"]["bus_id"]

    said = judged(bound_to(found, 5, driver))

    assert said.troubles == {("gpu-count", "block", bus_id)}
    assert f"{bus_id} is on the PCI bus, bound to {driver}" in said.worst("gpu-count").found


def test_a_hidden_gpu_is_told_and_stops_nothing(document, judged):
    found = document("l40sx8")
    gpu = found["gpus"][5]
    found["driver"]["excluded"] = [{"bus_id": gpu["pci"]["bus_id"], "uuid": gpu["uuid"]}]

    said = judged(not_listed(found, 5))

    assert said.troubles == set()
    assert said.worst("gpu-count").severity is Severity.INFO
    assert gpu["pci"]["bus_id"] in said.worst("gpu-count").found


def test_a_hidden_gpu_that_is_declared_is_missing(document, judged):
    found = document("l40sx8")
    gpu = found["gpus"][5]
    found["driver"]["excluded"] = [{"bus_id": gpu["pci"]["bus_id"], "uuid": gpu["uuid"]}]

    said = judged(not_listed(found, 5), settings={"gpus": {"count": 8}})

    assert said.troubles == {("gpu-count", "block", gpu["pci"]["bus_id"])}
    assert "NVreg_ExcludedGpus" in said.text("gpu-count")


def test_a_card_that_the_driver_cannot_work_with_is_a_warning_where_the_count_is_right(
    document, judged
):
    """An old card for the console: the operator's number does not count it."""
    found = document("rtx4090x2")
    old = {**found["pci"][0], "bus_id": "0000:f1:00.0", "driver": {"missing": "absent"}}
    found["pci"].append(old)

    said = judged(found, settings={"gpus": {"count": 2}})
    assert said.troubles == {("gpu-count", "warn", "0000:f1:00.0")}

    assert judged(found).troubles == {("gpu-count", "block", "0000:f1:00.0")}


def test_a_driver_without_gpus_stops_the_node(document, judged):
    found = not_listed(document("t4x1"), 0)
    found["pci"] = {"missing": "absent"}

    said = judged(found)

    assert said.troubles == {("gpu-count", "block", None)}
    assert "finds no GPU" in said.worst("gpu-count").found


def test_a_count_that_could_not_be_read_is_unknown(document, judged):
    found = document("h100x8")
    found["driver"]["gpu_count"] = {"missing": "unknown", "code": 999}

    assert stopped(judged(found), "gpu-count") == {("unknown", None)}


def test_a_gpu_that_does_not_answer_is_listed_and_not_missing(document, judged):
    said = judged(silent(document("h100x8"), 5, missing="lost", code=15))

    assert stopped(said, "gpu-count") == {("ok", None)}


# --- a board's module numbers, on a node without `gpus.count` and without siblings


@each_row(
    ("profile", "gone", "guest", "severity"),
    [
        ("h100x8", 4, False, "block"),
        ("h100x8", 3, False, "block"),  # module 1: the first one
        ("a100x8", 7, False, "block"),  # module 8: the last one
        ("b200x8", 7, False, "block"),
        ("gb200x4", 1, False, "warn"),
        ("h100x8", 4, True, "info"),
    ],
)
def test_a_gap_in_the_modules_is_a_gpu_that_is_gone(  # noqa: PLR0917
    document, judged, profile, gone, guest, severity
):
    found = document(profile)
    module = found["gpus"][gone]["module_id"]
    off_the_bus(found, gone)
    if guest:
        as_guest(found)

    said = judged(found).worst("gpu-count")
    declared = judged(found, {"gpus": {"count": len(found["gpus"])}}).worst("gpu-count")

    assert said.severity.word == severity
    assert f"module {module} of the board" in said.found
    assert declared.severity.word == "ok"


def test_a_gpu_given_away_or_silent_is_no_gap(document, judged):
    given = document("h100x8")
    bus_id = given["gpus"][4]["pci"]["bus_id"]
    next(each for each in given["pci"] if each["bus_id"] == bus_id)["driver"] = "vfio-pci"
    not_listed(given, 4)
    still = silent(document("h100x8"), 4, missing="timeout", seconds=15)

    assert "module" not in judged(given).worst("gpu-count").found
    assert judged(still).worst("gpu-count").severity is Severity.OK


@each_row("numbers", [[1, 1, 1], [None, None, None], [1, 3, None]])
def test_cards_that_do_not_count_say_nothing(document, judged, numbers):
    found = document("l40sx8")
    for _ in range(5):
        off_the_bus(found, 3)
    for gpu, number in zip(found["gpus"], numbers, strict=True):
        gpu["module_id"] = NOT_SUPPORTED if number is None else number

    assert judged(found).worst("gpu-count").severity is Severity.OK


# --- gpu-answers


@each_row(
    ("why", "words"),
    [
        ({"missing": "lost", "code": 15}, ["fallen off the bus", "code 15", "over the BMC"]),
        ({"missing": "timeout", "seconds": 15}, ["may hang"]),
        ({"missing": "crashed", "signal": 11}, ["crashes the driver's library", "signal 11"]),
        ({"missing": "unknown", "code": 999}, ["does not answer", "code 999", "dmesg"]),
        ({"missing": "reset_required", "code": 16}, ["needs a reset", "nvidia-smi -r -i 5"]),
    ],
)
def test_a_silent_gpu_is_unfit_and_the_others_are_not(document, judged, why, words):
    said = judged(silent(document("h100x8"), 5, **why))

    assert stopped(said, "gpu-answers") == {("block", 5)}
    assert all(word in said.text("gpu-answers") for word in words)
    assert set(said.report.unfit("gpu-01")) == {5}


@pytest.mark.parametrize("fact", ["uuid", "name", "memory", "compute_capability"])
def test_a_gpu_that_tells_only_part_of_what_is_needed_is_silent(document, judged, fact):
    found = document("h100x8")
    found["gpus"][3][fact] = {"missing": "unknown", "code": 999}

    assert stopped(judged(found), "gpu-answers") == {("block", 3)}


def test_a_gpu_that_is_lost_halfway_through_is_silent(document, judged):
    found = document("h100x8")
    found["gpus"][3]["power_draw_milliwatts"] = {"missing": "lost", "code": 15}

    said = judged(found)

    assert stopped(said, "gpu-answers") == {("block", 3)}
    assert "fallen off the bus" in said.worst("gpu-answers").found


@pytest.mark.parametrize(("count", "severity"), [(2, "ok"), (3, "unknown")])
def test_a_gpu_that_fails_at_many_questions_cannot_be_trusted(document, judged, count, severity):
    """Each failure makes its own check unknown; many of them are one flaky GPU."""
    found = document("h100x8")
    for fact in ("part", "vbios", "serial")[:count]:
        found["gpus"][3][fact] = {"missing": "unknown", "code": 999}

    assert judged(found).worst("gpu-answers").severity.word == severity


def test_what_a_board_does_not_have_is_no_silence(document, judged):
    found = document("h100x8")
    found["gpus"][3]["serial"] = NOT_SUPPORTED

    assert judged(found).troubles == set()


@each_row(
    "nonsense",
    [
        {"name": "\x07\x01"},
        {"uuid": ""},
        {"memory": {"total": 0, "used": 0, "free": 0, "reserved": 0}},
        {"memory": {"total": 1 << 30, "used": 1 << 62, "free": 0, "reserved": 0}},
        {"memory": {"total": 1 << 30, "used": -5, "free": 1 << 30, "reserved": 0}},
        {"temperature_celsius": 4294967295},
    ],
    ids=str,
)
def test_an_implausible_answer_makes_a_gpu_unfit(document, judged, nonsense):
    found = document("h100x8")
    found["gpus"][3].update(nonsense)

    said = judged(found)

    assert stopped(said, "gpu-answers") == {("block", 3)}
    assert "invalid answers" in said.worst("gpu-answers").found
    assert set(said.report.unfit("gpu-01")) == {3}


def test_a_gpu_that_hangs_when_asked_about_its_neighbours_is_unfit(document, judged):
    found = document("l40sx8")
    found["errors"].append({"about": "p2p[2]", "missing": "timeout", "seconds": 15})

    said = judged(found)

    assert stopped(said, "gpu-answers") == {("block", 2)}
    assert "other GPUs" in said.worst("gpu-answers").found


def test_gpus_that_may_not_be_asked_are_unknown(document, judged):
    said = judged(silent(document("h100x8"), 5, missing="no_permission", code=4))

    assert stopped(said, "gpu-answers") == {("unknown", 5)}


# --- gpu-identical


def test_two_models_are_a_warning_that_names_who_has_what(document, judged):
    """A workstation may well have two; vLLM serves on one of them."""
    found = document("rtx4090x2")
    found["gpus"][1]["name"] = "NVIDIA GeForce RTX 3090"

    said = judged(found)

    assert said.troubles == {("gpu-identical", "warn", None)}
    assert "NVIDIA GeForce RTX 3090 on GPU 1" in said.worst("gpu-identical").found


def test_a_model_other_than_declared_makes_that_gpu_unfit(document, judged):
    found = document("l40sx8")
    found["gpus"][6]["name"] = "NVIDIA L40"

    said = judged(found, settings={"gpus": {"name": "NVIDIA L40S"}})

    assert said.troubles == {("gpu-identical", "block", 6)}
    assert "NVIDIA L40S" in said.text("gpu-identical")


def test_different_vbios_on_equal_boards_is_a_warning(document, judged):
    found = document("h100x8")
    found["gpus"][6]["vbios"] = "96.00.89.00.01"

    said = judged(found)

    assert said.troubles == {("gpu-identical", "warn", None)}
    assert "96.00.89.00.01 on GPU 6" in said.worst("gpu-identical").found


def test_boards_of_another_part_number_have_their_own_vbios(document, judged):
    found = document("h100x8")
    found["gpus"][6].update(vbios="96.00.89.00.01", part="692-2G520-0205-000")

    assert judged(found).troubles == set()


def test_a_node_whose_vbios_and_driver_differ_from_its_siblings(document, judged):
    siblings = [document("h100x8"), document("h100x8")]
    for sibling in siblings:
        sibling["driver"].update(version="570.172.08", module="570.172.08")
        for gpu in sibling["gpus"]:
            gpu["vbios"] = "96.00.89.00.01"

    said = judged(document("h100x8"), siblings=siblings)

    texts = {found.found for found in said.of("gpu-identical")}
    assert {"VBIOS 96.00.74.00.01", "driver 570.124.06"} <= texts
    assert said.troubles == {("gpu-identical", "warn", None)}


def test_one_sibling_alone_does_not_say_which_driver_is_right(document, judged):
    sibling = document("h100x8")
    sibling["driver"].update(version="570.172.08", module="570.172.08")
    for gpu in sibling["gpus"]:
        gpu["vbios"] = "96.00.89.00.01"

    said = judged(document("h100x8"), siblings=[sibling])

    assert said.worst("gpu-identical").severity is Severity.INFO


# --- recovery-action


@each_row(
    ("action", "words", "rung"),
    [
        (1, "reset the GPU", Action.RESET_GPU),
        (2, "reboot the node", Action.REBOOT),
        (3, "drain peer traffic", Action.DRAIN),
        (4, "drain peer traffic and reset", Action.RESET_GPU),
        (5, "IMEX domain", Action.RESTART_SERVICE),
        (6, "reset the GPU's PCIe bus", Action.RESET_GPU),
        (7, "reboot the system", Action.REBOOT),
        (42, "unknown to this check (42)", Action.REBOOT),
    ],
)
def test_what_the_driver_asks_for_is_said_and_offered(document, judged, action, words, rung):
    found = document("h100x8")
    found["gpus"][4]["recovery_action"] = action

    said = judged(found)

    assert said.troubles == {("recovery-action", "block", 4)}
    assert words in said.worst("recovery-action").found
    assert rung in {step.action for step in said.worst("recovery-action").remedy}


def test_a_driver_before_r570_is_not_asked_and_that_is_said(document, judged):
    said = judged(document("a100x8"))

    assert said.troubles == set()
    assert said.worst("recovery-action").severity is Severity.INFO


def test_a_recovery_action_that_could_not_be_read_is_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][4]["recovery_action"] = {"missing": "unknown", "code": 999}

    assert judged(found).troubles == {("recovery-action", "unknown", 4)}


# --- inforom


@pytest.mark.parametrize("answer", [{"missing": "corrupted_inforom", "code": 14}, False])
def test_a_corrupt_inforom_is_a_warning(document, judged, answer):
    found = document("h100x8")
    found["gpus"][4]["inforom_valid"] = answer

    assert judged(found).troubles == {("inforom", "warn", 4)}


@pytest.mark.parametrize(
    ("answer", "severity"),
    [
        (NOT_SUPPORTED, Severity.OK),
        ({"missing": "function_not_found", "code": 13}, Severity.INFO),
        ({"missing": "no_permission", "code": 4}, Severity.INFO),
        ({"missing": "unknown", "code": 999}, Severity.UNKNOWN),
    ],
)
def test_an_inforom_that_is_not_checked_is_not_corrupt(document, judged, answer, severity):
    found = document("h100x8")
    found["gpus"][4]["inforom_valid"] = answer

    assert judged(found).worst("inforom", gpu=4).severity is severity


def test_gpus_that_several_nodes_answer_with_block_all_in_one_sentence(document):
    """One machine under two names would get two servers on each GPU."""
    other = document("t4x1")
    other["gpus"][0]["uuid"] = document("a100x2-pcie")["gpus"][1]["uuid"]
    fleet = {
        "gpu-01": document("h200x8"),
        "gpu-02": document("h200x8"),
        "gpu-03": document("a100x2-pcie"),
        "gpu-04": other,
    }

    report = evaluate(fleet, {}, TODAY)
    said = {
        finding.node: finding.found
        for finding in report.findings
        if finding.check == "gpu-answers" and finding.stops
    }

    first, second = (fleet[name]["gpus"][0]["uuid"] for name in ("gpu-01", "gpu-04"))
    assert said == {
        "gpu-01": f"gpu-[01-02] report the same UUIDs of 8 GPUs ({first}, ...)",
        "gpu-02": f"gpu-[01-02] report the same UUIDs of 8 GPUs ({first}, ...)",
        "gpu-03": f"gpu-[03-04] report the same UUID of a GPU ({second})",
        "gpu-04": f"gpu-[03-04] report the same UUID of a GPU ({second})",
    }
    alike = {each.remedy for each in report.findings if each.node in {"gpu-01", "gpu-02"}
             and each.check == "gpu-answers"}  # fmt: skip
    assert len(alike) == 1
