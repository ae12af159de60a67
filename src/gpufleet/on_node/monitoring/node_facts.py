"""RUNS ON THE NODE, as root, every minute: write facts about the node for the node exporter.

gpufleet-facts.timer starts this program. The program reads /etc/gpufleet/facts.json, in which the
deploy writes facts that the node itself cannot know:
  schema    1
  gpu_node  false: the program reads no facts about GPUs
  dcgm      true: DCGM measures the GPUs; false: this program queries NVML
  gpus      number of GPUs that the node should have
  lock      the lock that has the driver; "" if there is none
  release   the vLLM release that the node should serve; "" if there is none
It writes /var/lib/gpufleet/textfile/facts.prom, which docs/reference/node-metrics.md describes.

Each part of the facts is read in its own process with a deadline (forked.py). If a part fails, only
its own series are missing, and gpufleet_facts_failed reports the part. A process that is stuck in
the kernel cannot be killed. While such a process exists, its part is not read again, so that stuck
processes do not accumulate. Expensive sources (modinfo, the package database, the kernel log) are
read again only if their files have changed. The program needs Python 3.8, the standard library, and
NVIDIA's binding, which is installed with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from gpufleet.on_node.common import (
    driver_files,
    linux_facts,
    nvml,
    package_facts,
    stages,
    system,
    textfile,
)
from gpufleet.on_node.common.answers import CannotRead, is_missing, missing, read
from gpufleet.on_node.common.commands import refusal_of, run
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.common.linux_facts import directory_names, line
from gpufleet.on_node.common.stage_units import stage_of
from gpufleet.on_node.common.systemctl import show_each
from gpufleet.on_node.common.textfile import Labels, Number
from gpufleet.on_node.monitoring import (
    gpu_values,  # fmt: skip
    xid_counts,
)
from gpufleet.on_node.monitoring.record import DEPLOYS

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

DECLARED = "/etc/gpufleet/facts.json"
FILE = "facts.prom"
MARK = "/var/lib/gpufleet/unchecked"
# Directory of the cached answers and their keys. The unit creates the directory. A reboot removes
# it.
MEMORY = "/run/gpufleet-facts"
# Names of the package since R535 (2023): "nvidia-fabricmanager-570", and "nvidia-fabric-manager" on
# Red Hat.
FABRIC_MANAGER = re.compile(r"nvidia-fabric-?manager(-\d+)?")
# Files that dpkg and rpm write at every change of packages.
DATABASES = (
    "/var/lib/dpkg/status",
    "/var/lib/rpm/rpmdb.sqlite",
    "/var/lib/rpm/rpmdb.sqlite-wal",
    "/var/lib/rpm/Packages",
    "/usr/lib/sysimage/rpm/rpmdb.sqlite",
    "/usr/lib/sysimage/rpm/rpmdb.sqlite-wal",
)
UNIT_STATES = ("active", "reloading")

# Deadlines in seconds. The longest sequence (NVML's start, then its GPUs) takes less than the 50 s
# that the unit may run. `init` is long because without persistence mode the driver first wakes
# every GPU.
SECONDS = {"part": 10, "log": 12, "init": 20, "gpu": 10, **PARAMETERS.get("seconds", {})}

Sample = Tuple[str, Labels, Number]


# The parts of the facts. Each function runs in a process of its own


def host() -> Dict[str, Any]:
    """
    Return the facts that are in plain files.

    They are the kernel, the loaded driver, the mark of an unchecked driver, deploys, and whether a
    reboot is pending.
    """
    running = line("/proc/sys/kernel/osrelease")
    kernels = read(directory_names, "/lib/modules")
    installed = [] if is_missing(kernels) else filter(driver_files.is_installed, kernels)
    newest = max(installed, key=driver_files.version_key, default=running)
    return {
        "kernel": running,
        "loaded": read(line, "/sys/module/nvidia/version"),
        "unchecked": os.path.exists(linux_facts.ROOT + MARK),
        "packages": read(system.reboot_required),
        "newest": newest,
        "deploys": {name: read(linux_facts.number, DEPLOYS + "/" + name) for name in deploys()},
    }


def deploys() -> List[str]:
    """Return the names of deploys that have finished on this node."""
    found = read(directory_names, DEPLOYS)
    return [] if is_missing(found) else [each for each in found if re.fullmatch(r"[a-z]+", each)]


def module_on_disk(known: Any) -> Dict[str, Any]:
    """
    Return the version of the running kernel's nvidia module.

    The version is cached, because modinfo must unpack the module.
    """
    kernel = line("/proc/sys/kernel/osrelease")
    at = "/lib/modules/" + kernel
    listed = read(line, at + "/modules.dep")
    rows = [] if is_missing(listed) else listed.splitlines()
    files = [row.split(":")[0] for row in rows if re.search(r"/nvidia\.ko(\.\w+)?:", row)]
    by = [kernel, *map(file_stamp, [at + "/modules.dep", *(at + "/" + file for file in files)])]
    # If depmod does not list the module, modinfo fails at once.
    if files and known and known["by"] == by:
        return dict(known)
    return {"by": by, "version": read(lambda: driver_files.module(kernel)["version"])}


def fabric_manager_version(known: Any) -> Dict[str, Any]:
    """Return the version of the installed fabric manager, or "" if there is none."""
    by = [file_stamp(path) for path in DATABASES]
    if any(by) and known and known["by"] == by:
        return dict(known)
    found = package_facts.packages()
    versions = [found[name]["version"] for name in sorted(found) if FABRIC_MANAGER.fullmatch(name)]
    # A version is "580.95.05-1", or "3:580.95.05-1.el9" with an epoch.
    plain = [version.rpartition(":")[2].partition("-")[0] for version in versions]
    return {"by": by, "version": plain[-1] if plain else ""}


def file_stamp(path: str) -> Optional[List[int]]:
    """
    Return a value that changes whenever the file changes, or None if the file does not exist.
    """
    try:
        about = os.stat(linux_facts.ROOT + path)
    except OSError:
        return None
    return [about.st_mtime_ns, about.st_size, about.st_ino]


def library() -> str:
    """Return the version in the name of NVML's library, or "" if the node has none."""
    found = linux_facts.recorded_or_call("library", lambda: read(driver_files.library_loaded))
    if is_missing(found):
        if found["missing"] in {"absent", "library_not_found"}:
            return ""
        raise CannotRead(reason=found["missing"], detail=found.get("detail"))
    if is_missing(found["version"]):
        raise CannotRead("error", detail="the file name %s has no version" % found["file"])
    return str(found["version"])


def units() -> List[Dict[str, Any]]:
    """Return every stage that has a unit on this node, with the unit's state in systemd."""
    found = [each for each in stages.stages() if "foreign" not in each]
    unread = [each for each in found if is_missing(each)]
    if unread:
        raise CannotRead(reason=unread[0]["missing"], detail=unread[0].get("detail"))
    if not found:
        return []
    wanted = [each["unit"] for each in found]
    output = run(
        "systemctl", "show", "--no-pager", "--property=Id,ActiveState,NRestarts", *wanted,
        seconds=SECONDS["part"] - 2,
    )  # fmt: skip
    said = {about.get("Id"): about for about in show_each(output.out)}
    if output.status or not set(wanted) <= set(said):
        raise refusal_of("systemctl", output)
    return [
        {
            "stage": stage_of(each["unit"]),
            "unit": each["unit"],
            "model": each["model"],
            "release": each["release"],
            "active": said[each["unit"]]["ActiveState"] in UNIT_STATES,
            "restarts": int(said[each["unit"]].get("NRestarts") or 0),
        }
        for each in found
    ]


def driver_gpus(known: Any) -> Dict[str, Any]:
    """
    Return the driver's GPUs as {bus id: {"answers", "uuid"}}, or {} if no driver is loaded.

    If a GPU has fallen off the bus, the driver still has an entry for it. Only the bus shows that
    the GPU no longer answers. The UUID is then from an earlier run, because the driver no longer
    knows it.
    """
    found = read(directory_names, "/proc/driver/nvidia/gpus")
    if is_missing(found):
        if found["missing"] == "absent":
            return {}
        raise CannotRead(reason=found["missing"])
    before = known or {}
    return {
        bus_id: {
            "answers": is_answering(bus_id),
            "uuid": uuid_of(bus_id) or before.get(bus_id, {}).get("uuid", ""),
        }
        for bus_id in found
    }


def is_answering(bus_id: str) -> bool:
    """
    Return whether a PCI function answers.

    If a function is lost, every bit that is read is 1 (`system.raise_lost`).
    """
    try:
        with open("%s/sys/bus/pci/devices/%s/config" % (linux_facts.ROOT, bus_id), "rb") as file:
            return file.read(4) != b"\xff\xff\xff\xff"
    except OSError:
        return False


def uuid_of(bus_id: str) -> str:
    """Return a GPU's UUID from the driver's files, or "" if the files do not have it."""
    text = read(line, "/proc/driver/nvidia/gpus/%s/information" % bus_id)
    if is_missing(text):
        return ""
    # For a GPU that the driver has lost, the file has "GPU-????????-....".
    found = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", text, re.MULTILINE)
    return found.group(1) if found else ""


# How the parts are read


class Facts:
    """The parts of the facts and their answers in one run, and the data that is kept for later."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.known = load_kept("known.json")
        self.stuck = {
            name: each for name, each in load_kept("stuck.json").items() if is_alive(each)
        }
        self.asked: Dict[str, Dict[str, Any]] = {}
        self.answers: Dict[str, Any] = {}

    def ask(self, name: str, function: Callable[[], Any], seconds: float, keep: float = 0) -> None:
        """Read a part, unless a process of an earlier run is still stuck reading it."""
        if name in self.stuck:
            self.answers[name] = missing("timeout", detail="an earlier query is still stuck")
            return
        self.watch.ask(name, function, seconds, keep)
        if name in self.watch.out:
            self.asked[name] = process(self.watch.out[name].pid)

    def wait(self, *parts: str) -> None:
        """Wait for these parts until their deadlines."""
        waited = [name for name in parts if name not in self.answers]
        self.answers.update(self.watch.answers(*waited))

    def end(self) -> None:
        """
        Kill the unfinished processes. Record the processes that survive, and the cached values.
        """
        self.watch.stop()
        until = time.monotonic() + END_SECONDS
        still = self.asked
        while still and (still := {name: each for name, each in still.items() if is_alive(each)}):
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        keep("stuck.json", {**self.stuck, **still})
        keep("known.json", {
            name: answer for name, answer in self.answers.items()
            if name in REMEMBERED and not is_missing(answer)
        })  # fmt: skip


END_SECONDS = 2
"""
Time in seconds in which a killed process ends on a busy node. A process that still exists after
this time is stuck in the kernel.
"""
REMEMBERED = ("disk", "fabric_manager", "gpus", "xids")


def process(pid: int) -> Dict[str, Any]:
    """Return a process' identity, which is its PID and its start time."""
    return {"pid": pid, "began": start_ticks(pid)}


def start_ticks(pid: int) -> Optional[str]:
    """
    Return a process' start time in ticks since boot, or None if it has ended or does not exist.
    """
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]  # proc(5): field 3, field 22


def is_alive(about: Dict[str, Any]) -> bool:
    """Return whether a process is still the one that was recorded, and is running."""
    return about["began"] is not None and start_ticks(about["pid"]) == about["began"]


def load_kept(name: str) -> Dict[str, Any]:
    """Return an earlier run's cache, or {} if it is missing or invalid."""
    try:
        with open("%s%s/%s" % (linux_facts.ROOT, MEMORY, name), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(name: str, content: Dict[str, Any]) -> None:
    """
    Cache content for the next run. If this fails, the next run reads the facts again.
    """
    path = "%s%s/%s" % (linux_facts.ROOT, MEMORY, name)
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(path + ".tmp", path)
    except OSError:
        pass


# The samples


def samples() -> Iterator[Sample]:
    """Read all parts and yield all samples."""
    began_at = time.time()
    declared = read(declaration)
    failed = {"declared": is_missing(declared)}
    # Without the declaration, gpufleet does not know whether the node should have GPUs.
    about = {} if failed["declared"] else declared
    gpu_node = bool(about.get("gpu_node"))
    facts = Facts()
    try:
        ask(facts, gpu_node, by_nvml=gpu_node and not about.get("dcgm"))
    finally:
        facts.end()
    found = facts.answers
    failed.update({name: is_missing(answer) for name, answer in found.items()})
    made = list(node_samples(found, about, gpu_node)) + list(stage_facts(found["stages"]))
    if "nvml" in found:
        made += gpu_facts(found, failed)
    yield "facts_timestamp_seconds", {}, round(began_at, 3)
    # A GPU that does not answer is reported in the part "nvml", not as a part of its own.
    parts = {name: gone for name, gone in failed.items() if not name.startswith("gpu ")}
    for name, gone in sorted(parts.items()):
        yield "facts_failed", {"part": name}, int(gone)
    yield from made


def declaration() -> Dict[str, Any]:
    """
    Return the declaration that the deploy wrote.

    Raises `CannotRead` if the declaration has a different schema.
    """
    found = json.loads(line(DECLARED))
    if not isinstance(found, dict) or found.get("schema") != 1:
        raise CannotRead("version", detail=DECLARED)
    return found


def ask(facts: Facts, gpu_node: bool, by_nvml: bool) -> None:
    """
    Query all parts at the same time. Query the GPUs as soon as NVML has returned their number.
    """
    seconds = SECONDS["part"]
    facts.ask("host", host, seconds)
    facts.ask("stages", units, seconds)
    parts = ["host", "stages"]
    if gpu_node:
        for name, function in (
            ("disk", partial(module_on_disk, facts.known.get("disk"))),
            ("fabric_manager", partial(fabric_manager_version, facts.known.get("fabric_manager"))),
            ("library", library),
            ("gpus", partial(driver_gpus, facts.known.get("gpus"))),
        ):
            facts.ask(name, function, seconds)
            parts.append(name)
    if by_nvml:
        with contextlib.suppress(ImportError):
            nvml.binding()  # loaded here once, so that the forked processes need not load it
        # This process is kept alive, because GPUs stay awake while a process has NVML open.
        facts.ask("nvml", gpu_values.count, SECONDS["init"], SECONDS["init"] + SECONDS["gpu"])
        facts.ask(
            "xids", partial(xid_counts.count_new, facts.known.get("xids") or {}), SECONDS["log"]
        )
        parts.append("xids")
        facts.wait("nvml")
        count = facts.answers["nvml"]
        gpus = [] if is_missing(count) else ["gpu %d" % index for index in range(count)]
        for index, name in enumerate(gpus):
            facts.ask(name, partial(gpu_values.gpu, index), SECONDS["gpu"])
        parts += gpus
    facts.wait(*parts)


def node_samples(found: Dict[str, Any], about: Dict[str, Any], gpu_node: bool) -> Iterator[Sample]:
    """Yield the samples about the node itself."""
    host = found["host"]
    versions = {
        "loaded": driver_version(host if is_missing(host) else host["loaded"]),
        "disk": driver_version(member_of(found.get("disk", ""), "version")),
        "library": driver_version(found.get("library", "")),
        "fabric_manager": driver_version(member_of(found.get("fabric_manager", ""), "version")),
    }
    if not is_missing(host):
        yield "node_info", {
            "kernel": host["kernel"],
            "driver_loaded": version_label(versions["loaded"]),
            "driver_disk": version_label(versions["disk"]),
            "library": version_label(versions["library"]),
            "fabric_manager": version_label(versions["fabric_manager"]),
            "lock": str(about.get("lock", "")),
            "release": str(about.get("release", "")),
        }, 1  # fmt: skip
        yield "node_unchecked", {}, int(host["unchecked"])
        for deploy, at in host["deploys"].items():
            if not is_missing(at):
                yield "deploy_timestamp_seconds", {"deploy": deploy}, at
        # Distributions of Red Hat's family do not record this, so there is no sample.
        if not is_missing(host["packages"]):
            yield "reboot_pending", {"reason": "packages"}, int(host["packages"])
        yield "reboot_pending", {"reason": "kernel"}, int(host["newest"] != host["kernel"])
    if gpu_node:
        yield from driver_facts(versions)
        yield from number_of_gpus(found, about)


def driver_version(answer: Any) -> Optional[str]:
    """
    Return a version, "" if the part is not installed, or None if the version is unknown.
    """
    if is_missing(answer):
        return "" if answer["missing"] == "absent" else None
    return str(answer)


def member_of(answer: Any, key: str) -> Any:
    """Return one member of an answer. If the whole answer is missing, return the placeholder."""
    return answer[key] if isinstance(answer, dict) and not is_missing(answer) else answer


def version_label(version: Optional[str]) -> str:
    """Return a version as a label. None becomes "unknown"; "" (not installed) stays ""."""
    return "unknown" if version is None else version


def driver_facts(versions: Dict[str, Optional[str]]) -> Iterator[Sample]:
    """
    Yield for each readable part whether its version differs from the loaded module's.

    Also yield whether a reboot is pending.
    """
    loaded = versions["loaded"]
    if not loaded:
        return
    for part in ("disk", "library", "fabric_manager"):
        version = versions[part]
        # Every GPU node needs the module and the library. Most nodes need no fabric manager.
        if version is not None and (version or part != "fabric_manager"):
            yield "driver_mismatch", {"part": part}, int(version != loaded)
    if versions["disk"]:
        yield "reboot_pending", {"reason": "driver"}, int(versions["disk"] != loaded)


def number_of_gpus(found: Dict[str, Any], about: Dict[str, Any]) -> Iterator[Sample]:
    """
    Yield the expected and the present number of GPUs.

    If NVML is queried, a GPU counts as present only if it answers.
    """
    if about.get("gpus") is not None:
        yield "gpus", {"state": "expected"}, about["gpus"]
    present = found["gpus"]
    if is_missing(present):
        return
    there = sum(each["answers"] for each in present.values())
    answering = [name for name in found if name.startswith("gpu ") and not is_missing(found[name])]
    by_nvml = "nvml" in found and not is_missing(found["nvml"])
    yield "gpus", {"state": "present"}, min(there, len(answering)) if by_nvml else there


def stage_facts(found: Any) -> Iterator[Sample]:
    """Yield the stages' states in systemd."""
    for each in [] if is_missing(found) else found:
        stage = {"stage": each["stage"]}
        labels = {name: each[name] for name in ("stage", "model", "release", "unit")}
        yield "stage_info", labels, 1
        yield "stage_active", stage, int(each["active"])
        yield "stage_restarts_total", stage, each["restarts"]


def gpu_facts(found: Dict[str, Any], failed: Dict[str, bool]) -> List[Sample]:
    """
    Return the GPUs' facts from NVML and the kernel log.

    Sources that could not be read are added to `failed`.
    """
    made: List[Sample] = []
    count = found["nvml"] if not is_missing(found["nvml"]) else 0
    places: Dict[str, Labels] = {}
    on_bus = {} if is_missing(found["gpus"]) else found["gpus"]
    for index, bus_id in enumerate(sorted(on_bus)):  # NVML counts in the order of the bus
        places[bus_id] = {"gpu": str(index), "UUID": on_bus[bus_id]["uuid"]}
    for index in range(count):
        answer = found["gpu %d" % index]
        if is_missing(answer):
            failed["nvml"] = True
            continue
        labels = {"gpu": str(index), "UUID": str(answer["uuid"])}
        places[answer["bus_id"]] = labels
        failed["nvml"] = failed["nvml"] or bool(answer["failed"])
        made += [("gpu_" + name, labels, value) for name, value in answer["values"].items()]
    counts = {} if is_missing(found["xids"]) else found["xids"]["counts"]
    for key, times in sorted(counts.items()):
        place, xid = key.split()
        labels = next((each for at, each in places.items() if at.startswith(place + ".")), {})
        # For a GPU that fell off the bus, no UUID is known. The log has only its address.
        named = {"gpu": "", "UUID": "", **labels} if labels else {"gpu": "", "UUID": place}
        made.append(("gpu_xid_errors_total", {**named, "xid": xid}, times))
    return made


def main() -> None:
    """Write the file, then end even if forked processes are still stuck."""
    linux_facts.ROOT = PARAMETERS.get("sysroot", "")
    linux_facts.ANSWERS = PARAMETERS.get("answers", {})
    try:
        directory = os.open(linux_facts.ROOT + textfile.DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        sys.exit("%s: %s" % (textfile.DIRECTORY, error.strerror))
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("another run is writing the facts: wait until it ends")
    content = textfile.text(
        ("gpufleet_" + name, labels, value) for name, labels, value in samples()
    )
    textfile.write(FILE, content, linux_facts.ROOT)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
