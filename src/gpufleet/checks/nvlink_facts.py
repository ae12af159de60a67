"""Read a node's NVLinks, and the kind of board that they indicate.  Pure.

Three kinds must be distinguished. Behind NVSwitches every link of every GPU is in use. Boards on
PCIe have links only with an installed bridge, and a bridge does not use all links. A single GPU has
no peer. So a dead link behind NVSwitches looks like the normal state of a board on PCIe.
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

# nvmlIntNvLinkDeviceType_t: a guest sees no switches, and NVML does not know what is there.
REMOTE_UNKNOWN = 255

# nvmlNvlinkVersion_t: NVML's number of NVLink 3.0 (Ampere) and 5.0 (Blackwell).
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
    One GPU's links, by number.

    `peers` is the number of active links to each other GPU. `version` is NVML's number of the
    NVLink version.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]
    unread: tuple[tuple[int, str], ...]  # with the reason
    peers: Mapping[str, int]
    version: int

    @property
    def count(self) -> int:
        """Return the board's number of links."""
        return len(self.up) + len(self.down) + len(self.unread)


@cached_answer
def links_of(gpu: GpuReading) -> Links:
    """
    Return a GPU's links. Raises `DoesNotApply` if it reports none, and `Unread`.

    The report may be wrong; `nvlink-links` checks whether the GPU should have links.
    """
    try:
        listed = gpu.section("nvlink", "links")
    except (CannotTell, DoesNotApply):
        # "Invalid argument", of link 0, is how some boards without NVLink answer.
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
    """Return a GPU's links, or None if it has or reports none."""
    try:
        return links_of(gpu)
    except (DoesNotApply, Unread):
        return None


# The links of a GPU that reports no NVLink.
NO_LINKS = Links(up=(), down=(), unread=(), peers={}, version=0)


def links_or_none(gpu: GpuReading) -> Links | None:
    """Return a GPU's links, `NO_LINKS` if it has none, or None if not reported."""
    try:
        return links_of(gpu)
    except DoesNotApply:
        return NO_LINKS
    except Unread:
        return None


def driver_knows_links(gpu: GpuReading) -> bool:
    """Return whether the driver has NVLink's functions, without which no GPU can be queried."""
    found = gpu.node.document["nvlink"][gpu.at]
    listed = found if is_missing(found) else found["links"]
    return not (is_missing(listed) and listed["missing"] in {"function_not_found", "version"})


def listed_links(gpu: GpuReading) -> Iterable[Mapping[str, Any]]:
    """Return the probe's entry of each link of a GPU; empty without links or a report."""
    found: Iterable[Mapping[str, Any]] = _of_nvlink(gpu, "links", ())
    return found


def links_up(gpu: GpuReading) -> list[Mapping[str, Any]]:
    """Return the probe's entries of the active links of a GPU."""
    return [link for link in listed_links(gpu) if link["state"] in LINK_UP]


def _of_nvlink(gpu: GpuReading, key: str, default: Any) -> Any:
    return lookup(gpu.node.document["nvlink"][gpu.at], (key,), default, None)


def has_unknown_peers(gpu: GpuReading) -> bool:
    """Return whether active links have an end that NVML does not know, because it is in a host."""
    return any(
        is_missing(link["remote_type"]) or link["remote_type"] == REMOTE_UNKNOWN
        for link in links_up(gpu)
    )


def nvswitches(node: Reading) -> tuple[str, ...]:
    """Return the PCI addresses of the node's NVSwitches, the only bridges that the probe lists."""
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
    """Return whether NVSwitches join the node's GPUs, inside or outside the node."""
    return bool(
        nvswitches(node)
        or links_into_switches(node)
        or any(_of_nvlink(gpu, "switch_links", 0) for gpu in node.gpus)
        or any(known_fabric_state(gpu) not in {None, NO_FABRIC} for gpu in node.gpus)
    )


def known_fabric_state(gpu: GpuReading) -> Any:
    """Return the state of the GPU's registration with a fabric, or None if not reported."""
    return lookup(gpu.node.document["fabric"][gpu.at], ("state",), None, None)


def is_grace(gpu: GpuReading) -> bool:
    """Return whether the GPU is attached to a Grace CPU by NVLink-C2C."""
    return bool(gpu.known("c2c_links", default=0))


@cached_answer
def widths(node: Reading) -> dict[tuple[int, int], int]:
    """
    Return the number of links of every pair of GPUs (i < j) that report their links.

    A pair with a GPU that reports no NVLink has 0.
    """
    gpus = [gpu for gpu in node.gpus if links_or_none(gpu)]
    index = {gpu.at: gpu.index for gpu in gpus}
    found = nvlink_widths(node.document, combinations(index, 2))
    return {(index[one], index[other]): width for (one, other), width in found.items()}
