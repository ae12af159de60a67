"""RUNS ON THE NODE: collect the logs before a failure, and the recent changes of the node.

Takes (JSON header `PARAMETERS`):
  stages   ids of the stages whose journals are wanted, for example llama-0; the id gateway is the
           gateway's journal
  lines    the most lines of each journal to return; the last lines are returned
  seconds  length of the period before now that is searched
  models   {stage: the folder of its model that a deploy has placed}, for some of the stages
  ranks    ids of stages; the rank of each connects to rank 0 of its replica, then disconnects
  places   {name: [address, port]}: other places, such as a gateway's servers, to which the program
           connects in the same way

Prints one JSON document:
  schema   1
  clock    the node's time, in seconds since 1970
  boot     when the kernel was started, in seconds since 1970
  stages   {id: [[microseconds since 1970, PID, priority, message], ...]}, oldest first
  units    {id: {"drop_ins": [paths of drop-ins that gpufleet did not write],
                 "reload": whether the unit's file was changed after systemd read it,
                 "signal": the signal that ended its last main process, for example KILL; "" if the
                           process ended by itself; null if not known}}
  models   {id: {"directory", "complete": whether the model is marked as complete,
                 "missing": [files], "changed": [files that were written after completion]}},
           for the parameter `models`
  kernel   lines of the kernel's log, in the form of `stages`: messages of level warning or worse,
           and lines about GPUs
  changes  [[seconds since 1970, what], ...], oldest first: deploys that ended, and packages that
           were installed, upgraded or removed; changes of the same minute are one entry
  certificates   [[path, use, end in seconds since 1970], ...], for the certificates that gpufleet
           placed on this node
  connections    {id or name: {"address", "port", "error": the reason of a failure, or null}}, for
           `ranks` and `places`; a rank has no entry if its rank 0 is on this node
Each of `boot`, a stage, a unit, a model, `kernel`, `changes` and `certificates` is {"missing":
reason} if it cannot be read.

The program changes nothing. Secrets are replaced as in on_node/common/unit_journal.py.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import Any, Iterator, List

from gpufleet.on_node.common import (
    kernel_messages,
    linux_facts,
    model_folder,
    stage_units,
    unit_journal,
)
from gpufleet.on_node.common.answers import CannotRead, read
from gpufleet.on_node.common.commands import run
from gpufleet.on_node.common.systemctl import properties
from gpufleet.on_node.doctor import try_ports
from gpufleet.on_node.serving import status

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

GATEWAY, GATEWAY_UNIT = "gateway", "gpufleet-gateway.service"
DEPLOYS = "/var/lib/gpufleet/deploys"
TEXTFILES = "/var/lib/gpufleet/textfile"
CERTIFICATE = re.compile(r'\{path="([^"]*)",use="([^"]*)"\} (\d+)$', re.MULTILINE)
# Logs of dpkg and dnf. Lines that were rotated away are at least a month old.
PACKAGE_LOGS = ("/var/log/dpkg.log", "/var/log/dnf.rpm.log")
LOG_BYTES = 1 << 20  # size of a log's end that is read; it has about 10,000 packages
# The most lines of the kernel log that are searched. A healthy server writes them in weeks, a
# broken one in an hour.
KERNEL_LINES = 20_000
KEPT_KERNEL_LINES = 1000
WARNING = 4  # syslog's level
# Packages that serving depends on, and the words of dpkg and dnf for changes.
CONCERNS = re.compile(
    r"nvidia|cuda|^linux-|^kernel|libc6|^glibc|docker|containerd|rdma|ibverbs|mlx|mft|doca"
    r"|haproxy|^systemd|python3|datacenter-gpu-manager|dcgm|openssl"
)
DPKG = re.compile(r"^([\d-]+ [\d:]+) (install|upgrade|remove|purge) ([^: ]+)\S* (\S+) (\S+)")
DNF = re.compile(r"^(\S+) \S+ (Installed|Upgraded|Erased|Removed|Downgraded): (\S+)")
MOST_CHANGES = 50
MOST_DROP_INS = 10
NAMED = 6  # the most packages of one minute whose names are listed


def main() -> None:
    """Collect the evidence and print the document."""
    wanted = [str(each) for each in PARAMETERS.get("stages", [])]
    places = {
        **try_ports.heads([str(each) for each in PARAMETERS.get("ranks", [])]),
        **{name: (at, port, "") for name, (at, port) in PARAMETERS.get("places", {}).items()},
    }
    attempts = try_ports.Attempts(places)
    document = {
        "schema": 1,
        "clock": time.time(),
        "boot": read(boot),
        "stages": {each: read(stage_lines, each) for each in wanted},
        "units": {each: read(unit_state, each) for each in wanted},
        "models": {
            str(each): read(model_state, str(folder))
            for each, folder in PARAMETERS.get("models", {}).items()
        },
        "kernel": read(kernel_lines),
        "changes": read(changes),
        "certificates": read(certificates),
        "connections": attempts.results(),
    }
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def since() -> float:
    """Return the start of the requested period, in seconds since 1970."""
    return time.time() - float(PARAMETERS.get("seconds", 86400))


def boot() -> float:
    """Return the time when the kernel was booted, in seconds since 1970."""
    text = linux_facts.line("/proc/stat")
    return float(next(row.split()[1] for row in text.splitlines() if row.startswith("btime ")))


def unit_of(stage: str) -> str:
    """Return the name of a stage's unit. Raises `CannotRead` if the id is invalid."""
    if not re.fullmatch(r"[\w.-]+", stage):
        raise CannotRead("absent", detail="no such unit")
    return GATEWAY_UNIT if stage == GATEWAY else stage_units.unit_of(stage)


def stage_lines(stage: str) -> List[List[Any]]:
    """Return the log lines of a stage's unit, and systemd's lines about the unit."""
    unit = unit_of(stage)
    entries = unit_journal.journal(
        "--lines=%d" % max(1, int(PARAMETERS.get("lines", 1))),
        "--since=@%d" % since(),
        "--unit=" + unit,
        fields=unit_journal.FIELDS,
    )
    hide = unit_journal.secret_redactor(unit_journal.secrets(unit_journal.unit_text(unit)))
    return unit_journal.keep_last_lines([unit_journal.line(each, hide) for each in entries])


def unit_properties(name: str) -> dict[str, str]:
    """Return systemd's properties that describe a unit's files."""
    wanted = "--property=DropInPaths,NeedDaemonReload"
    return properties(run("systemctl", "show", wanted, "--", name, seconds=10).out)


def unit_state(stage: str) -> dict[str, Any]:
    """
    Return the state of a stage's unit: `drop_ins`, `reload` and `signal`.
    """
    name = unit_of(stage)
    known = unit_properties(name)
    if not known:
        raise CannotRead("error", detail="systemctl show printed nothing")
    ends = [each for each in status.events(name) if each["what"] == "exited"]
    return {
        "drop_ins": [
            path
            for path in known.get("DropInPaths", "").split()
            if not os.path.basename(path).startswith("gpufleet-")
        ][:MOST_DROP_INS],
        "reload": known.get("NeedDaemonReload") == "yes",
        "signal": ends[-1].get("signal", "") if ends else None,
    }


def model_state(directory: str) -> dict[str, Any]:
    """Return whether a model is complete, and its missing and changed files."""
    folder = linux_facts.ROOT + directory
    there = [name for name, _ in model_folder.sizes(folder)]
    names = [name for name in there if not name.startswith(model_folder.NOTES)]
    complete = model_folder.MARK in names
    return {
        "directory": directory,
        "complete": complete,
        "missing": sorted(set(model_folder.shards(folder)).difference(names))[:NAMED],
        "changed": list(model_folder.changed_files(folder, names))[:NAMED] if complete else [],
    }


def kernel_lines() -> List[List[Any]]:
    """Return the kernel log's lines of level warning or worse, and its lines about GPUs."""
    entries = unit_journal.journal(
        "--dmesg", "--boot=all", "--lines=%d" % KERNEL_LINES, "--since=@%d" % since(),
        fields=unit_journal.FIELDS,
    )  # fmt: skip
    hide = unit_journal.secret_redactor({})
    lines = [unit_journal.line(each, hide) for each in entries]
    kept = [
        each
        for each in lines
        if kernel_messages.ABOUT.search(each[3]) or (each[2] is not None and each[2] <= WARNING)
    ]
    return unit_journal.keep_last_lines(kept[-KEPT_KERNEL_LINES:])


def changes() -> List[List[Any]]:
    """Return the changes in the requested period, oldest first."""
    found = sorted([*deploys(), *packages()])
    return [[at, what] for at, what in found if at >= since()][-MOST_CHANGES:]


def deploys() -> Iterator[List[Any]]:
    """
    Yield for each deploy when it last ended, and its name (on_node/monitoring/record.py).
    """
    folder = linux_facts.ROOT + DEPLOYS
    if not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        said = read(lambda name=name: float(linux_facts.line(DEPLOYS + "/" + name)))
        if isinstance(said, float) and not name.endswith(".tmp"):
            yield [said, "deploy: " + name]


def certificates() -> List[List[Any]]:
    """
    Return the end of each certificate that gpufleet placed here, from the files that roles write.
    """
    folder = linux_facts.ROOT + TEXTFILES
    if not os.path.isdir(folder):
        return []
    found = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("certificate-") and name.endswith(".prom"):
            found += CERTIFICATE.findall(linux_facts.line(TEXTFILES + "/" + name))
    return [[path, use, float(end)] for path, use, end in found[:MOST_CHANGES]]


def packages() -> Iterator[List[Any]]:
    """Yield the changes of packages. All changes of one minute are combined."""
    moments: dict[int, List[str]] = {}
    for path in PACKAGE_LOGS:
        for row in tail(path):
            at, what = package_line(row)
            if at is not None and at >= since():
                moments.setdefault(int(at) // 60 * 60, []).append(what)
    for minute, those in moments.items():
        whole = list(dict.fromkeys(those))
        more = len(whole) - NAMED
        named = ", ".join(whole[:NAMED]) + (" and %d more" % more if more > 0 else "")
        yield [float(minute), "packages: " + named]


def package_line(row: str) -> Any:
    """
    Return the time and the change in a line of a package manager's log.

    For any other line, return (None, "").
    """
    by_dpkg = DPKG.match(row)
    if by_dpkg:
        moment, verb, name, _, version = by_dpkg.groups()
        if CONCERNS.search(name):
            try:
                at = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
            except (OverflowError, ValueError):
                return None, ""
            return at, "%s %s" % (verb, name) + (" " + version if version != "<none>" else "")
    by_dnf = DNF.match(row)
    if by_dnf:
        moment, verb, name = by_dnf.groups()
        if CONCERNS.search(name):
            try:
                at = time.mktime(time.strptime(moment[:19], "%Y-%m-%dT%H:%M:%S"))
            except (OverflowError, ValueError):
                return None, ""
            return at, "%s %s" % (verb.lower(), name)
    return None, ""


def tail(path: str) -> List[str]:
    """Return a log's last lines, or [] if the log is missing or cannot be read."""
    try:
        with open(linux_facts.ROOT + path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    main()
