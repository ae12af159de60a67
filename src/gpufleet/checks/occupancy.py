"""
Check that the GPUs' modes and other processes leave the GPUs free for gpufleet's replicas. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpufleet.checks.finding import REBOOT_IT, STOP, Action, Problem, Severity, Step, reset_step
from gpufleet.checks.probe_facts import CannotTell, DoesNotApply, GpuReading, Unread, is_missing

OWN_UNITS = "vllm-MODEL-NUMBER.service"
# The names that the planner assigns to units. A model's name matches settings.ModelName.
_OWN_UNIT = re.compile(r"vllm-(?P<model>[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?)-\d+\.service")
# NVIDIA's own services, which use a GPU without computing on it. A name comes from /proc/PID/comm,
# which has at most 15 characters, or from NVML, which includes the path.
_HELPERS = re.compile(r"(.*/)?(nvidia-cuda-mps(-server)?|nv-hostengine)")

# nvmlComputeMode_t, nvml.h.
COMPUTE_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

# The share of a GPU's memory that other programs may use. By default vLLM leaves 8 % free
# (--gpu-memory-utilization 0.92). If other programs use more than half of that, vLLM may not start.
SPARED = 0.04
# On a healthy idle GPU, less memory than this is in use without a process (the limit of the check
# in gcm, 1b7bde9).
IDLE_MIB = 15
MIB = 1 << 20


def persistence(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that persistence mode is on, so that the driver keeps the state of a GPU that no program
    uses.
    """
    if gpu.get("persistence_mode"):
        return
    yield Problem(
        Severity.WARN,
        "persistence mode is off: the first program waits some seconds for each GPU, and "
        "settings such as power limits are lost when no program runs",
        "on",
        "NVIDIA's driver persistence guide",
        (
            Step(
                Action.CONFIGURE,
                "`systemctl enable --now nvidia-persistenced`; on Ubuntu, the unit needs a "
                "drop-in without --no-persistence-mode; to enable the mode only until the next "
                "boot: `nvidia-smi -pm 1`",
            ),
        ),
        gpu.index,
    )


def mig(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that MIG is off, because replicas use whole GPUs. If MIG is off now but will be on after a
    reset, the check only warns.
    """
    current, pending = gpu.get("mig_mode", "current"), gpu.get("mig_mode", "pending")
    if not current and not pending:
        return
    if current and pending:
        said = "MIG is on: the GPU is partitioned"
    elif current:
        said = "MIG stays on until the GPU is reset"
    else:
        said = "MIG will be on after the GPU's next reset"
    off = f"nvidia-smi -mig 0 -i {gpu.index}"
    if current:
        off = f"nvidia-smi mig -dci -i {gpu.index}; nvidia-smi mig -dgi -i {gpu.index}; {off}"
    yield Problem(
        Severity.BLOCK if current else Severity.WARN,
        said,
        "off",
        "the plan uses whole GPUs",
        (
            *((STOP,) if current else ()),
            Step(Action.CONFIGURE, f"`{off}`"),
            *((reset_step(gpu.index),) if current else ()),
        ),
        gpu.index,
    )


def compute_mode(gpu: GpuReading) -> Iterator[Problem]:
    """Check that several processes may use the GPU, for example vLLM's ranks and monitoring."""
    mode = gpu.get("compute_mode")
    if mode == 0:
        return
    yield Problem(
        Severity.BLOCK,
        f"compute mode is {COMPUTE_MODES.get(mode, mode)}: "
        + ("no program can use the GPU" if mode == 2 else "a second process is rejected"),
        "default",
        "nvmlComputeMode_t",
        (Step(Action.CONFIGURE, f"`nvidia-smi -c 0 -i {gpu.index}`, and remove the setting"),),
        gpu.index,
    )


# --- other processes


def foreign_processes(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that only gpufleet's own units compute on the GPU.

    The severity is lower in these cases:

    - A desktop that uses the GPU only for graphics, and leaves vLLM its default share of the
      memory, is
    a warning.
    - A unit with a name like gpufleet's, for a model that is not declared, is a warning, because a
    deploy would stop the unit.
    - If the SSH user cannot see the processes of other users (hidepid), the owner of the process is
    unknown.
    - NVIDIA's own services, and processes that have ended, are only remarks. (`foreign_memory`
      checks
    for memory that ended processes left in use.)
    """
    computing = [*gpu.get("processes"), *_listed(gpu, "mps_processes")]
    pids = {process["pid"] for process in computing}
    drawing = [
        process for process in _listed(gpu, "graphics_processes") if process["pid"] not in pids
    ]
    foreign = [process for process in computing if not _own_unit(process)]
    yield from _passing(gpu, [process for process in foreign if _is_passing(gpu, process)])
    foreign = [process for process in foreign if not _is_passing(gpu, process)]
    if foreign:
        hidden = all(_hidden(gpu, process) for process in foreign)
        yield Problem(
            Severity.UNKNOWN if hidden else Severity.BLOCK,
            f"a program computes on the GPU: {_processes(foreign)}"
            + (", whose details only root can see" if hidden else ""),
            f"only processes of {OWN_UNITS}",
            "the plan needs the whole GPU",
            (
                Step(
                    Action.LOOK, f"`ps -fp {','.join(str(p['pid']) for p in foreign)}` shows them"
                ),
                *_stopped(foreign),
            ),
            gpu.index,
        )
    yield from _undeclared(gpu, computing)
    others = [at for at in drawing if not _own_unit(at) and not _is_passing(gpu, at)]
    if others:
        yield _drawing(gpu, others)


def _drawing(gpu: GpuReading, others: list[Mapping[str, Any]]) -> Problem:
    """
    Return the problem of programs that use the GPU for graphics. Its severity depends on how much
    memory they use.
    """
    said = f"a program uses the GPU for graphics: {_processes(others)}"
    source = f"vLLM leaves 8 % of the memory free, of which other programs may use {SPARED:.0%}"
    unseen = [at for at in others if _hidden(gpu, at) and is_missing(at["name"])]
    seen = [process for process in others if process not in unseen]
    small = sum(at["usedGpuMemory"] or 0 for at in seen) <= SPARED * gpu.get("memory", "total")
    small = small and not any(is_missing(process["name"]) for process in seen)
    if unseen and small:
        look = f"`sudo ps -fp {','.join(str(p['pid']) for p in unseen)}` shows them; probe as root"
        return Problem(
            Severity.UNKNOWN,
            f"{said}, whose details only root can see",
            f"only processes of {OWN_UNITS}",
            source,
            (Step(Action.LOOK, look),),
            gpu.index,
        )
    return Problem(
        Severity.WARN if small else Severity.BLOCK,
        said,
        f"only processes of {OWN_UNITS}",
        source,
        (
            Step(
                Action.CONFIGURE,
                "a server does not need a desktop: `systemctl set-default multi-user.target && "
                "systemctl isolate multi-user.target`",
            ),
        ),
        gpu.index,
    )


def _passing(gpu: GpuReading, processes: list[Mapping[str, Any]]) -> Iterator[Problem]:
    """
    Yield remarks on processes that do not prevent a replica: ended processes and NVIDIA's own
    services.
    """
    ended = [process for process in processes if _ended(gpu, process)]
    helpers = [process for process in processes if not _ended(gpu, process)]
    for said, some in (
        ("a process that has ended meanwhile", ended),
        ("one of NVIDIA's own services", helpers),
    ):
        if some:
            found = f"{said}: {_processes(some)}"
            yield Problem(
                Severity.INFO, found, f"only processes of {OWN_UNITS}", "/proc", gpu=gpu.index
            )


def _undeclared(gpu: GpuReading, computing: Iterable[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield a warning if a unit with a name like gpufleet's serves a model that is not declared."""
    models = gpu.node.settings.serving
    strays = [
        process
        for process in computing
        if (own := _own_unit(process)) is not None and models and own["model"] not in models
    ]
    if strays:
        yield Problem(
            Severity.WARN,
            f"a vLLM unit serves a model that is not declared for this node: {_processes(strays)}",
            f"units of {', '.join(sorted(models))}",
            "models in group_vars",
            (
                Step(
                    Action.CONFIGURE,
                    "deploys/vllm.py stops units that gpufleet placed; if the unit is your own, "
                    "rename it and move it to a different node: `systemctl cat "
                    f"{strays[0]['unit']}`",
                ),
            ),
            gpu.index,
        )


def _listed(gpu: GpuReading, kind: str) -> list[Mapping[str, Any]]:
    """Return one of the GPU's process lists, or [] if the board or driver does not support it."""
    try:
        return list(gpu.get(kind))
    except (DoesNotApply, CannotTell):
        return []


def _own_unit(process: Mapping[str, Any]) -> re.Match[str] | None:
    """Return the parts of the process' unit name if the name has the planner's form, or None."""
    unit = process["unit"]
    return _OWN_UNIT.fullmatch(unit) if isinstance(unit, str) else None


def _is_passing(gpu: GpuReading, process: Mapping[str, Any]) -> bool:
    name = process["name"]
    return _ended(gpu, process) or (isinstance(name, str) and bool(_HELPERS.fullmatch(name)))


def _ended(gpu: GpuReading, process: Mapping[str, Any]) -> bool:
    """
    Return whether the process ended after the driver listed it and before the probe read /proc.

    Root sees every process, including those in containers. If root cannot find a process and the
    driver has no name for it, the process has ended. Other users may be unable to see the process.
    The same is true for root in a container, which is recognised because systemd does not run
    there.
    """
    node = gpu.node
    about = (process["name"], process["unit"], process["uid"])
    sees_all = node.known("user", "uid") == 0 and node.known("system", "units") is not None
    return sees_all and all(
        is_missing(fact) and fact["missing"] in {"absent", "not_found"} for fact in about
    )


def _hidden(gpu: GpuReading, process: Mapping[str, Any]) -> bool:
    return is_missing(process["unit"]) and gpu.node.known("user", "uid") != 0


def _stopped(foreign: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
    """
    Yield the steps that end the processes: services by their names, other processes through their
    owners.
    """
    units = sorted({p["unit"] for p in foreign if not is_missing(p["unit"])})
    services = [unit for unit in units if unit.endswith(".service")]
    if services:
        yield Step(Action.CONFIGURE, f"`systemctl disable --now {' '.join(services)}`")
    if len(services) < len(units) or any(is_missing(p["unit"]) for p in foreign):
        yield Step(
            Action.LOOK,
            "find the owner of these processes; stop the processes, or "
            "remove the node from the plan",
        )


def _processes(processes: Iterable[Mapping[str, Any]]) -> str:
    """Return the processes as text in the form "pid 4711 python3 (train.service, 20000 MiB)"."""
    return ", ".join(_process(process) for process in processes)


def _process(process: Mapping[str, Any]) -> str:
    name = "of unknown owner" if is_missing(process["name"]) else process["name"]
    more = [] if is_missing(process["unit"]) else [str(process["unit"])]
    if process["usedGpuMemory"] is not None:
        more.append(f"{process['usedGpuMemory'] // MIB} MiB")
    return f"pid {process['pid']} {name}" + (f" ({', '.join(more)})" if more else "")


def foreign_memory(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that no GPU memory is in use without a listed process, for example after a process has
    died.

    Drivers before R510 are not checked, because they count the memory that the driver reserves for
    itself as used. If the board has no list of processes, the owner of used memory is unknown.
    """
    kinds = ("graphics_processes", "mps_processes")
    listed = [process for kind in kinds for process in _listed(gpu, kind)]
    silent: str | None = None
    try:
        listed += gpu.get("processes")
    except (DoesNotApply, CannotTell) as why:
        silent = str(why)
    memory = gpu.get("memory")
    if any(not _is_passing(gpu, process) for process in listed):
        return  # the check foreign-processes reports the owner of this memory
    if "reserved" not in memory:
        raise CannotTell("the driver is too old to report the memory that it reserves for itself")
    numa = gpu.node.document["numa"][gpu.at]
    if not is_missing(numa) and not is_missing(numa["gpu_memory_node"]):
        raise DoesNotApply("Linux uses this GPU's memory as system memory")
    helpers = [process for process in listed if not _ended(gpu, process)]
    used = memory["used"] - sum(process["usedGpuMemory"] or 0 for process in helpers)
    if used <= IDLE_MIB * MIB or (silent and used <= SPARED * memory["total"]):
        return
    if silent:
        raise Unread(f"{used // MIB} MiB are in use by an unknown process: {silent}")
    yield Problem(
        Severity.BLOCK if used > SPARED * memory["total"] else Severity.WARN,
        f"{used // MIB} MiB are in use, but the driver lists no process",
        f"at most {IDLE_MIB} MiB in use",
        "an idle GPU",
        (
            Step(
                Action.LOOK,
                "check again in a minute, because a process that has just ended may still be "
                "freeing its memory",
            ),
            Step(
                Action.LOOK,
                f"`fuser -v /dev/nvidia{gpu.known('minor', default='*')}` shows which process "
                f"uses the GPU, also in containers",
            ),
            STOP,
            reset_step(gpu.index),
            REBOOT_IT,
        ),
        gpu.index,
    )


OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "persistence": persistence,
    "mig": mig,
    "compute-mode": compute_mode,
    "foreign-processes": foreign_processes,
    "foreign-memory": foreign_memory,
}
