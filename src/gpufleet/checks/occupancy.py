"""May our replicas have a GPU to themselves: how is it set up, and who else is on it?  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.ladder import REBOOT_IT, STOP, reset
from gpufleet.checks.reading import CannotTell, DoesNotApply, GpuReading, is_missing

OWN_UNITS = "vllm-*.service"  # the planner names every stage's unit so

# nvmlComputeMode_t, nvml.h.
COMPUTE_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

# Of the memory: vLLM leaves 8 % of it to others unless told otherwise (--gpu-memory-utilization
# 0.92). Half of that is the most that others may have before its start is in danger.
SPARED = 0.04
# What belongs to nobody on a sound idle GPU is below this (gcm's check uses it, 1b7bde9).
IDLE_MIB = 15
MIB = 1 << 20


def persistence(gpu: GpuReading) -> Iterator[Problem]:
    """Persistence mode is on: the driver keeps the GPU's state when no program uses it."""
    if gpu.get("persistence_mode"):
        return
    yield Problem(
        Severity.WARN,
        "persistence mode is off: the first program waits seconds for each GPU, and settings "
        "such as power limits are lost between programs",
        "on",
        "NVIDIA's driver persistence guide",
        (
            Step(
                Action.CONFIGURE,
                "`systemctl enable --now nvidia-persistenced`; Ubuntu's unit needs a drop-in "
                "without --no-persistence-mode; until the next boot `nvidia-smi -pm 1` does",
            ),
        ),
        gpu.index,
    )


def mig(gpu: GpuReading) -> Iterator[Problem]:
    """MIG is off: replicas are planned on whole GPUs. MIG that comes with a reset is a warning."""
    current, pending = gpu.get("mig_mode", "current"), gpu.get("mig_mode", "pending")
    if not current and not pending:
        return
    if current and pending:
        said = "MIG is on: the GPU is cut into parts"
    elif current:
        said = "MIG is on until the GPU is reset"
    else:
        said = "MIG comes on when the GPU is reset next"
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
            *((reset(gpu.index),) if current else ()),
        ),
        gpu.index,
    )


def compute_mode(gpu: GpuReading) -> Iterator[Problem]:
    """Several processes may use the GPU, as vLLM's ranks and whatever monitors it do."""
    mode = gpu.get("compute_mode")
    if mode == 0:
        return
    yield Problem(
        Severity.BLOCK,
        f"compute mode is {COMPUTE_MODES.get(mode, mode)}: "
        + ("no program may compute" if mode == 2 else "a second process is turned away"),
        "default",
        "nvmlComputeMode_t",
        (Step(Action.CONFIGURE, f"`nvidia-smi -c 0 -i {gpu.index}`, and remove what sets it"),),
        gpu.index,
    )


# --- who else is there


def foreign_processes(gpu: GpuReading) -> Iterator[Problem]:
    """
    Nobody but our own units computes on the GPU.

    A desktop that only draws, and leaves vLLM the memory that it takes by default, is a warning.
    Where processes of others are hidden from the SSH user (hidepid), nobody can tell.
    """
    computing = [*gpu.get("processes"), *_listed(gpu, "mps_processes")]
    pids = {process["pid"] for process in computing}
    drawing = [
        process for process in _listed(gpu, "graphics_processes") if process["pid"] not in pids
    ]
    foreign = [process for process in computing if not _own(process)]
    if foreign:
        hidden = all(is_missing(p["unit"]) for p in foreign) and gpu.node.known("user", "uid") != 0
        yield Problem(
            Severity.UNKNOWN if hidden else Severity.BLOCK,
            f"computes on it: {_processes(foreign)}"
            + (", hidden from all but root" if hidden else ""),
            f"only {OWN_UNITS}",
            "the plan needs the whole GPU",
            (
                Step(Action.LOOK, f"`ps -fp {','.join(str(p['pid']) for p in foreign)}` says who"),
                *_stopped(foreign),
            ),
            gpu.index,
        )
    if others := [process for process in drawing if not _own(process)]:
        used = sum(process["usedGpuMemory"] or 0 for process in others)
        small = used <= SPARED * gpu.get("memory", "total") and not any(
            is_missing(process["name"]) for process in others
        )
        yield Problem(
            Severity.WARN if small else Severity.BLOCK,
            f"draws on it: {_processes(others)}",
            f"only {OWN_UNITS}",
            f"vLLM leaves 8 % of the memory, {SPARED:.0%} are counted for others",
            (
                Step(
                    Action.CONFIGURE,
                    "a server needs no desktop: `systemctl set-default multi-user.target && "
                    "systemctl isolate multi-user.target`",
                ),
            ),
            gpu.index,
        )


def _listed(gpu: GpuReading, kind: str) -> list[Mapping[str, Any]]:
    """Return one list of processes; none where the board or the driver knows no such kind."""
    try:
        return list(gpu.get(kind))
    except (DoesNotApply, CannotTell):
        return []


def _own(process: Mapping[str, Any]) -> bool:
    unit = process["unit"]
    return isinstance(unit, str) and fnmatch(unit, OWN_UNITS)


def _stopped(foreign: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
    """Yield how to end them: services by name, the rest by its owner."""
    units = sorted({p["unit"] for p in foreign if not is_missing(p["unit"])})
    services = [unit for unit in units if unit.endswith(".service")]
    if services:
        yield Step(Action.CONFIGURE, f"`systemctl disable --now {' '.join(services)}`")
    if len(services) < len(units) or any(is_missing(p["unit"]) for p in foreign):
        yield Step(Action.LOOK, "ask whose they are; end them, or take the node out of the plan")


def _processes(processes: Iterable[Mapping[str, Any]]) -> str:
    """Return processes as people look for them: "pid 4711 python3 (train.service, 20000 MiB)"."""
    return ", ".join(_process(process) for process in processes)


def _process(process: Mapping[str, Any]) -> str:
    name = "of unknown owner" if is_missing(process["name"]) else process["name"]
    more = [] if is_missing(process["unit"]) else [str(process["unit"])]
    if process["usedGpuMemory"] is not None:
        more.append(f"{process['usedGpuMemory'] // MIB} MiB")
    return f"pid {process['pid']} {name}" + (f" ({', '.join(more)})" if more else "")


def foreign_memory(gpu: GpuReading) -> Iterator[Problem]:
    """
    Where no process is listed, no memory is in use: a dead process has left none behind.

    Only the newer struct is judged (R510): the older counts the driver's own reserve as used.
    """
    listed = [
        *gpu.get("processes"),
        *_listed(gpu, "graphics_processes"),
        *_listed(gpu, "mps_processes"),
    ]
    memory = gpu.get("memory")
    if listed:
        return  # foreign-processes knows whose it is
    if "reserved" not in memory:
        raise CannotTell("the driver is too old to tell its own reserve from the rest")
    numa = gpu.node.document["numa"][gpu.at]
    if not is_missing(numa) and not is_missing(numa["gpu_memory_node"]):
        raise DoesNotApply("Linux uses this GPU's memory as its own")
    used = memory["used"]
    if used <= IDLE_MIB * MIB:
        return
    yield Problem(
        Severity.BLOCK if used > SPARED * memory["total"] else Severity.WARN,
        f"{used // MIB} MiB are in use and no process is listed",
        f"{IDLE_MIB} MiB at most",
        "an idle GPU",
        (
            Step(Action.LOOK, "check again in a minute: a process that just ended may still free"),
            Step(
                Action.LOOK,
                f"`fuser -v /dev/nvidia{gpu.known('minor', default='*')}` says who "
                "holds it, a container's process too",
            ),
            STOP,
            reset(gpu.index),
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
