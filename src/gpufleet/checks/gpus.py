"""
Check that each GPU answers, and that it is the expected model. Pure.

`checks/gpus_present.py` checks that every GPU is present. More checks of single GPUs are in
`checks/throttling.py`, `checks/pcie.py` and `checks/occupancy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import multimode
from typing import Any

from gpufleet.checks import gpus_present, occupancy, pcie, throttling
from gpufleet.checks.finding import (
    POWER_CYCLE,
    REBOOT_IT,
    RETURN_IT,
    SEE_LOG,
    STOP,
    Action,
    Problem,
    Severity,
    Step,
    reset_step,
)
from gpufleet.checks.probe_facts import (
    CannotTell,
    GpuReading,
    Reading,
    expectation,
    gpu_facts,
    is_missing,
    reason,
)
from gpufleet.formatting import node_ranges

# Facts that a GPU must report before a replica can be planned on it.
NEEDED = ("uuid", "name", "pci", "memory", "compute_capability")
# NVML's answers for a lost GPU (nvmlReturn_t 15 and 16). If one fact has such an answer, the other
# facts of the GPU are not reliable.
GONE = {"lost", "reset_required"}
# A GPU has about sixty facts. From this number of unexplained failures on, the GPU counts as
# failing: a healthy GPU answers every query, or reports that it does not have the value.
FAILING = 3

# nvmlDeviceGpuRecoveryAction_t, nvml.h (R570 and newer).
RESET, REBOOT, DRAIN_P2P, DRAIN_AND_RESET, RECOVER_IMEX, BUS_RESET, SYSTEM_REBOOT = range(1, 8)


# --- answers of GPUs

_LADDER = (SEE_LOG, STOP, REBOOT_IT, POWER_CYCLE, RETURN_IT)

# The reasons in a probe for a GPU without an answer, and what each reason means.
_SILENCES = {
    "lost": "has fallen off the bus",
    "timeout": "does not answer in time: programs that use the GPU may hang",
    "crashed": "crashes the driver's library when it is queried",
    "reset_required": "needs a reset before it can work again",
    "no_permission": "exists, but the SSH user has no access to it",
}


def gpu_answers(node: Reading) -> Iterator[Problem]:
    """
    Check that every GPU in NVML's list gives plausible answers, also about its links to other GPUs.
    """
    for facts in node.document["gpus"]:
        if why := _why_silent(facts):
            yield _silence(facts["index"], why)
    for gpu in node.gpus:
        if _why_silent(gpu.facts):
            continue
        if nonsense := _nonsense(gpu):
            yield Problem(
                Severity.BLOCK,
                f"gives invalid answers: {nonsense}",
                "plausible answers",
                "the device",
                (SEE_LOG, STOP, reset_step(gpu.index), REBOOT_IT, POWER_CYCLE, RETURN_IT),
                gpu.index,
            )
        elif failed := _failing(gpu.facts):
            yield Problem(
                Severity.UNKNOWN,
                f"{len(failed)} of {len(gpu.facts)} queries to the driver fail: "
                f"{', '.join(failed[:5])}, ...",
                "answers",
                "the device",
                _LADDER,
                gpu.index,
            )
    yield from _same_uuid(node)
    yield from _uuid_of_another_node(node)
    for error in node.document["errors"]:
        if error["about"].startswith("p2p["):
            yield Problem(
                Severity.BLOCK,
                f"the GPU's links to other GPUs could not be read ({reason(error)})",
                "an answer for every pair of GPUs",
                "the device",
                _LADDER,
                int(error["about"][4:-1]),
            )


def _same_uuid(node: Reading) -> Iterator[Problem]:
    """
    Yield a problem for each GPU that has the UUID of a different GPU. gpufleet selects GPUs by
    UUID.
    """
    first: dict[str, int] = {}
    for gpu, uuid in gpu_facts(node.gpus, "uuid"):
        other = first.setdefault(str(uuid), gpu.index)
        if other != gpu.index:
            yield Problem(
                Severity.BLOCK,
                f"it has the same UUID as GPU {other}: {uuid}",
                "a different UUID for each GPU",
                "the device",
                (SEE_LOG, STOP, REBOOT_IT, POWER_CYCLE, RETURN_IT),
                gpu.index,
            )


def _uuid_of_another_node(node: Reading) -> Iterator[Problem]:
    """
    Yield one problem for each set of GPUs that other nodes also report as their own.

    All of these nodes have an equal problem, so that reports show one line for all of them.
    """
    shared: dict[tuple[str, ...], list[GpuReading]] = {}
    for gpu in node.gpus:
        if others := node.claimed.get(str(gpu.known("uuid"))):
            shared.setdefault(others, []).append(gpu)
    for others, gpus in shared.items():
        names = node_ranges((node.name, *others))
        first, *more = sorted(str(gpu.known("uuid")) for gpu in gpus)
        which = f"UUIDs of {len(gpus)} GPUs ({first}, ...)" if more else f"UUID of a GPU ({first})"
        yield Problem(
            Severity.BLOCK,
            f"{names} report the same {which}",
            "UUIDs that no other node has",
            "the inventory's other nodes",
            (
                Step(
                    Action.LOOK,
                    f"`cat /etc/machine-id` and `nvidia-smi -L` on {names} show whether this is "
                    f"one machine with several names",
                ),
                Step(
                    Action.CONFIGURE,
                    "if it is one machine, leave only one of the names in the inventory",
                ),
            ),
        )


def _why_silent(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return why the GPU counts as silent, or None. A GPU is silent if it does not answer, does not
    report a needed fact, or is lost.
    """
    if is_missing(facts):
        return facts
    for name in NEEDED:
        if is_missing(facts[name]):
            found: Mapping[str, Any] = facts[name]
            return found
    gone = [value for value in facts.values() if is_missing(value) and value["missing"] in GONE]
    return gone[0] if gone else None


def _failing(facts: Mapping[str, Any]) -> list[str]:
    """
    Return the facts that the GPU failed to report for unknown reasons, if there are at least
    `FAILING`.
    """
    failed = [
        name
        for name, value in facts.items()
        if is_missing(value) and value["missing"] in {"unknown", "timeout", "error"}
    ]
    return failed if len(failed) >= FAILING else []


def _silence(index: int, why: Mapping[str, Any]) -> Problem:
    remedy: tuple[Step, ...] = _LADDER
    severity = Severity.BLOCK
    if why["missing"] == "reset_required":
        remedy = (SEE_LOG, STOP, reset_step(index), REBOOT_IT, RETURN_IT)
    elif why["missing"] == "no_permission":
        severity = Severity.UNKNOWN
        remedy = (Step(Action.CONFIGURE, "let the SSH user open /dev/nvidia*, or probe as root"),)
    said = _SILENCES.get(why["missing"], "does not answer")
    return Problem(severity, f"{said} ({reason(why)})", "an answer", "the device", remedy, index)


def _nonsense(gpu: GpuReading) -> str | None:
    """Return an implausible answer of the GPU as text, or None if all answers are plausible."""
    name, uuid, memory = gpu.get("name"), gpu.get("uuid"), gpu.get("memory")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return f"its name is {name!r}"
    if not str(uuid).startswith("GPU-"):
        return f"its UUID is {uuid!r}"
    # No GPU has a terabyte of memory.
    if not 0 < memory["total"] < 1 << 40 or not 0 <= memory["used"] <= memory["total"]:
        return f"{memory['used']} of {memory['total']} bytes of memory used"
    celsius = gpu.known("temperature_celsius")
    if celsius is not None and not -40 <= celsius <= 150:  # no working GPU is colder or hotter
        return f"its temperature is {celsius} °C"
    return None


# --- equality of GPUs


def gpu_identical(node: Reading) -> Iterator[Problem]:
    """
    Check that the node's GPUs are the same model with the same VBIOS, and equal to those of its
    siblings.
    """
    declared = node.settings.gpus.name
    names = {gpu.index: name for gpu, name in gpu_facts(node.gpus, "name")}
    if declared is not None:
        for index, name in names.items():
            if name != declared:
                yield Problem(
                    Severity.BLOCK,
                    f"its model is {name}",
                    declared,
                    "gpus.name in group_vars",
                    (Step(Action.CONFIGURE, "correct gpus.name, or have the GPU replaced"),),
                    index,
                )
    elif len(set(names.values())) > 1:
        yield Problem(
            Severity.WARN,
            f"different models: {_who_has_what(names)}",
            "one model",
            "the node's other GPUs",
            (
                Step(
                    Action.CONFIGURE,
                    "keep each model's replicas on identical GPUs, because a tensor-parallel "
                    "group is only as fast and as large as its weakest GPU; declare gpus.name, "
                    "so that the check finds a wrong GPU; start programs by hand with "
                    "CUDA_DEVICE_ORDER=PCI_BUS_ID, so that they number GPUs as NVML does",
                ),
            ),
        )
    yield from _unlike_versions(node)


def _unlike_versions(node: Reading) -> Iterator[Problem]:
    update = Step(
        Action.CONFIGURE, "update all boards to the same VBIOS version with the vendor's tool"
    )
    boards: dict[tuple[str, Any], dict[int, str]] = {}
    for gpu, vbios in gpu_facts(node.gpus, "vbios"):
        board = (gpu.known("name", default=""), gpu.known("part"))
        boards.setdefault(board, {})[gpu.index] = vbios
    for (name, part), versions in boards.items():
        if len(set(versions.values())) > 1:
            yield Problem(
                Severity.WARN,
                f"different VBIOS on identical boards: {_who_has_what(versions)}",
                "one version",
                "the node's other GPUs",
                (update,),
            )
        there = (
            multimode(
                found
                for gpu, found in gpu_facts(twin.gpus, "vbios")
                if (gpu.known("name", default=""), gpu.known("part")) == (name, part)
            )
            for twin in node.twins
        )
        expected = expectation(None, "", (next(iter(most), None) for most in there))
        here = multimode(versions.values())[0]
        if expected and expected.certain and here != expected.value:
            yield Problem(
                Severity.WARN,
                f"VBIOS {here}",
                f"VBIOS {expected.value}",
                expected.source,
                (update,),
            )
    driver = node.known("driver", "version")
    expected = expectation(None, "", (twin.known("driver", "version") for twin in node.twins))
    if driver and expected and driver != expected.value:
        yield Problem(
            Severity.WARN if expected.certain else Severity.INFO,
            f"driver {driver}",
            f"driver {expected.value}",
            expected.source,
            (Step(Action.CONFIGURE, "install the fleet's driver here, then reboot"),),
        )


def _who_has_what(values: Mapping[int, str]) -> str:
    """Return which GPUs have each value, the rarest value last: "A on GPUs 0, 1, 2; B on GPU 3"."""
    having: dict[str, list[int]] = {}
    for index, value in values.items():
        having.setdefault(value, []).append(index)
    return "; ".join(
        f"{value} on GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"
        for value, gpus in sorted(having.items(), key=lambda item: (-len(item[1]), item[1]))
    )


# --- the driver's own verdict


def recovery_action(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the driver does not request a recovery action (NVML field 230) for the GPU.

    NVIDIA describes the actions in "GPU memory error management" ("Error recovery and response
    flags") and in nvml.h.
    """
    action = gpu.get("recovery_action")
    if action == 0:
        return
    again = reset_step(gpu.index)
    meant: dict[int, tuple[str, tuple[Step, ...]]] = {
        RESET: ("reset the GPU", (STOP, again)),
        REBOOT: ("reboot the node", (STOP, REBOOT_IT)),
        DRAIN_P2P: (
            "drain peer traffic",
            (
                Step(
                    Action.DRAIN,
                    "stop every process that uses this GPU from a different GPU: `systemctl stop "
                    "'vllm-*'`; then check again: the driver then requests a reset or no action",
                ),
                again,
            ),
        ),
        DRAIN_AND_RESET: ("drain peer traffic and reset the GPU", (STOP, again)),
        RECOVER_IMEX: (
            "recover the IMEX domain",
            (
                STOP,
                Step(
                    Action.RESTART_SERVICE,
                    "`systemctl restart nvidia-imex` on every node of the NVLink domain, then "
                    "`nvidia-imex-ctl -N`",
                ),
            ),
        ),
        BUS_RESET: ("reset the GPU's PCIe bus", (STOP, again, REBOOT_IT)),
        SYSTEM_REBOOT: ("reboot the system", (STOP, REBOOT_IT)),
    }
    said, remedy = meant.get(
        action, (f"take an action that is unknown to this check ({action})", (STOP, REBOOT_IT))
    )
    yield Problem(
        Severity.BLOCK,
        f"the driver asks you to {said}",
        "no action",
        "the driver (NVML field 230)",
        (SEE_LOG, *remedy, RETURN_IT),
        gpu.index,
    )


def inforom(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check the checksums of the InfoROM, which stores ECC counts, page retirement and power limits.
    """
    valid = gpu.facts["inforom_valid"]
    why = valid["missing"] if is_missing(valid) else None
    if why == "no_permission":
        raise CannotTell("only root can run this check")  # it could at worst have warned
    if why != "corrupted_inforom" and gpu.get("inforom_valid"):
        return
    yield Problem(
        Severity.WARN,
        "the InfoROM is corrupt: the GPU may lose its error counts and settings",
        "intact checksums",
        "NVML (error 14)",
        (
            Step(Action.LOOK, "`dmesg | grep -i inforom`"),
            STOP,
            reset_step(gpu.index),
            Step(
                Action.SERVICE,
                "if the InfoROM is still corrupt, rewrite it with NVIDIA's "
                "tools, or replace the GPU",
            ),
        ),
        gpu.index,
    )


OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    **gpus_present.OF_NODE,
    "gpu-answers": gpu_answers,
    "gpu-identical": gpu_identical,
}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "recovery-action": recovery_action,
    "inforom": inforom,
    **throttling.OF_GPU,
    **pcie.OF_GPU,
    **occupancy.OF_GPU,
}
