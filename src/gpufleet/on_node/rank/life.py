"""RUNS ON THE NODE: the common part of head and worker: loop, programs, shutdown.

An end has up to three steps, each with a time limit:
  drain   only after a requested stop: the head's server may finish its requests
  SIGTERM to the programs themselves, for `--grace-seconds`
  SIGKILL to all descendants, for KILL_SECONDS; then this process exits, and systemd kills the rest
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import signal
import socket
import time
from typing import Any, NamedTuple

from gpufleet.on_node.rank.children import (
    Children,
    descendants,
    describe_exit,
    environment,
    fill_ports,
    is_listening,
)
from gpufleet.on_node.rank.mesh import NEVER, Mesh
from gpufleet.on_node.rank.state import State
from gpufleet.on_node.rank.wire import Link, LostError

TICK_SECONDS = 0.2
KILL_SECONDS = 1.0
PART_SECONDS = 0.5
# How many silences a connection may pass nothing, while datagrams show that the peer lives.
STUCK = 6
# A sentence that is still true is said again after this long.
REPEAT_SECONDS = 60.0
# What systemd does not restart after (RestartPreventExitStatus=2 of the unit): wrong arguments.
WRONG = 2
# Why a program cannot be started that could not be started later either. Not among them: no memory,
# too many processes, a stale file of a network.
FOR_GOOD = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.E2BIG)
# Between two looks for the port of what was started.
LOOK_SECONDS = 0.5
STDERR = 2
# What a pipe or socket takes without waiting if it takes anything (PIPE_BUF).
LINE_BYTES = 4096


class Node(NamedTuple):
    """A rank's node."""

    name: str
    address: str


class Ending(NamedTuple):
    """The reason for the end of the group, and the progress of the end."""

    why: str
    rank: int
    stopped: bool
    """Whether the end was requested."""
    status: int
    step: str
    """Current step: drain, terminate or kill."""
    until: float


class Rank:
    """A rank's program. `options` are those of `rank.arguments()`."""

    def __init__(self, options: argparse.Namespace, programs: list[list[str]], key: bytes) -> None:
        self.options = options
        self.programs = programs
        self.key = key
        self.nodes: list[Node] = options.node
        self.rank: int = options.rank
        self.me = self.nodes[self.rank]
        self.beat_seconds = options.silence_seconds / 10
        self.same: dict[str, str] = {
            **dict(options.same),
            "the nodes of the replica": ", ".join("%s=%s" % node for node in self.nodes),
            "silence": "%g s" % options.silence_seconds,
        }
        """Values that must be equal on all ranks."""
        self.state = State(options.state, options.replica, self.rank, self.me.name)
        self.children = Children()
        self.links: list[Link] = []
        self.ending: Ending | None = None
        self.hurry = ""
        """Reason for shortening the drain, or ""."""
        self.status: int | None = None
        self.incarnation: dict[str, Any] | None = None
        self.connecting: socket.socket | None = None
        """The socket of a connection before it becomes a link."""
        self.mesh: Mesh | None = None
        self._next_bind = 0.0
        self._asked_to_stop = False
        self._said: dict[str, float] = {}
        self._wake, self._woken = socket.socketpair()
        self._next_notice = 0.0
        self._next_look = 0.0
        self._start_until = 0.0

    # What heads and workers do differently

    def sockets(self) -> list[Any]:
        """Return sockets to wait for, in addition to the links."""
        return []

    def advance(self, now: float) -> None:
        """Take the next step."""
        raise NotImplementedError

    def rank_of(self, link: Link) -> int | None:
        """Return the link's rank, or None if it is not yet known."""
        raise NotImplementedError

    def take(self, link: Link, message: dict[str, Any]) -> None:
        """Handle a peer's message."""
        raise NotImplementedError

    def link_lost(self, link: Link, why: str) -> None:
        """Handle the loss of a link, which is already closed."""
        raise NotImplementedError

    def stop(self) -> None:
        """Handle SIGTERM."""
        raise NotImplementedError

    def program_ended(self, why: str, status: int) -> None:
        """Handle the unexpected end of one of the programs."""
        self.end(why, self.rank, status=WRONG if status == WRONG else 1)

    # The loop

    def run(self) -> int:
        """Run until the group has ended, and return the exit status."""
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)
        for number in (signal.SIGCHLD, signal.SIGHUP):
            # The first wakes the loop. Not SIG_IGN, which programs that we start would inherit.
            signal.signal(number, lambda *_: None)
        while self.status is None:
            self._turn()
        self.state.set_phase("ended", self.state.document["why"])
        self.state.write(float("inf"))
        self._part()
        return self.status

    def _part(self) -> None:
        """Shut down the links so that their last messages arrive; closing at once may drop them."""
        for link in self.links:
            link.finish_sending()
        until = time.monotonic() + PART_SECONDS
        while self.links and time.monotonic() < until:
            for link in select.select(self.links, [], [], 0.05)[0]:
                try:
                    list(link.receive())
                except LostError:
                    self.links.remove(link)

    def _turn(self) -> None:
        self._wait()
        # What has arrived counts before what has not: a busy node is no silent peer.
        for link in list(self.links):
            self._receive(link)
        now = time.monotonic()
        self._keep_mesh(now)
        for name, status in self.children.ended():
            why = "%s: %s ended %s" % (self.rank_name(self.rank), name, describe_exit(status))
            if self.ending is None or self.ending.step == "drain":
                self.program_ended(why, status)
        if self._asked_to_stop and self.ending is None:
            self.stop()
        if self.ending is None:
            self.advance(now)
        if self.ending is not None and self.status is None:
            self._end_on(now)
        self._judge(now)
        for link in list(self.links):
            self._attempt(link, lambda link=link: (link.pulse(now), link.flush()))
        self.state.write(now)
        if self.state.problem:
            self.say(self.state.problem)
        self._notify(now)

    def _wait(self) -> None:
        reading = [self._woken, *self.sockets(), *self.links]
        writing: list[Any] = [link for link in self.links if link.unsent]
        if self.connecting:
            writing.append(self.connecting)
        wait = TICK_SECONDS
        if self.mesh and (self.ending is None or self.ending.step == "drain"):
            wait = min(wait, max(0.0, self.mesh.due - time.monotonic()))
        select.select(reading, writing, [], wait)
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(64):
                pass

    def _receive(self, link: Link) -> None:
        def receive() -> None:
            for message in link.receive():
                self.take(link, message)

        self._attempt(link, receive)

    def _keep_mesh(self, now: float) -> None:
        if self.ending is not None and self.ending.step != "drain":
            return
        if self.mesh:
            self.mesh.pulse(now)
        elif len(self.nodes) > 1 and now >= self._next_bind:
            self._next_bind = now + 1
            nodes = enumerate(self.nodes)
            try:
                self.mesh = Mesh(
                    self.rank,
                    self.me.address,
                    self.options.port,
                    {rank: node.address for rank, node in nodes if rank != self.rank},
                    key=self.key + self.options.replica.encode(),
                    silence=self.options.silence_seconds,
                )
            except OSError as error:
                self.say(
                    "cannot use %s UDP port %d: %s"
                    % (self.me.address, self.options.port, error.strerror)
                )

    def _judge(self, now: float) -> None:
        silence = self.options.silence_seconds
        for link in list(self.links):
            if not link.known:
                continue
            rank = self.rank_of(link)
            by_mesh = NEVER
            if self.mesh and rank is not None:
                by_mesh = self.mesh.answered.get(rank, NEVER)
            if now - max(link.answered, by_mesh) > silence:
                never = ", and never by UDP port %d: is that open?" % self.options.port
                why = "has not answered for %g s" % silence
                self.drop(link, why + (never if by_mesh == NEVER else ""))
            elif now - link.answered > silence * STUCK:
                self.drop(link, "answers datagrams, but no message for %g s" % (silence * STUCK))

    def _attempt(self, link: Link, act: Any) -> None:
        try:
            act()
        except LostError as error:
            self.drop(link, str(error))

    def drop(self, link: Link, why: str) -> None:
        """Close a current link, and handle its loss."""
        if link in self.links:
            self.links.remove(link)
            link.close()
            self.link_lost(link, why)

    def _asked(self, *_: Any) -> None:
        self._asked_to_stop = True

    # Programs

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of the programs' placeholders."""
        group = self.incarnation or {}
        ports = {name: group.get(name) for name in ("master_port", "rpc_port")}
        return {"incarnation": group.get("id"), **ports}

    def start(self, program: list[str]) -> None:
        """Start one of the programs; an error ends the group."""
        argv = [fill_ports(word, self.values) for word in program]
        try:
            pid = self.children.start(argv, environment(self.values))
        except OSError as error:
            why = "%s: cannot start %s: %s" % (self.rank_name(self.rank), argv[0], error.strerror)
            self.end(why, self.rank, status=WRONG if error.errno in FOR_GOOD else 1)
            return
        self.say("started %s, process %d" % (argv[0], pid))
        self._start_until = time.monotonic() + self.options.start_seconds

    def ready(self) -> bool:
        """
        Return whether the started program listens on `--ready-port`; end the group on a timeout.
        """
        now = time.monotonic()
        if not self.options.ready_port:
            return True
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        port = int(fill_ports(self.options.ready_port, self.values))
        if is_listening(port):
            return True
        self.state.set_phase("starting", "%s is to listen on port %d" % (self.me.name, port))
        if now > self._start_until:
            limits = (self.rank_name(self.rank), port, self.options.start_seconds)
            self.end("%s: no program listened on port %d within %g s" % limits, self.rank)
        return False

    # The end

    def end(self, why: str, rank: int, *, stopped: bool = False, status: int = 1) -> None:
        """Begin the end, or shorten a drain; the first reason is kept."""
        if self.ending is not None and self.ending.step != "drain":
            return
        if self.ending is None:
            self.say("the group has ended: " + why)
        else:
            self.say("no more draining: " + why)
            why, rank, stopped = self.ending.why, self.ending.rank, self.ending.stopped
            status = self.ending.status
        now = time.monotonic()
        until = now + (self.options.grace_seconds if self.children.running else 0)
        self.ending = Ending(why, rank, stopped, status, "terminate", until)
        self.state.set_phase("ending", why)
        for link in list(self.links):
            if link.known:
                self._attempt(
                    link,
                    lambda link=link: link.send("over", why=why, rank=rank, stopped=stopped),
                )
            # Should the word be lost, our silence tells.
            link.muted = True
        self.children.terminate()

    def drain(self, why: str, rank: int) -> None:
        """Begin to end after a requested stop; serving ranks may finish their requests first."""
        if self.ending is not None:
            return
        self.say("stops: " + why)
        until = time.monotonic() + self.options.drain_seconds
        self.ending = Ending(why, rank, True, 0, "drain", until)
        self.state.set_phase("draining", why)

    def _end_on(self, now: float) -> None:
        ending = self.ending
        assert ending is not None
        if ending.step == "drain":
            if now >= ending.until:
                limit = "it took longer than %g s" % self.options.drain_seconds
                self.end(self.hurry or limit, self.rank)
            return
        left = descendants()
        if left and now < ending.until:
            if ending.step == "kill":  # what was being started while the others were killed
                self.children.kill()
            return
        if left and ending.step == "terminate":
            self.children.kill()
            self.ending = ending._replace(step="kill", until=now + KILL_SECONDS)
            return
        if left:
            self.say("left to systemd: processes %s" % ", ".join(map(str, sorted(left))))
        node = self.nodes[ending.rank].name
        self.state.end(ending.why, ending.rank, node, stopped=ending.stopped)
        self.status = ending.status

    # Words

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for messages: `rank 1 on gpu-02`."""
        return "rank %d on %s" % (rank, self.nodes[rank].name)

    def say(self, text: str) -> None:
        """Log a line, at most once a minute for the same text."""
        now = time.monotonic()
        if now - self._said.get(text, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        if len(self._said) > 1000:
            self._said.clear()
        line = "%s of %s: %s" % (self.rank_name(self.rank), self.options.replica, text)
        with contextlib.suppress(OSError):
            # A journal that takes nothing, on a stalled disk say, must not keep us from our end.
            if not select.select([], [STDERR], [], 0)[1]:
                return
            os.write(STDERR, line.encode(errors="replace")[: LINE_BYTES - 1] + b"\n")
        self._said[text] = now

    def wait_with(self, phase: str, why: str) -> None:
        """Record the phase and its reason, and log the reason."""
        self.state.set_phase(phase, why)
        self.say(why)

    def _notify(self, now: float) -> None:
        """Notify systemd's watchdog and send the phase, if the unit has a notify socket."""
        path = os.environ.get("NOTIFY_SOCKET")
        if not path or now < self._next_notice:
            return
        self._next_notice = now + 1
        document = self.state.document
        text = "WATCHDOG=1\nSTATUS=%s %s" % (document["phase"], document["why"])
        notice = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with notice, contextlib.suppress(OSError):
            notice.sendto(text.encode(), "\0" + path[1:] if path[0] == "@" else path)


def peer(address: str, rank: int, link: Link | None) -> dict[str, Any]:
    """Return a peer's entry in the state file."""
    round_trip = link.round_trip if link else None
    offset = link.clock_offset if link else None
    return {
        "rank": rank,
        "address": address,
        "connected": link is not None,
        "round_trip_ms": None if round_trip is None else round(round_trip * 1000, 3),
        "clock_offset_ms": None if offset is None else round(offset * 1000, 3),
    }
