"""Which GPUs work may be placed on: nothing unfit, nothing unknown, and never by accident."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.checks import admission
from gpufleet.checks.finding import Action, Finding, GpuId, Report, Severity, Step
from gpufleet.errors import FleetError
from gpufleet.node.topology import Gpu, Node
from gpufleet.settings.node_settings import NodeSettings
from tests.support.rows import each_row

SERVING = {"vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}}
MODELS = {"serving": {"m": {"model": "/srv/m"}}, **SERVING}


def node(gpus=4):
    return Node(
        name="gpu-01",
        driver="580.95.05",
        cuda=(13, 0),
        gpus=tuple(
            Gpu(index, f"GPU-{index}", "NVIDIA H100 80GB HBM3", f"0000:{index:02x}:00.0", 81559,
                (9, 0), 0)
            for index in range(gpus)
        ),
        nvlink={},
        pcie={},
    )  # fmt: skip


def finding(severity, gpu=None, check="ecc-uncorrected", accepted=None):
    return Finding(
        check,
        "gpu-01",
        severity,
        "2 uncorrectable errors",
        "none",
        "the device",
        (Step(Action.DRAIN, "take it out of service"),),
        gpu,
        accepted,
    )


def admit(*findings, **settings):
    report = Report(findings, {}, ("gpu-01",))
    wanted = NodeSettings.model_validate(settings or MODELS)
    found = admission.admit(report, [node()], {"gpu-01": wanted})
    if found.problems:
        raise FleetError(*found.problems)
    return found.nodes["gpu-01"]


def test_what_was_not_asked_because_of_another_finding_adds_no_line():
    """Of a node without a driver 34 checks could not be made: one line says why."""
    cause = finding(Severity.BLOCK, check="driver-loaded")
    others = [
        replace(finding(Severity.UNKNOWN, check=name), cause="driver-loaded")
        for name in ("mig", "gpu-count", "ecc-mode")
    ]
    with pytest.raises(FleetError) as refused:
        admit(cause, *others)
    (said,) = refused.value.problems
    assert said.startswith("gpu-01: driver-loaded (block)")


def test_equal_findings_about_whole_nodes_are_one_line_and_those_about_gpus_are_not():
    names = ("gpu-01", "gpu-02", "gpu-03")
    whole = [replace(finding(Severity.BLOCK), node=name) for name in names]
    of_gpus = [replace(finding(Severity.BLOCK, GpuId(1)), node=name) for name in names]
    nodes = [replace(node(), name=name) for name in names]
    settings = dict.fromkeys(names, NodeSettings.model_validate(MODELS))

    (said,) = admission.admit(Report(tuple(whole), {}, names), nodes, settings).problems
    assert said.startswith("gpu-[01-03]: ecc-uncorrected (block): 2 uncorrectable errors")
    apart = admission.admit(Report(tuple(of_gpus), {}, names), nodes, settings).problems
    assert [each[:13] for each in apart if "GPU 1" in each] == [f"{name} GPU 1:" for name in names]


@pytest.mark.parametrize("severity", [Severity.OK, Severity.INFO, Severity.WARN])
def test_what_only_deserves_a_look_stops_nothing(severity):
    found = admit(finding(severity), finding(severity, GpuId(1)))

    assert len(found.gpus) == 4
    assert found.unfit == {}


@each_row("severity", [Severity.UNKNOWN, Severity.BLOCK])
@each_row("gpu", [None, GpuId(1), GpuId(None, bus_id="0000:5d:00.0")])
def test_blocked_and_unknown_stop_alike_and_say_what_to_do(severity, gpu):
    with pytest.raises(FleetError) as refused:
        admit(finding(severity, gpu))

    first = refused.value.problems[0]
    assert first.startswith("gpu-01" + (f" GPU {gpu.name}" if gpu else ""))
    for word in ("ecc-uncorrected", severity.word, "2 uncorrectable errors", "take it out",
                 "docs/checks/ecc-uncorrected.md"):  # fmt: skip
        assert word in first


def test_a_refusal_over_one_gpu_says_how_to_serve_on_the_others():
    with pytest.raises(FleetError, match=r"3 of its GPUs are fit.*checks.degraded: true"):
        admit(finding(Severity.BLOCK, GpuId(1)))


def test_degraded_service_leaves_out_the_unfit_gpu_and_says_why():
    found = admit(
        finding(Severity.BLOCK, GpuId(1)),
        finding(Severity.UNKNOWN, GpuId(1), check="xid"),
        checks={"degraded": True},
        **MODELS,
    )

    assert [gpu.index for gpu in found.gpus] == [0, 2, 3]
    assert found.unfit == {1: "ecc-uncorrected"}


def test_degraded_service_does_not_wait_for_a_gpu_that_is_gone():
    gone = finding(Severity.BLOCK, GpuId(None), check="gpu-count")

    assert len(admit(gone, checks={"degraded": True}, **MODELS).gpus) == 4


def test_what_concerns_the_whole_node_stops_degraded_service_too():
    with pytest.raises(FleetError):
        admit(finding(Severity.BLOCK), checks={"degraded": True}, **MODELS)


def test_an_accepted_finding_stops_nothing():
    found = admit(finding(Severity.BLOCK, GpuId(1), accepted="until 2026-12-31"))

    assert len(found.gpus) == 4


def test_a_node_that_declares_gpus_and_no_model_yet_is_held_to_them():
    with pytest.raises(FleetError, match="ecc-uncorrected"):
        admit(finding(Severity.BLOCK), gpus={"count": 4})


def test_a_gpu_that_others_use_is_theirs_to_put_right():
    found = admit(finding(Severity.BLOCK, GpuId(1)), gpus={"reserved": [1]}, **MODELS)

    assert found.unfit == {}


def test_a_gpu_that_is_gone_stops_although_others_are_reserved():
    """NVML does not list a lost GPU: its index, and so whether it was reserved, is not known."""
    gone = finding(Severity.BLOCK, GpuId(None), check="gpu-count")

    with pytest.raises(FleetError, match="4 of its GPUs are fit"):
        admit(gone, gpus={"reserved": [1]}, **MODELS)


def test_a_node_that_is_to_have_no_gpus_is_not_held_to_it():
    """A load balancer in the same inventory has no driver, and needs none."""
    assert admit(finding(Severity.BLOCK), node_exporter={"port": 9100}).name == "gpu-01"
