"""
Break one thing of a replica over nodes, and see when it is found, what lives on, what clients see.

All is read from this machine: processes from the nodes' cgroups, journals and state files by way of
a node's first process. So a node whose network is cut is watched like any other.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lab import cgroup, node_power
from lab.state import LabState
from tests.lab.conftest import Fleet

STAGE = "tiny-0"
UNIT = f"vllm-{STAGE}.service"
# What the rank's program is started with unless told otherwise, and what it needs besides
# (docs/decisions/0010-ranks-live-and-die-together.md).
SILENCE, GRACE, SLACK = 10, 5, 1
# A client that has no answer by then calls it a hang.
PATIENCE = 20.0
# Of a model that loads in half a minute, on two cores.
AGAIN = 240.0

# In the command lines of everything that a rank may start, and of itself.
PROGRAMS = ("vllm-rank", "bin/vllm", "VLLM::", "bin/ray", "ray::", "raylet", "gcs_server")

Process: TypeAlias = tuple[str, int, str]
"""Node, process number on this machine, and when it began: numbers come again."""


@dataclass(frozen=True)
class Fault:
    """Something that is broken, and with what it is mended where it does not mend itself."""

    name: str
    strike: Callable[[Replica], None]
    mend: Callable[[Replica], None] = lambda _: None
    silent: bool = False
    """Nothing tells of it but silence."""
    notices: int = 0
    """Seconds that vLLM or Ray may take to notice before a rank's program can."""
    lasts: float = 0.0
    """Seconds for which it is to be borne, without anything ending."""

    @property
    def found_within(self) -> int:
        """The stated bound to the moment at which a rank knows."""
        return (SILENCE if self.silent else 0) + self.notices + SLACK

    @property
    def ended_within(self) -> int:
        """The stated bound to the end of the last process of the old group."""
        return self.found_within + GRACE


@dataclass(frozen=True)
class Seen:
    """What a fault did. Seconds since it began, but where something else is said."""

    backend: str
    fault: Fault
    clients: str
    found: float | None = None
    why: str = ""
    """What the rank that found it first said in its journal."""
    outlived: float | None = None
    """When the last process of the old group was gone."""
    again: float | None = None
    """From when the hardware was back, and at least from the old group's end, to an answer."""


@dataclass
class Client:
    """Two requests a second, and what became of each."""

    address: str
    key: str
    answers: list[tuple[float, float, str]] = field(default_factory=list)
    """When it was asked, when it ended (both as time.time()), and how: `ok`, or what was wrong."""
    wanted: str = ""
    """What the model completes: another text is no answer."""
    _open: set[float] = field(default_factory=set)

    def __enter__(self) -> Client:
        self._over = threading.Event()
        threading.Thread(target=self._ask_on, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _ask_on(self) -> None:
        while not self._over.wait(0.5):
            threading.Thread(target=self._note, daemon=True).start()

    def _note(self) -> None:
        asked = time.time()
        self._open.add(asked)
        how = self.ask()
        self.answers.append((asked, time.time(), how))
        self._open.discard(asked)

    def ask(self) -> str:
        """Ask for a completion; return `ok`, or in a few words what came instead."""
        line = http.client.HTTPConnection(self.address, 8000, timeout=PATIENCE)
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0})
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            line.request("POST", "/v1/completions", body, headers)
            answer = line.getresponse()
            content = answer.read()
        except TimeoutError:
            return "no answer"
        except ConnectionRefusedError:
            return "refused"
        except (OSError, http.client.HTTPException):
            return "closed"
        finally:
            line.close()
        if answer.status != 200:
            return f"HTTP {answer.status}"
        text = json.loads(content)["choices"][0]["text"]
        self.wanted = self.wanted or text
        return "ok" if text == self.wanted else f"another text: {text!r}"

    def since(self, when: float) -> list[tuple[float, float, str]]:
        """Return what ended after `when`, in the order in which it was asked."""
        return sorted(each for each in list(self.answers) if each[1] >= when)

    def summary(self, begin: float, end: float) -> str:
        """Say what clients saw of what they asked from `begin` to `end`, or were asking then."""
        wait(lambda: min(list(self._open), default=end) >= end, 2 * PATIENCE, "every request ends")
        seen = [each for each in self.since(begin) if begin - PATIENCE < each[0] <= end]
        hows: dict[str, list[float]] = collections.defaultdict(list)
        for asked, ended, how in seen:
            hows[how].append(ended - asked)
        return ", ".join(
            f"{len(times)} x {how} (up to {max(times):.1f} s)"
            for how, times in sorted(hows.items(), key=lambda each: each[0] != "ok")
        )


class Replica:
    """The replica of the lab, looked at from outside."""

    def __init__(self, fleet: Fleet, backend: str) -> None:
        self.fleet = fleet
        self.state: LabState = fleet.state
        self.backend = backend
        self.nodes = [node.name for node in fleet.state.nodes]

    # What is there

    def processes(self, node: str) -> set[Process]:
        """Return the processes of the replica's unit on a node."""
        group = f"{node_power.group(self.state, node)}/machine/payload/system.slice/{UNIT}"
        return {
            (node, pid, began) for pid in cgroup.pids(group) if (began := _began(pid)) is not None
        }

    def all_processes(self) -> set[Process]:
        return set().union(*map(self.processes, self.nodes))

    def others(self) -> list[str]:
        """Return the command lines of vLLM and Ray on the nodes that are not in the unit."""
        found = []
        for node in self.nodes:
            lines = {
                pid: _command(pid)
                for pid in cgroup.pids(f"{node_power.group(self.state, node)}/machine/payload")
            }
            # Asked afterwards: what is in it by then may have begun meanwhile.
            inside = {pid for _, pid, _ in self.processes(node)}
            found += [
                f"{node}: {line}"
                for pid, line in lines.items()
                if pid not in inside and any(name in line for name in PROGRAMS)
            ]
        return found

    def program(self, node: str) -> int:
        """Return the rank's program, the main process of the unit: the one that began first."""
        return min(self.processes(node), key=lambda each: int(each[2]))[1]

    def below(self, node: str, *words: str) -> int:
        """Return the first process of the unit whose command line has one of `words`."""
        ours = sorted(self.processes(node), key=lambda each: int(each[2]))
        for word in words:
            for _, pid, _ in ours:
                if pid != ours[0][1] and word in _command(pid):
                    return pid
        have = [_command(pid) for _, pid, _ in ours]
        raise AssertionError(f"{node}: no process with any of {words} among {have}")

    def document(self, node: str) -> dict[str, Any]:
        """Return what the rank says of itself, or nothing."""
        with contextlib.suppress(OSError, ValueError, StopIteration):
            file = Path(f"/proc/{self._first(node)}/root/run/vllm/{STAGE}/rank.json")
            found: dict[str, Any] = json.loads(file.read_text())
            return found
        return {}

    def incarnation(self) -> str | None:
        """Return the incarnation in which all ranks run, if they do."""
        found = [self.document(node) for node in self.nodes]
        ids = {(each.get("incarnation") or {}).get("id") for each in found}
        running = all(each.get("phase") == "running" for each in found)
        return ids.pop() if running and len(ids) == 1 else None

    def journal(self, node: str, since: float) -> list[tuple[float, str]]:
        """Return the lines of the unit's journal on a node: when, and what."""
        done = subprocess.run(
            [
                *("nsenter", "-t", str(self._first(node)), "-m", "-u", "-i", "-n", "-p"),
                *("journalctl", "-q", "-o", "json", "-u", UNIT, f"--since=@{since:.6f}"),
                "--output-fields=MESSAGE",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        lines = map(json.loads, done.stdout.splitlines())
        return [
            (int(line["__REALTIME_TIMESTAMP"]) / 1e6, line["MESSAGE"])
            for line in lines
            if isinstance(line.get("MESSAGE"), str)
        ]

    def found(self, since: float) -> tuple[float, str] | None:
        """Return when a rank first said that the group is over, and why."""
        sign = "the group has ended: "
        said = [
            (when, text.partition(sign)[2])
            for node in self.nodes
            for when, text in self.journal(node, since)
            if sign in text
        ]
        return min(said, default=None)

    def _first(self, node: str) -> int:
        """Return the node's own first process, which sees all of it."""
        return next(
            iter(cgroup.pids(f"{node_power.group(self.state, node)}/machine/payload/init.scope"))
        )

    # What is done to it

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def unpause(self) -> None:
        """
        Have no fault wait for the one before it.

        Groups that end within ten minutes, one after the other, are started ever later. Twenty
        faults in half an hour are no such row.
        """
        file = f"/run/vllm/{STAGE}/rank.json"
        line = f"ExecStartPre=-/bin/sed -i -E 's/(.short_lives.: )[0-9]+/\\\\10/' {file}"
        for node in self.nodes:
            self.fleet.ssh(
                node,
                f"mkdir -p /etc/systemd/system/{UNIT}.d && cat >/etc/systemd/system/{UNIT}.d/"
                "lab.conf && systemctl daemon-reload",
                stdin=f"[Service]\n{line}\n",
            )


def _began(pid: int) -> str | None:
    """Return when a process began, in ticks since this machine's start; None: it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def wait(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Return what `condition` returns once that is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return found


def killed(name: str, node: str, *words: str, notices: int = 0) -> Fault:
    """SIGKILL for the rank's program, or for the first process below it with one of `words`."""

    def strike(replica: Replica) -> None:
        replica.kill(replica.below(node, *words) if words else replica.program(node))

    return Fault(f"`kill -9` of {name}", strike, notices=notices)


def suffer(replica: Replica, client: Client, fault: Fault) -> Seen:
    """Break it, watch, mend it, watch until it serves again; assert what holds for every fault."""
    before = wait(replica.incarnation, AGAIN, f"before {fault.name}: all ranks run")
    wait(lambda: _serves(client, time.time() - 2), AGAIN, f"before {fault.name}: it serves")
    old = replica.all_processes()
    begin = time.time()
    fault.strike(replica)
    try:
        if fault.lasts:
            _bear(replica, fault, old)
        else:
            wait(lambda: not old & replica.all_processes(), 60, f"{fault.name}: all end")
    finally:
        mended = time.time()
        fault.mend(replica)
    if fault.lasts:
        wait(lambda: _serves(client, time.time() - 2), 60, f"after {fault.name}: it serves")
        assert replica.incarnation() == before
        return Seen(replica.backend, fault, clients=client.summary(begin, mended))

    wait(lambda: _serves(client, mended, first=True), AGAIN, f"{fault.name}: it serves again")
    again = min(ended for asked, ended, how in client.since(mended) if how == "ok")
    now = wait(replica.incarnation, 30, f"{fault.name}: all ranks run")
    assert now != before, f"{fault.name}: the same incarnation"
    assert not replica.others(), f"{fault.name}: orphans {replica.others()}"
    found = replica.found(begin)
    assert found is not None, f"{fault.name}: nobody said that the group is over"
    seen = Seen(
        replica.backend,
        fault,
        clients=client.summary(begin, again),
        found=found[0] - begin,
        why=found[1],
        outlived=mended - begin,
        again=again - mended,
    )
    assert found[0] - begin <= fault.found_within + 1, seen
    assert mended - begin <= fault.ended_within + 1, seen
    return seen


def _bear(replica: Replica, fault: Fault, old: set[Process]) -> None:
    """Assert that nothing ends while the fault lasts."""
    until = time.monotonic() + fault.lasts
    begin = time.time()
    while time.monotonic() < until:
        assert old <= replica.all_processes(), f"{fault.name}: {replica.found(begin)}"
        time.sleep(0.5)


def _serves(client: Client, since: float, *, first: bool = False) -> bool:
    """Say whether what was asked since then was answered: anything, or all of at least three."""
    hows = [how for asked, _, how in client.since(since) if asked >= since]
    return "ok" in hows if first else len(hows) >= 3 and set(hows) == {"ok"}
