"""Each GPU: is it there, does it answer, is it what it should be.  Pure.

What one GPU is asked beside that lies in `checks/throttling.py`, `pcie.py` and `occupancy.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import multimode
from typing import Any

from gpufleet.checks import occupancy, pcie, throttling
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
    Unread,
    cached_answer,
    expectation,
    gpu_facts,
    is_missing,
    reason,
    twin_answers,
)

# What a GPU that serves has to tell: without one of these it cannot be planned on.
NEEDED = ("uuid", "name", "pci", "memory", "compute_capability")
# NVML's answers from a GPU that is no longer there or of use (nvmlReturn_t 15 and 16): where one
# fact has them, the others are of no worth.
GONE = {"lost", "reset_required"}
# So many facts of one GPU (of some sixty) that fail for no reason are no quirk of a driver: a sound
# GPU answers every one of them, or says that it has no such thing.
FAILING = 3

# nvmlDeviceGpuRecoveryAction_t, nvml.h (R570 and newer).
RESET, REBOOT, DRAIN_P2P, DRAIN_AND_RESET, RECOVER_IMEX, BUS_RESET, SYSTEM_REBOOT = range(1, 8)


# --- is every GPU there


def gpu_count(node: Reading) -> Iterator[Problem]:
    """
    NVML lists as many GPUs as are declared, else as the siblings have, and all of the PCI bus.

    Those on the bus that vfio-pci has, or that a module option hides, are away on purpose: what
    siblings have is compared with those of vfio-pci too. Where the bus misses nothing, siblings
    alone only warn: a node may have been built with fewer.
    """
    count = _counted(node)
    unlisted, given = _unlisted(node), _given_away(node)
    hidden = _hidden_at(node)
    seen = count + len(unlisted) - min(len(unlisted), len(node.silent_gpus))
    declared = node.settings.gpus.count
    expected = expectation(declared, "gpus.count", twin_answers(node, _present))
    present = count if declared is not None else count + len(given)
    if not count and not unlisted:
        away = "; ".join([*([_hidden(hidden)] if hidden else []), *([_given(given)] * bool(given))])
        found = "the driver finds no GPU" + (f": {away}" if away else "")
        yield Problem(
            Severity.BLOCK, found, "a GPU at least", "the device", _back(None, unlisted, hidden)
        )
    elif expected and present < expected.value:
        sure = declared is not None or unlisted or (expected.certain and not _bus_agrees(node))
        severity = Severity.BLOCK if sure else Severity.WARN
        yield from _missing(node, expected.value, expected.source, severity)
    elif unlisted:
        # An operator's own number knows of cards that this driver cannot work with.
        right = declared == count
        severity = Severity.WARN if right else Severity.BLOCK
        yield from _missing(node, seen, "the PCI bus", severity)
    elif declared is not None and count > declared:
        yield Problem(
            Severity.WARN,
            f"{count} GPUs, {declared} declared",
            f"{declared} GPUs",
            "gpus.count in group_vars",
            (Step(Action.CONFIGURE, f"write gpus.count: {count}, if they are meant to be there"),),
        )
    else:
        if hidden:
            yield Problem(Severity.INFO, _hidden(hidden), "", "NVreg_ExcludedGpus")
        if given:
            yield Problem(Severity.INFO, _given(given), "", "the PCI bus")


def _counted(node: Reading) -> int:
    """Return how many GPUs NVML counts; raises `Unread` where the probe lists another number."""
    count, listed = int(node.get("driver", "gpu_count")), len(node.document["gpus"])
    if count != listed:
        raise Unread(f"the driver counts {count} GPUs, and the probe lists {listed}")
    return count


@cached_answer
def _present(node: Reading) -> int:
    """Return how many GPUs a node has, those that it gave to virtual machines included."""
    return _counted(node) + len(_given_away(node))


def _bus_agrees(node: Reading) -> bool:
    """
    Say whether the PCI bus has just the GPUs that NVML lists, and those given away.

    It has not where it could not be read, where a module option hides a GPU, and where one that
    does not answer does not say where it is.
    """
    on_bus = {function["bus_id"] for function in _gpus_on_bus(node)} - set(_given_away(node))
    return on_bus == {gpu.known("pci", "bus_id") for gpu in node.gpus}


def _missing(node: Reading, wanted: int, source: str, severity: Severity) -> Iterator[Problem]:
    """Yield one problem for each missing GPU whose place is known, else one for all of them."""
    count = _counted(node)
    unlisted, hidden = _unlisted(node), _hidden_at(node)
    places = {
        **dict.fromkeys(_empty_slots(node), "nothing is at {}, where the siblings have a GPU"),
        **{at: _unlisted_said(driver) for at, driver in unlisted.items()},
        **dict.fromkeys(hidden, "a module option hides {}"),
    }
    if node.settings.gpus.count is not None:
        places |= dict.fromkeys(_given_away(node), "{} is given to virtual machines (vfio-pci)")
    so = f"if the node was built with {count}: gpus.count: {count} in its host_vars"
    built_so = () if severity == Severity.BLOCK or unlisted else (Step(Action.CONFIGURE, so),)
    for bus_id, said in (places or {"": "nothing says where the missing ones were"}).items():
        yield Problem(
            severity,
            f"{count} of {wanted} GPUs: {said.format(bus_id)}",
            f"{wanted} GPUs",
            source,
            (*built_so, *_back(bus_id or None, unlisted, hidden)),
            bus_id,
        )


def _unlisted_said(driver: str | None) -> str:
    if driver in {None, "nvidia"}:
        return "{} is on the PCI bus, and the driver does not list it"
    return f"{{}} is on the PCI bus, bound to {driver}: the NVIDIA driver does not have it"


def _given(bus_ids: list[str]) -> str:
    return f"given to virtual machines (vfio-pci): {', '.join(bus_ids)}"


def _hidden(bus_ids: list[str]) -> str:
    return f"a module option hides {', '.join(bus_ids)}"


def _back(
    bus_id: str | None, unlisted: Mapping[str, str | None], hidden: list[str]
) -> tuple[Step, ...]:
    """Return the way to get a missing GPU back."""
    unhide = Step(
        Action.CONFIGURE,
        "take NVreg_ExcludedGpus out of /etc/modprobe.d if the GPU is to work again, then reboot",
    )
    if bus_id in hidden:
        return (unhide,)
    driver = unlisted.get(bus_id) if bus_id else None
    if driver not in {None, "nvidia"}:
        said = f"`grep -rE '{driver}|ids=' /etc/modprobe.d /proc/cmdline` says who bound it to that"
        free = f"take {driver} off it there, if it is to work (or give it to vfio-pci), then reboot"
        return (Step(Action.LOOK, said), STOP, Step(Action.CONFIGURE, free))
    at = f" -s {bus_id}" if bus_id in unlisted else " -d 10de:"
    look = Step(Action.LOOK, f"`lspci -vv{at}` and `dmesg | grep NVRM` say how it failed")
    seat = Step(Action.SERVICE, "still missing: have its seat, riser and power cables looked at")
    return (look, *([unhide] if hidden else []), STOP, REBOOT_IT, POWER_CYCLE, seat)


def _gpus_on_bus(node: Reading) -> list[Mapping[str, Any]]:
    """Return NVIDIA's display functions (PCI class 03) on the bus."""
    functions = node.get("pci", absent=[])
    return [function for function in functions if function["class"].startswith("0x03")]


def _bound_to(function: Mapping[str, Any]) -> str | None:
    driver = function["driver"]
    return None if is_missing(driver) else str(driver)


def _given_away(node: Reading) -> list[str]:
    """Return the GPUs that vfio-pci has for virtual machines."""
    return sorted(at["bus_id"] for at in _gpus_on_bus(node) if _bound_to(at) == "vfio-pci")


def _hidden_at(node: Reading) -> list[str]:
    """Return the GPUs that a module option hides."""
    return sorted(at["bus_id"] for at in node.known("driver", "excluded", default=[]))


def _unlisted(node: Reading) -> dict[str, str | None]:
    """
    Return the GPUs that the PCI bus has and NVML has not, and the driver that each is bound to.

    With NVIDIA's driver, or none, they failed when it loaded; any other keeps it away from them.
    One that NVML lists and that does not answer has no bus id; as many may lie on the bus unnamed.
    """
    away = {*(gpu.known("pci", "bus_id") for gpu in node.gpus), *_hidden_at(node)}
    away |= set(_given_away(node))
    found = {at["bus_id"]: _bound_to(at) for at in _gpus_on_bus(node) if at["bus_id"] not in away}
    return found if len(found) > len(node.silent_gpus) else {}


def _empty_slots(node: Reading) -> list[str]:
    """Return the bus ids at which most siblings have a GPU and this node has none."""
    here = _places(node)
    there = Counter(at for places in twin_answers(node, _places) for at in places or ())
    return sorted(
        str(bus_id)
        for bus_id, twins in there.items()
        if bus_id is not None and bus_id not in here and 2 * twins > len(node.twins)
    )


@cached_answer
def _places(node: Reading) -> set[str | None]:
    """Return where the node has GPUs, those included that it gave to virtual machines."""
    return {*(gpu.known("pci", "bus_id") for gpu in node.gpus), *_given_away(node)}


# --- does every GPU answer

_LADDER = (SEE_LOG, STOP, REBOOT_IT, POWER_CYCLE, RETURN_IT)

# The probe's reasons for a GPU without an answer, and what each means.
_SILENCES = {
    "lost": "has fallen off the bus",
    "timeout": "does not answer in time: whatever uses it may hang",
    "crashed": "crashes the driver's library when asked",
    "reset_required": "asks to be reset and does nothing until then",
    "no_permission": "is there, and the SSH user may not ask it",
}


def gpu_answers(node: Reading) -> Iterator[Problem]:
    """Every GPU that NVML lists tells what it is, makes sense, and knows of its neighbours."""
    for facts in node.document["gpus"]:
        if why := _silent(facts):
            yield _silence(facts["index"], why)
    for gpu in node.gpus:
        if _silent(gpu.facts):
            continue
        if nonsense := _nonsense(gpu):
            yield Problem(
                Severity.BLOCK,
                f"answers with nonsense: {nonsense}",
                "plausible answers",
                "the device",
                (SEE_LOG, STOP, reset_step(gpu.index), REBOOT_IT, POWER_CYCLE, RETURN_IT),
                gpu.index,
            )
        elif failed := _failing(gpu.facts):
            yield Problem(
                Severity.UNKNOWN,
                f"{len(failed)} of {len(gpu.facts)} questions fail: {', '.join(failed[:5])}, ...",
                "answers",
                "the device",
                _LADDER,
                gpu.index,
            )
    yield from _same_uuid(node)
    for error in node.document["errors"]:
        if error["about"].startswith("p2p["):
            yield Problem(
                Severity.BLOCK,
                f"how it reaches the other GPUs could not be read ({reason(error)})",
                "an answer for every pair",
                "the device",
                _LADDER,
                int(error["about"][4:-1]),
            )


def _same_uuid(node: Reading) -> Iterator[Problem]:
    """Yield each GPU that answers with another's UUID: work is placed by UUIDs."""
    first: dict[str, int] = {}
    for gpu, uuid in gpu_facts(node.gpus, "uuid"):
        other = first.setdefault(str(uuid), gpu.index)
        if other != gpu.index:
            yield Problem(
                Severity.BLOCK,
                f"it answers with the UUID of GPU {other}: {uuid}",
                "a UUID of its own",
                "the device",
                (SEE_LOG, STOP, REBOOT_IT, POWER_CYCLE, RETURN_IT),
                gpu.index,
            )


def _silent(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return why a GPU is as good as silent: it answers nothing, or tells only part of itself."""
    if is_missing(facts):
        return facts
    for name in NEEDED:
        if is_missing(facts[name]):
            found: Mapping[str, Any] = facts[name]
            return found
    gone = [value for value in facts.values() if is_missing(value) and value["missing"] in GONE]
    return gone[0] if gone else None


def _failing(facts: Mapping[str, Any]) -> list[str]:
    """Return which facts a GPU failed to tell without a reason, if they are many."""
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
    """Return an answer that no sound GPU gives, as text."""
    name, uuid, memory = gpu.get("name"), gpu.get("uuid"), gpu.get("memory")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return f"its name is {name!r}"
    if not str(uuid).startswith("GPU-"):
        return f"its UUID is {uuid!r}"
    # A terabyte is several times what any GPU has.
    if not 0 < memory["total"] < 1 << 40 or not 0 <= memory["used"] <= memory["total"]:
        return f"{memory['used']} of {memory['total']} bytes of memory used"
    celsius = gpu.known("temperature_celsius")
    if celsius is not None and not -40 <= celsius <= 150:  # silicon is dead on either side
        return f"its temperature is {celsius} °C"
    return None


# --- are they alike


def gpu_identical(node: Reading) -> Iterator[Problem]:
    """The node's GPUs are one product with one VBIOS, and VBIOS and driver are the siblings'."""
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
                    (Step(Action.CONFIGURE, "correct gpus.name, or have the GPU exchanged"),),
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
                    "keep each model's replicas on like GPUs (a tensor-parallel group is as fast "
                    "and as large as its weakest), declare gpus.name if one is wrong; programs "
                    "started by hand need CUDA_DEVICE_ORDER=PCI_BUS_ID to count as NVML does",
                ),
            ),
        )
    yield from _unlike_versions(node)


def _unlike_versions(node: Reading) -> Iterator[Problem]:
    update = Step(Action.CONFIGURE, "bring them to one version with the vendor's update tool")
    boards: dict[tuple[str, Any], dict[int, str]] = {}
    for gpu, vbios in gpu_facts(node.gpus, "vbios"):
        board = (gpu.known("name", default=""), gpu.known("part"))
        boards.setdefault(board, {})[gpu.index] = vbios
    for (name, part), versions in boards.items():
        if len(set(versions.values())) > 1:
            yield Problem(
                Severity.WARN,
                f"different VBIOS on equal boards: {_who_has_what(versions)}",
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
    """Return which GPU has which value, the rarest last: "A on GPUs 0, 1, 2; B on GPU 3"."""
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
    The driver asks for no recovery (field 230): the strongest word on a GPU there is.

    What each action means: "Error recovery and response flags" in NVIDIA's GPU memory error
    management, and nvml.h.
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
                    "end every process that reaches this GPU from another: `systemctl stop "
                    "'vllm-*'`; then check again: the action becomes none, or a reset",
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
        action, (f"do something that is newer than this check ({action})", (STOP, REBOOT_IT))
    )
    yield Problem(
        Severity.BLOCK,
        f"the driver asks to {said}",
        "no action",
        "the driver (NVML field 230)",
        (SEE_LOG, *remedy, RETURN_IT),
        gpu.index,
    )


def inforom(gpu: GpuReading) -> Iterator[Problem]:
    """The InfoROM's checksums hold: ECC counts, page retirement and power limits live there."""
    valid = gpu.facts["inforom_valid"]
    why = valid["missing"] if is_missing(valid) else None
    if why == "no_permission":
        raise CannotTell("only root may have it checked")  # it could at worst have warned
    if why != "corrupted_inforom" and gpu.get("inforom_valid"):
        return
    yield Problem(
        Severity.WARN,
        "the InfoROM is corrupt: the GPU may forget its error counts and settings",
        "intact checksums",
        "NVML (error 14)",
        (
            Step(Action.LOOK, "`dmesg | grep -i inforom`"),
            STOP,
            reset_step(gpu.index),
            Step(Action.SERVICE, "still corrupt: NVIDIA has tools to write it anew, else exchange"),
        ),
        gpu.index,
    )


OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "gpu-count": gpu_count,
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
