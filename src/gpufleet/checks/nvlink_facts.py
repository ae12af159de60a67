"""
Read the NVLinks of a node, and find out from them how its GPUs are connected. Pure.

Three cases must be distinguished:

- If GPUs are connected to NVSwitches, every link of every GPU is in use.
- PCIe boards have links only if a bridge is installed, and a bridge does not use all links.
- A single GPU has no peer.

So an inactive link to an NVSwitch looks like the normal state of a PCIe board.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from gpufleet.checks.finding import Action, Step
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    GpuReading,
    Reading,
    Unread,
    cached_answer,
    is_missing,
    lookup,
    reason,
)
from gpufleet.node.topology import LINK_UP, REMOTE_GPU, REMOTE_SWITCH, nvlink_widths

# A value of nvmlIntNvLinkDeviceType_t: NVML does not know the other end of the link, because a
# virtual machine does not see the host's switches.
REMOTE_UNKNOWN = 255

# The values of nvmlNvlinkVersion_t for NVLink 3.0 (Ampere) and NVLink 5.0 (Blackwell).
NVLINK_3, NVLINK_5 = 4, 7

# nvmlGpuFabricState_t.
NO_FABRIC, NOT_STARTED, IN_PROGRESS, COMPLETED = range(4)

DRAIN = Step(Action.DRAIN, "let the node's requests finish and stop its servers")
RESET_ALL = Step(
    Action.RESET_GPU, "`sudo nvidia-smi -r` resets all GPUs at once, because each link has two ends"
)
REBOOT = Step(Action.REBOOT, "`sudo reboot`")
RESEAT = Step(
    Action.SERVICE,
    "have the GPU, the bridges and the baseboard reseated or replaced; send the output of `sudo "
    "nvidia-bug-report.sh` to the vendor",
)
RESTART_MANAGER = Step(
    Action.RESTART_SERVICE,
    "`sudo systemctl restart nvidia-fabricmanager`, then `nvidia-smi -q | grep -A2 Fabric` "
    "until it shows Completed and Success",
)


@dataclass(frozen=True)
class Links:
    """
    The NVLinks of one GPU, by number.

    `peers` maps the PCI address of each other GPU to the number of active links to it. `version` is
    NVML's number for the NVLink version, not the version itself.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]
    unread: tuple[tuple[int, str], ...]  # with the reason
    peers: Mapping[str, int]
    version: int

    @property
    def count(self) -> int:
        """Return the number of NVLinks on the board: active, inactive and unreadable."""
        return len(self.up) + len(self.down) + len(self.unread)


@cached_answer
def links_of(gpu: GpuReading) -> Links:
    """
    Return the links of a GPU. Raises `DoesNotApply` if the GPU reports no NVLink, and `Unread` if
    the links could not be read.

    The GPU's report may be wrong. The check `nvlink-links` checks whether the GPU should have
    links.
    """
    try:
        listed = gpu.section("nvlink", "links")
    except (CannotTell, DoesNotApply):
        # Some boards without NVLink answer "invalid argument" for link 0.
        raise DoesNotApply("this GPU has no NVLink") from None
    read = [link for link in listed if not is_missing(link["state"])]
    up = [link for link in read if link["state"] in LINK_UP]
    return Links(
        up=tuple(link["link"] for link in up),
        down=tuple(link["link"] for link in read if link["state"] not in LINK_UP),
        unread=tuple(
            (link["link"], reason(link["state"])) for link in listed if is_missing(link["state"])
        ),
        peers=Counter(
            link["remote_pci"]
            for link in up
            if link["remote_type"] == REMOTE_GPU and not is_missing(link["remote_pci"])
        ),
        version=max((v for link in listed if not is_missing(v := link["version"])), default=0),
    )


def known_links(gpu: GpuReading) -> Links | None:
    """Return the links of a GPU, or None if the GPU has no links or they could not be read."""
    try:
        return links_of(gpu)
    except (DoesNotApply, Unread):
        return None


# The links of a GPU that reports no NVLink.
NO_LINKS = Links(up=(), down=(), unread=(), peers={}, version=0)


def links_or_none(gpu: GpuReading) -> Links | None:
    """Return the links of a GPU, `NO_LINKS` if it has none, or None if they could not be read."""
    try:
        return links_of(gpu)
    except DoesNotApply:
        return NO_LINKS
    except Unread:
        return None


def driver_knows_links(gpu: GpuReading) -> bool:
    """
    Return whether the driver has the functions for NVLink. Without them, the links of GPUs cannot
    be queried.
    """
    found = gpu.node.document["nvlink"][gpu.at]
    listed = found if is_missing(found) else found["links"]
    return not (is_missing(listed) and listed["missing"] in {"function_not_found", "version"})


def listed_links(gpu: GpuReading) -> Iterable[Mapping[str, Any]]:
    """
    Return the probe's entry for each link of a GPU, or nothing if the GPU has or reports no links.
    """
    found: Iterable[Mapping[str, Any]] = _of_nvlink(gpu, "links", ())
    return found


def links_up(gpu: GpuReading) -> list[Mapping[str, Any]]:
    """Return the probe's entries for the active links of a GPU."""
    return [link for link in listed_links(gpu) if link["state"] in LINK_UP]


def _of_nvlink(gpu: GpuReading, key: str, default: Any) -> Any:
    return lookup(gpu.node.document["nvlink"][gpu.at], (key,), default, None)


def has_unknown_peers(gpu: GpuReading) -> bool:
    """
    Return whether NVML does not know the other end of an active link, as in a virtual machine that
    does not see the host's switches.
    """
    return any(
        is_missing(link["remote_type"]) or link["remote_type"] == REMOTE_UNKNOWN
        for link in links_up(gpu)
    )


def nvswitches(node: Reading) -> tuple[str, ...]:
    """Return the PCI addresses of the node's NVSwitches. The probe lists no other bridges."""
    functions = node.known("pci", default=())
    return tuple(
        each["bus_id"] for each in functions if str(each.get("class")).startswith("0x0680")
    )


@cached_answer
def links_into_switches(node: Reading) -> bool:
    """Return whether a link of any GPU is known to end at an NVSwitch."""
    return any(link["remote_type"] == REMOTE_SWITCH for gpu in node.gpus for link in links_up(gpu))


@cached_answer
def has_switches(node: Reading) -> bool:
    """Return whether NVSwitches connect the node's GPUs. The switches may be outside the node."""
    return bool(
        nvswitches(node)
        or links_into_switches(node)
        or any(_of_nvlink(gpu, "switch_links", 0) for gpu in node.gpus)
        or any(known_fabric_state(gpu) not in {None, NO_FABRIC} for gpu in node.gpus)
    )


def known_fabric_state(gpu: GpuReading) -> Any:
    """
    Return the state of the GPU's registration with a fabric, or None if the GPU does not report it.
    """
    return lookup(gpu.node.document["fabric"][gpu.at], ("state",), None, None)


def is_grace(gpu: GpuReading) -> bool:
    """Return whether the GPU is attached to a Grace CPU by NVLink-C2C."""
    return bool(gpu.known("c2c_links", default=0))


@cached_answer
def widths(node: Reading) -> dict[tuple[int, int], int]:
    """
    Return the number of links between the GPUs of each pair (i < j). GPUs whose links could not be
    read are left out.

    If a GPU of the pair reports no NVLink, the number is 0.
    """
    gpus = [gpu for gpu in node.gpus if links_or_none(gpu)]
    index = {gpu.at: gpu.index for gpu in gpus}
    found = nvlink_widths(node.document, combinations(index, 2))
    return {(index[one], index[other]): width for (one, other), width in found.items()}
