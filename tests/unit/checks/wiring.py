"""Changes of a recorded node's NVLinks: links that die, GPUs handed to a virtual machine."""

from __future__ import annotations

DOWN, ACTIVE, ASLEEP, TRAFFIC_DISABLED = range(4)
NOT_SUPPORTED = {"missing": "not_supported", "code": 3}
UNKNOWN = {"missing": "unknown", "code": 999}
GPU, SWITCH, NOBODY_KNOWS = 0, 2, 255


def take_down(node, gpu, numbers=None, state=DOWN):
    """Let a GPU's links be down; all of them without `numbers`. NVML then knows no other end."""
    for link in node["nvlink"][gpu]["links"]:
        if numbers is None or link["link"] in numbers:
            link.update(state=state, remote_type=NOT_SUPPORTED, remote_pci=NOT_SUPPORTED)
    found = node["nvlink"][gpu]
    up = [link for link in found["links"] if link["state"] == ACTIVE]
    found["switch_links"] = sum(link["remote_type"] == SWITCH for link in up)


def cut_peers(node, gpu):
    """Take down a GPU's links and the other ends of them: a bridge that came loose."""
    bus_id = node["gpus"][gpu]["pci"]["bus_id"]
    for other, found in enumerate(node["nvlink"]):
        numbers = [link["link"] for link in found["links"] if link["remote_pci"] == bus_id]
        take_down(node, other, numbers)
    take_down(node, gpu)


def as_guest(node):
    """Change a node behind NVSwitches into a virtual machine that does not see them."""
    node["pci"] = [each for each in node["pci"] if not each["class"].startswith("0x0680")]
    for found in node["nvlink"]:
        found["switch_links"] = NOT_SUPPORTED
        for link in found["links"]:
            link.update(remote_type=NOBODY_KNOWS, remote_pci=NOT_SUPPORTED)
    node["system"]["units"]["nvidia-fabricmanager.service"].update(
        load="not-found", active="inactive", sub="dead"
    )
    node["system"]["packages"].pop("nvidia-fabricmanager-570", None)
    return node


def only(node, *gpus):
    """Leave a node these GPUs: what a hypervisor hands to a virtual machine."""
    gone = {each["pci"]["bus_id"] for at, each in enumerate(node["gpus"]) if at not in gpus}
    node["pci"] = [each for each in node["pci"] if each["bus_id"] not in gone]
    for section in ("gpus", "nvlink", "numa", "fabric"):
        node[section] = [node[section][at] for at in gpus]
    node["pcie"] = [[node["pcie"][i][j] for j in gpus] for i in gpus]
    for kind, matrix in node["p2p"].items():
        node["p2p"][kind] = [[matrix[i][j] for j in gpus] for i in gpus]
    for index, gpu in enumerate(node["gpus"]):
        gpu["index"] = index
    node["driver"]["gpu_count"] = len(gpus)
    return node


def rewired(node, links):
    """Let links of two GPUs end at other GPUs: {(gpu, link): peer}."""
    for (gpu, number), peer in links.items():
        node["nvlink"][gpu]["links"][number]["remote_pci"] = node["gpus"][peer]["pci"]["bus_id"]
