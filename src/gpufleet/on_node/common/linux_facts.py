"""RUNS ON THE NODE: read facts about Linux, the PCI bus and the network from the machine's files.

Every path is read below `ROOT`, which is "" on a real machine. In tests, `ANSWERS` has the recorded
results of system calls. On a real machine, `ANSWERS` is empty.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import struct
import sys
from functools import lru_cache
from typing import Any, Callable, Iterable, Iterator

from gpufleet.on_node.common.answers import missing, read

# PCI device ids (pci-ids.ucw.cz) of GPUs whose board has NVSwitches that are managed over
# InfiniBand (NVLink 5): B200, GB100 samples, B300.
SWITCHES_OVER_INFINIBAND = frozenset({"0x2901", "0x2920", "0x3182"})
VPD_BYTES = 32768  # addresses have 15 bits (PCI local bus specification 3.0, appendix I)

# The probe sets both values before it reads facts.
ROOT = ""
ANSWERS: dict[str, Any] = {}


def recorded_or_call(name: str, call: Callable[[], Any]) -> Any:
    """Return the recorded value of a name. If no value was recorded, call the function."""
    return ANSWERS[name] if name in ANSWERS else call()


def line(path: str) -> str:
    """Return a file's text without surrounding white space."""
    with open(ROOT + path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def number(path: str) -> int:
    """Return the integer in a file."""
    return int(line(path))


def directory_names(directory: str) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(os.listdir(ROOT + directory))


def os_release() -> dict[str, Any]:
    """Return the distribution's id and version. Debian testing has no version."""
    pairs = (text.split("=", 1) for text in line("/etc/os-release").splitlines() if "=" in text)
    known = {key: value.strip("\"'") for key, value in pairs}
    return {key: known.get(key.upper(), missing("absent")) for key in ("id", "version_id")}


def cpus() -> int:
    """Return the number of online CPUs."""
    return len(parse_ranges(line("/sys/devices/system/cpu/online")))


def memory_mib() -> int:
    """Return the total memory that Linux manages, in MiB."""
    return int(re.findall(r"^MemTotal:\s+(\d+) kB", line("/proc/meminfo"), re.MULTILINE)[0]) // 1024


def parse_ranges(ranges: str) -> list[int]:
    """Return the numbers in a list of ranges in Linux' format: "0-1,8" is [0, 1, 8]."""
    numbers: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def format_ranges(numbers: Iterable[int]) -> str:
    """Return a list of ranges in Linux' format: [0, 1, 8] is "0-1,8"."""
    ranges: list[list[int]] = []
    for item in sorted(numbers):
        if ranges and item == ranges[-1][1] + 1:
            ranges[-1][1] = item
        else:
            ranges.append([item, item])
    return ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in ranges)


def pci_functions() -> list[dict[str, Any]]:
    """Return NVIDIA's GPUs and NVSwitches on the PCI bus, with or without a driver."""
    found = []
    for bus_id in directory_names("/sys/bus/pci/devices"):
        at = "/sys/bus/pci/devices/" + bus_id
        # Classes 0x03....: display and 3D controllers. Class 0x0680..: bridges, as NVSwitches are.
        if read(line, at + "/vendor") == "0x10de" and str(read(line, at + "/class")).startswith(
            ("0x03", "0x0680")
        ):
            found.append({"bus_id": bus_id, **pci_place(at)})
    return found


def pci_place(at: str) -> dict[str, Any]:
    """
    Return a PCI function's position. Its distance to any other function follows from `path`.
    """
    return {
        "device": read(line, at + "/device"),
        "class": read(line, at + "/class"),
        "numa_node": read(number, at + "/numa_node"),
        "driver": read(lambda: os.path.basename(os.readlink(ROOT + at + "/driver"))),
        "path": read(real_path, at),
    }


def real_path(path: str) -> str:
    """Return the target of a sysfs link."""
    return os.path.realpath(ROOT + path)[len(os.path.realpath(ROOT + "/").rstrip("/")) :]


def nics() -> dict[str, Any]:
    """Return the RDMA devices, and the net devices with their addresses."""
    return {
        "infiniband": read(
            lambda: [infiniband(name) for name in directory_names("/sys/class/infiniband")]
        ),
        "net": read(
            lambda: [net(name) for name in directory_names("/sys/class/net") if name != "lo"],
        ),
        "default_route": read(default_route),
    }


def infiniband(name: str) -> dict[str, Any]:
    """Return the facts about one RDMA device."""
    at = "/sys/class/infiniband/" + name
    return {
        "name": name,
        "pci": read(pci_parent, at),
        "manages_switches": read(manages_switches, at),
        "ports": read(
            lambda: [
                {
                    "port": port,
                    **{
                        key: read(line, "%s/ports/%s/%s" % (at, port, key))
                        for key in ("state", "phys_state", "rate", "link_layer")
                    },
                }
                for port in directory_names(at + "/ports")
            ]
        ),
    }


def manages_switches(at: str) -> bool:
    """
    Return whether a board's NVSwitches are managed over this device.

    The device's vital product data show this. They are read only on boards with such switches,
    because a card needs up to 0.1 s to return them. A virtual machine has the GPUs but not these
    devices, because its host manages the switches.
    """
    if SWITCHES_OVER_INFINIBAND.isdisjoint(str(each["device"]) for each in pci_functions()):
        return False
    try:
        with open(ROOT + at + "/device/vpd", "rb") as file:
            # The start script of nvidia-fabricmanager searches for the same word.
            return b"SW_MNG" in file.read(VPD_BYTES)
    except FileNotFoundError:  # a card without vital product data
        return False


def net(name: str) -> dict[str, Any]:
    """
    Return the facts about one net device.

      speed     in Mbit/s; unknown if the device has no link
      networks  all IPv4 addresses with their prefix lengths
      kind      Linux' type of the device, if it is not a plain NIC
      lower     the lower devices, for example the members of a bond
    """
    at = "/sys/class/net/" + name
    return {
        "name": name,
        "mac": read(line, at + "/address"),
        "state": read(line, at + "/operstate"),
        "mtu": read(number, at + "/mtu"),
        "speed": read(number, at + "/speed"),
        "pci": read(pci_parent, at),
        "ipv4": read(ipv4, name),
        "ipv6": read(ipv6, name),
        "networks": read(networks, name),
        "kind": read(device_kind, at),
        "lower": read(
            lambda: [each[6:] for each in directory_names(at) if each.startswith("lower_")]
        ),
    }


def device_kind(at: str) -> str:
    """Return the driver's type of a device: "bridge", "bond", "vlan", "wireguard", ...."""
    if os.path.exists(ROOT + at + "/tun_flags"):
        return "tun"
    for row in line(at + "/uevent").splitlines():
        if row.startswith("DEVTYPE="):
            return row.partition("=")[2]
    raise FileNotFoundError(errno.ENOENT, "no type")


def pci_parent(at: str) -> dict[str, Any]:
    """Return the PCI function of a class device. A virtual device has none."""
    functions = re.findall(
        r"(?<=/)[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)", real_path(at)
    )
    if not functions:
        raise FileNotFoundError(errno.ENOENT, "not a PCI device")
    return {"bus_id": functions[-1], **pci_place("/sys/bus/pci/devices/" + functions[-1])}


def ipv4(name: str) -> str:
    """Return a net device's first IPv4 address."""
    if "ipv4" in ANSWERS:
        if name not in ANSWERS["ipv4"]:
            raise OSError(errno.EADDRNOTAVAIL, name)
        return str(ANSWERS["ipv4"][name])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # SIOCGIFADDR, linux/sockios.h. The address is in bytes 20 to 24 of struct ifreq.
        answer = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))
    return socket.inet_ntoa(answer[20:24])


def networks(name: str) -> list[str]:
    """Return a net device's IPv4 addresses with their prefix lengths, for example "10.1.0.5/16"."""
    # If `ANSWERS` describes a recorded machine, do not query this machine's kernel.
    found = dict(ANSWERS.get("networks", {})) if "ipv4" in ANSWERS else all_networks()
    if name not in found:
        raise OSError(errno.EADDRNOTAVAIL, name)
    return list(found[name])


@lru_cache(maxsize=None)
def all_networks() -> dict[str, list[str]]:
    """Return the IPv4 networks of all devices. Netlink is the only source that has all of them."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asked:
        asked.settimeout(2)
        # struct nlmsghdr (RTM_GETADDR; NLM_F_REQUEST and NLM_F_DUMP), then struct ifaddrmsg.
        asked.send(struct.pack("=IHHIIBBBBI", 24, 22, 0x301, 1, 0, socket.AF_INET, 0, 0, 0, 0))
        ended = False
        while not ended:
            for kind_of, body in _messages(asked.recv(1 << 16)):
                ended = ended or kind_of in (2, 3)  # NLMSG_ERROR, NLMSG_DONE
                address = _address(body) if kind_of == 20 else None  # RTM_NEWADDR
                if address:
                    device = socket.if_indextoname(struct.unpack_from("=I", body, 4)[0])
                    found.setdefault(device, []).append(address)
    return found


def _messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each netlink message's type and payload."""
    at = 0
    while at + 16 <= len(answer):
        length, kind_of = struct.unpack_from("=IH", answer, at)
        if length < 16:
            return
        yield kind_of, answer[at + 16 : at + length]
        at += (length + 3) & ~3


def _address(body: bytes) -> str | None:
    """
    Return the address in a struct ifaddrmsg, or None. IFA_LOCAL is the device's own address.
    """
    attributes: dict[int, bytes] = {}
    at = 8
    while at + 4 <= len(body):
        length, kind_of = struct.unpack_from("=HH", body, at)
        if length < 4 or at + length > len(body):
            break
        attributes[kind_of] = body[at + 4 : at + length]
        at += (length + 3) & ~3
    own = attributes.get(2, attributes.get(1))  # IFA_LOCAL, IFA_ADDRESS
    return None if own is None else "%s/%d" % (socket.inet_ntoa(own), body[1])


def ipv6(name: str) -> list[str]:
    """Return a net device's IPv6 addresses, including link-local addresses."""
    rows = (text.split() for text in line("/proc/net/if_inet6").splitlines())
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == name
    ]


def default_route() -> str:
    """Return the net device of the IPv4 default route with the lowest metric."""
    rows = [text.split() for text in line("/proc/net/route").splitlines()[1:]]
    routes = sorted((int(row[6]), row[0]) for row in rows if row[1] == row[7] == "00000000")
    if not routes:
        raise FileNotFoundError(errno.ENOENT, "no default route")
    return routes[0][1]


HOST_FACTS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("hostname", lambda: line("/proc/sys/kernel/hostname")),
    ("machine_id", lambda: line("/etc/machine-id")),
    ("boot_id", lambda: line("/proc/sys/kernel/random/boot_id")),
    ("kernel", lambda: line("/proc/sys/kernel/osrelease")),
    ("os_release", os_release),
    ("arch", lambda: recorded_or_call("arch", lambda: os.uname().machine)),
    ("python", lambda: sys.version.split()[0]),
    ("cpus", cpus),
    ("memory_mib", memory_mib),
    ("pci", pci_functions),
    ("nics", nics),
)

# Facts that the kernel module reports. They are known even if NVML does not answer.
MODULE_FACTS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("module", lambda: line("/sys/module/nvidia/version")),
    ("proc", lambda: line("/proc/driver/nvidia/version").splitlines()[0]),
    ("proc_gpus", lambda: directory_names("/proc/driver/nvidia/gpus")),
    ("devices", lambda: [name for name in directory_names("/dev") if name.startswith("nvidia")]),
)


def host() -> dict[str, Any]:
    """Return all facts of this module."""
    facts = {name: read(function) for name, function in HOST_FACTS}
    facts["module"] = {name: read(function) for name, function in MODULE_FACTS}
    return facts
