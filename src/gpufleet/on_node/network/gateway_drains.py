"""RUNS ON THE NODE: show or change the drained servers of this gateway.

Takes (`PARAMETERS`):
  do       one of these actions:
           - show: show the state
           - drain: send no new requests to the servers, even after a restart of the gateway
           - ready: send requests to the servers again; the answer has their state after some
             seconds of health checks
           - load: reload `unit` until HAProxy has loaded the configuration with `fingerprint`, for
             at most `seconds`
  servers  ["<backend>/<server>", ...]: the servers to drain or to make ready
  home, run, state  directories of the configuration, the sockets and the stored state; by default
           the directories of gpufleet's gateway
Prints one JSON document:
  schema       1
  error        null or a sentence
  runs         whether HAProxy runs
  fingerprint  fingerprint of the loaded configuration
  servers      [{backend, server, status, sessions, queued, drained}]
  drained      [servers that are stored as drained]
  unknown      [requested servers that are not in the configuration]
  configured   {server: [address, port]}
  models       [backends]
  keys         {backend: SHA-256 of the key that HAProxy sends to the backend's servers}
No key leaves the node.

The gateway's unit starts the installed program with `gateway-state start HOME RUN STATE` before
HAProxy starts, and with `gateway-state reload ...` before each reload. The program never makes the
unit's start or reload fail.

Only drained.json defines which servers are drained. It is written before HAProxy is told. HAProxy
reads drained.state at every start and reload, before its first request. This file is generated from
drained.json each time, because HAProxy's server state contains ports, and an old file would restore
old ports. After a reload, servers that were down stay down until they are checked. The program
needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from typing import Any, Iterator

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}

# HAProxy answers within milliseconds. During a reload, a connection may be lost. Then the command
# is sent again, which is harmless, and the next process answers.
SOCKET_SECONDS = 3
TRIES = 4
# HAProxy treats a server as healthy again after two successful checks, which are 2 s apart.
UP_SECONDS = 10
# HAProxy's server state, version 1 (management guide, "show servers state"), with the fields that
# this program uses. The administrative state 8 is a drain by the runtime socket (SRV_ADMF_FDRAIN).
HEADER = (
    "be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
    "srv_time_since_last_change srv_check_status srv_check_result srv_check_health "
    "srv_check_state srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord "
    "srv_use_ssl srv_check_port srv_check_addr srv_agent_addr srv_agent_port"
)
DRAINED = 8
STOPPED, RUNNING = 0, 2
# As in the gateway's `default-server rise`. A server that is loaded as up goes down at its first
# failed check.
RISE = 2

PLACES = {
    "home": "/etc/gpufleet/gateway",
    "run": "/run/gpufleet-gateway",
    "state": "/var/lib/gpufleet/gateway",
}
HOME, RUN, STATE = (
    sys.argv[2:5]
    if len(sys.argv) == 5 and not PARAMETERS
    else [PARAMETERS.get(each, at) for each, at in PLACES.items()]
)


def main() -> None:
    """Run the requested action, or the hook that the gateway's unit calls."""
    if not PARAMETERS:
        hook(sys.argv[1])
        return
    document = {
        "schema": 1,
        "error": None,
        "runs": False,
        "fingerprint": "",
        "servers": [],
        "drained": [],
        "unknown": [],
        "configured": {},
        "models": [],
        "keys": {},
    }  # type: dict[str, Any]
    try:
        document.update(perform(PARAMETERS["do"], PARAMETERS.get("servers", [])))
    except OSError as error:
        document["error"] = "the gateway's state cannot be read or written: %s" % error
    sys.stdout.write(json.dumps(document) + "\n")


def hook(when: str) -> None:
    """
    Write HAProxy's state file. Errors are ignored, because the gateway can start without the file.
    """
    try:
        with hold_lock():
            write_state(read_drained(), live=when == "reload")
    except Exception as error:
        sys.stderr.write("the state of HAProxy's servers could not be stored: %r\n" % error)


def perform(what: str, servers: "list[str]") -> "dict[str, Any]":
    """Execute the action, and return the state after it."""
    if what == "show":
        return server_states(read_drained())
    if what == "load":
        return load(PARAMETERS["unit"], PARAMETERS["fingerprint"], PARAMETERS["seconds"])
    there = configured()
    with hold_lock():
        drained = read_drained()
        if what == "drain":
            drained |= set(servers)
        else:
            drained -= set(servers)
        keep(drained)
        write_state(drained, live=False)
        errors = []
        for name in sorted(set(servers) & set(there)):
            try:
                said = send_command("set server %s state %s" % (name, what))
            except OSError:
                # HAProxy does not run. It will read the stored drains when it starts.
                break
            if said.strip():
                errors.append("%s: %s" % (name, " ".join(said.split())))
    found = server_states(drained)
    until = time.monotonic() + UP_SECONDS
    while what == "ready" and is_down(found, servers) and time.monotonic() < until:
        time.sleep(0.5)
        found = server_states(drained)
    found["unknown"] = sorted(set(servers) - set(there))
    if errors and not found.get("error"):
        found["error"] = "; ".join(errors)
    return found


def is_down(found: "dict[str, Any]", servers: "list[str]") -> bool:
    """Return whether at least one of these servers fails its health check."""
    return any(
        each["backend"] + "/" + each["server"] in servers and each["status"].startswith("DOWN")
        for each in found.get("servers", [])
    )


def load(unit: str, fingerprint: str, seconds: float) -> "dict[str, Any]":
    """
    Make HAProxy load the files on disk. Return the state with the loaded fingerprint or the error.
    """
    until = time.monotonic() + seconds
    said = ""
    try:
        done = subprocess.run(
            ["systemctl", "reload", "--", unit],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        said = done.stdout.decode("utf-8", "replace").strip()
    except subprocess.TimeoutExpired:
        said = "`systemctl reload` took more than %s s" % seconds
    found = server_states(read_drained())
    while found.get("fingerprint") != fingerprint and time.monotonic() < until and not said:
        time.sleep(0.2)
        found = server_states(read_drained())
    if found.get("fingerprint") != fingerprint:
        found["error"] = said or (
            "HAProxy keeps its former configuration; `journalctl -u %s` shows the reason" % unit
        )
    return found


# The stored state


@contextlib.contextmanager
def hold_lock() -> "Iterator[None]":
    """Hold the exclusive lock for changes of the stored drains."""
    os.makedirs(STATE, mode=0o755, exist_ok=True)
    with open(os.path.join(STATE, ".lock"), "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_drained() -> "set[str]":
    """Return the servers stored as drained."""
    try:
        with open(os.path.join(STATE, "drained.json"), encoding="utf-8") as file:
            return set(json.load(file)["drained"])
    except FileNotFoundError:
        return set()
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(
            "%s/drained.json is damaged (%r): remove this file" % (STATE, error)
        ) from None


def keep(drained: "set[str]") -> None:
    """Store these servers as drained. They replace all servers that were stored before."""
    replace("drained.json", json.dumps({"schema": 1, "drained": sorted(drained)}) + "\n")


def replace(name: str, text: str) -> None:
    """Write a file atomically and durably."""
    path = os.path.join(STATE, name)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)
    folder = os.open(STATE, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_state(drained: "set[str]", live: bool) -> None:
    """
    Write the server state that HAProxy reads at its next start.

    The file has one line for each server that is drained or down.
    """
    down = set()
    if live:
        with contextlib.suppress(OSError):
            down = {
                row["be_name"] + "/" + row["srv_name"]
                for row in states(send_command("show servers state"))
                if row["srv_op_state"] == str(STOPPED)
            }
    lines = ["1", "# " + HEADER]
    for name, (address, port) in sorted(configured().items()):
        if name in drained or name in down:
            lines.append(line(name, address, port, name in drained, name in down))
    replace("drained.state", "\n".join(lines) + "\n")


def line(name: str, address: str, port: int, drained: bool, down: bool) -> str:
    """Return the line of a server, with the server's address and port in the configuration."""
    backend, server = name.split("/", 1)
    values = {
        "be_name": backend,
        "srv_name": server,
        "srv_addr": address,
        "srv_op_state": STOPPED if down else RUNNING,
        "srv_admin_state": DRAINED if drained else 0,
        "srv_uweight": 1,
        "srv_iweight": 1,
        "srv_time_since_last_change": 0,
        "srv_check_status": 1,
        "srv_check_health": 0 if down else RISE,
        "srv_fqdn": "-",
        "srv_port": port,
        "srvrecord": "-",
        "srv_check_addr": "-",
        "srv_agent_addr": "-",
    }
    return " ".join(str(values.get(field, 0)) for field in HEADER.split())


def states(text: str) -> "list[dict[str, str]]":
    """Return the rows of `show servers state`."""
    lines = text.splitlines()
    names = next((each[1:].split() for each in lines if each.startswith("#")), [])
    rows = (each.split() for each in lines if each and not each.startswith("#"))
    return [dict(zip(names, row)) for row in rows if len(row) > 6]  # since 3.10


def configured() -> "dict[str, tuple[str, int]]":
    """Return {name: (address, port)} for the servers in the gateway's configuration."""
    found = {}
    backend = ""
    try:
        with open(os.path.join(HOME, "haproxy.cfg"), encoding="utf-8") as file:
            for text in file:
                words = text.split()
                if text[:1] not in (" ", "\t", "#", "\n", ""):
                    backend = words[1] if words[0] == "backend" else ""
                elif backend and words[:1] == ["server"]:
                    address, _, port = words[2].rpartition(":")
                    found[backend + "/" + words[1]] = (address.strip("[]"), int(port))
    except FileNotFoundError:
        pass
    return found


def models() -> "list[str]":
    """Return the backends of the gateway's configuration."""
    try:
        with open(os.path.join(HOME, "haproxy.cfg"), encoding="utf-8") as file:
            return [each.split()[1] for each in file if each.startswith("backend ")]
    except FileNotFoundError:
        return []


def keys() -> "dict[str, str]":
    """Return {backend: hash of the key that HAProxy sends to the backend's servers}."""
    found = {}
    try:
        with open(os.path.join(HOME, "upstream.map"), "rb") as file:
            for line in file.read().splitlines():
                backend, _, key = line.partition(b" ")
                found[backend.decode()] = hashlib.sha256(key).hexdigest()
    except FileNotFoundError:
        pass
    return found


# The running HAProxy


def server_states(drained: "set[str]") -> "dict[str, Any]":
    """Return the states of the servers in HAProxy, and which servers are stored as drained."""
    found = {
        "drained": sorted(drained),
        "configured": configured(),
        "models": models(),
        "keys": keys(),
    }  # type: dict[str, Any]
    try:
        info = send_command("show info")
        rows = statistics(send_command("show stat -1 4 -1"))
    except OSError as error:
        found["error"] = "HAProxy does not answer at its socket: %s" % error
        return found
    found["runs"] = True
    match = re.search(r"^description: gpufleet (\S+)", info, re.MULTILINE)
    found["fingerprint"] = match.group(1) if match else ""
    older = {}  # type: dict[str, int]
    for text in older_statistics():
        for row in statistics(text):
            name = row["pxname"] + "/" + row["svname"]
            older[name] = older.get(name, 0) + int(row["scur"] or 0)
    found["servers"] = [
        {
            "backend": row["pxname"],
            "server": row["svname"],
            "status": row["status"],
            "sessions": int(row["scur"] or 0) + older.get(row["pxname"] + "/" + row["svname"], 0),
            "queued": int(row["qcur"] or 0),
            "drained": row["pxname"] + "/" + row["svname"] in drained,
        }
        for row in rows
    ]
    return found


def statistics(text: str) -> "list[dict[str, str]]":
    """Return the rows of `show stat` that are about servers."""
    lines = text.splitlines()
    names = next((each[2:].split(",") for each in lines if each.startswith("# ")), [])
    each_row = (each.split(",") for each in lines if each and each[0] != "#")
    rows = (dict(zip(names, row)) for row in each_row)  # since 3.10
    return [row for row in rows if row.get("svname") not in (None, "FRONTEND", "BACKEND")]


def older_statistics() -> "Iterator[str]":
    """
    Yield the statistics of old processes.

    After a reload, an old process ends when its last request ends.
    """
    try:
        processes = send_command("show proc", master=True)
    except OSError:
        return  # this HAProxy was not started by gpufleet's unit
    old = processes.partition("# old workers")[2].partition("# programs")[0]
    for text in old.splitlines():
        pid = text.split()[:1]
        if pid and pid[0].isdigit():
            with contextlib.suppress(OSError):
                yield send_command("@!%s show stat -1 4 -1" % pid[0], master=True)


def send_command(command: str, master: bool = False) -> str:
    """Return HAProxy's answer to a command. Raises `OSError`."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(socket.timeout, ConnectionResetError):
            try:
                return send_once(command, master)
            except ConnectionRefusedError:
                if not master:
                    raise
                time.sleep(0.3)  # during a reload, the master process replaces itself for a moment
    return send_once(command, master)


def send_once(command: str, master: bool) -> str:
    """Send a command once and return the answer."""
    path = os.path.join(RUN, "master.sock" if master else "admin.sock")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as there:
        there.settimeout(SOCKET_SECONDS)
        there.connect(path)
        there.sendall(command.encode() + b"\n")
        if master:
            there.shutdown(socket.SHUT_WR)  # otherwise HAProxy waits for more commands
        parts = []  # type: list[bytes]
        while True:
            part = there.recv(65536)
            if not part:
                return b"".join(parts).decode("utf-8", "replace")
            parts.append(part)


if __name__ == "__main__":
    main()
