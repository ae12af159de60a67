"""Define the kernel settings of a GPU node, and the unit that makes its device files. Pure.

Each setting must have the same value in the running kernel and in the file that sets it at boot. If
an operator's file is read after gpufleet's file, it has priority at boot, and gpufleet reports it.

Limits of processes are in each stage's unit, because systemd services do not read limits.conf. Each
stage has its own `/dev/shm` (`templates/vllm/vllm.service.j2`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    DesiredState,
    File,
    Unit,
    UnitGone,
    Value,
)
from gpufleet.settings.gpu_settings import Gpu

# Files are read in the order of their names (sysctl.d(5)). With 99, this file is read after the
# distribution's files. Only files that an operator added on purpose are read later.
SYSCTL = "/etc/sysctl.d/99-gpufleet.conf"
DEVICES = "gpufleet-gpu-devices.service"
# A drop-in for the prefix applies to every stage's unit (systemd.unit(5), "foo-.service.d/").
STAGES = f"{UNIT_DIRECTORY}/vllm-.service.d/gpufleet-gpu-devices.conf"


@dataclass(frozen=True)
class KernelSetting:
    """
    One sysctl.

    Attributes:
        name: the name, for example "vm.swappiness".
        value: the required value.
        why: the reason, for readers of the file on the node.
        least: whether a larger value is accepted too, and stays.
    """

    name: str
    value: int
    why: str
    least: bool = False

    def accepts(self, value: int) -> bool:
        """Return whether a value in the kernel is acceptable."""
        return value >= self.value if self.least else value == self.value

    def __str__(self) -> str:
        return f"{self.name} = {self.value}"


ALWAYS = (
    KernelSetting(
        "kernel.numa_balancing",
        0,
        "NUMA balancing moves pages that GPUs read, and stalls the GPUs during the move.",
    ),
    KernelSetting(
        "vm.swappiness",
        10,
        "The kernel drops weights in the page cache before it swaps out processes' memory.",
    ),
    KernelSetting(
        "vm.max_map_count",
        # 16 times the kernel's default of 65530 (Documentation/admin-guide/sysctl/vm.rst). A
        # process that maps hundreds of weight files, and pinned buffers for 8 GPUs, can reach the
        # default.
        1_048_576,
        "Mappings of one process: weights, and memory that is pinned for 8 GPUs.",
        least=True,
    ),
    KernelSetting(
        "fs.nr_open",
        1_048_576,
        "No unit may have more open files; stages ask for as many (LimitNOFILE=).",
        least=True,
    ),
    KernelSetting(
        "net.core.somaxconn",
        4096,
        "Connections that wait for an endpoint to accept them; the limit of listen(2)'s backlog.",
        least=True,
    ),
)


def kernel_settings(gpu: Gpu) -> tuple[KernelSetting, ...]:
    """Return the desired kernel settings. Without tuning, there are none."""
    if not gpu.tuning:
        return ()
    if gpu.huge_pages is None:
        return ALWAYS
    count = gpu.huge_pages.count
    return (
        *ALWAYS,
        KernelSetting("vm.nr_hugepages", count, "gpu.huge_pages in group_vars.", least=True),
    )


def desired_tuning(gpu: Gpu, gpus: int) -> DesiredState:
    """
    Return the files and the unit of a node with this number of GPUs.

    Without tuning, the files of an earlier run are removed, and the running kernel keeps its values
    until the next boot.
    """
    if not gpu.tuning:
        return DesiredState(Absent(SYSCTL), Absent(STAGES), UnitGone(DEVICES))
    values: list[Value] = [File(SYSCTL, sysctl_file(kernel_settings(gpu)).encode())]
    if gpus:
        values += [
            File(f"{UNIT_DIRECTORY}/{DEVICES}", devices_unit(gpus).encode()),
            File(STAGES, _STAGES.encode()),
            # A oneshot unit does not stay active. Stages start it, and each boot starts it.
            Unit(DEVICES, running=None),
        ]
    return DesiredState(*values)


def sysctl_file(settings: Iterable[KernelSetting]) -> str:
    """Return the file that sets the kernel at boot."""
    lines = ["# Written by gpufleet; the next deploy overwrites what is changed here."]
    for each in settings:
        # With "-", it is not an error if the kernel does not have the setting (sysctl.d(5)).
        lines += [f"# {each.why}", f"-{each}"]
    return "\n".join(lines) + "\n"


def devices_unit(gpus: int) -> str:
    """
    Return the unit that creates the device files of a number of GPUs.

    If a program is unprivileged, CUDA calls the setuid program nvidia-modprobe, which
    NoNewPrivileges= of a stage forbids. So after a boot, a stage would find no GPU unless a
    privileged program had used the GPUs before.
    """
    files = " ".join(f"-c {number}" for number in range(gpus))
    return f"""\
# Written by gpufleet; the next deploy overwrites what is changed here.
[Unit]
Description=Device files of {gpus} NVIDIA GPUs
ConditionPathExists=/usr/bin/nvidia-modprobe
After=systemd-modules-load.service
Before=nvidia-persistenced.service nvidia-dcgm.service

[Service]
Type=oneshot
ExecStart=/usr/bin/nvidia-modprobe -u {files}
TimeoutStartSec=120

[Install]
WantedBy=multi-user.target
"""


_STAGES = f"""\
# Written by gpufleet; the next deploy overwrites what is changed here.
[Unit]
Wants={DEVICES}
After={DEVICES}
"""


def changes(settings: Iterable[KernelSetting], seen: Mapping[str, Any]) -> tuple[str, ...]:
    """
    Return the changes needed in the running kernel, as text.

    `seen` is the document of `on_node/converge/sysctl.py`.
    """
    return tuple(
        f"set {each} (now {found['value']})"
        for each, found in _readable(settings, seen)
        if not each.accepts(found["value"])
    )


def problems(settings: Iterable[KernelSetting], seen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that could not be read or set, as sentences."""
    settings = tuple(settings)
    known = seen["settings"]
    said = [
        f"{each.name}: {known[each.name]['error']}"
        for each in settings
        if "error" in known[each.name]
    ]
    if seen["applied"]:
        said += [
            f"{each} was set, but the kernel has {found['value']}{_cause(each)}"
            for each, found in _readable(settings, seen)
            if not each.accepts(found["value"])
        ]
    return tuple(said)


def remarks(settings: Iterable[KernelSetting], seen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each file of others that changes a setting again at the next boot."""
    return tuple(
        f"{found['later']['file']} has {each.name} = {found['later']['value']}, but {SYSCTL} has "
        f"{each.value}. At boot, {found['later']['file']} is read last and therefore applies: "
        "remove the line from that file"
        for each, found in _readable(settings, seen)
        if found["later"] and not each.accepts(found["later"]["value"])
    )


def _readable(
    settings: Iterable[KernelSetting], seen: Mapping[str, Any]
) -> Iterator[tuple[KernelSetting, Mapping[str, Any]]]:
    """Yield each setting that the node's kernel has, with the node's answer for it."""
    for each in settings:
        found = seen["settings"][each.name]
        if "value" in found:
            yield each, found


def _cause(setting: KernelSetting) -> str:
    if setting.name == "vm.nr_hugepages":
        return (
            " of these pages, because the free memory is fragmented. The kernel reserves all of "
            "them at the next boot: reboot the node, or lower gpu.huge_pages.count"
        )
    return ": another program on this node sets this value"
