"""RUNS ON THE NODE: run a worker, any rank but the first, which obeys the head's messages."""

from __future__ import annotations

import argparse
import errno
import os
import select
import socket
import time
from typing import Any

from gpufleet.on_node.rank.life import Rank, peer
from gpufleet.on_node.rank.wire import Link, LostError

CONNECT_SECONDS = 3.0
AGAIN_SECONDS = 0.5
# A refused rank may be welcome once the other side has been deployed too.
REFUSED_SECONDS = 5.0
# The head reports dead workers. Only if one still answers the head are it and we cut apart.
APART_SECONDS = 2.0


class Worker(Rank):
    """A worker, which reconnects to the head without a time limit until a group is formed."""

    def __init__(self, options: argparse.Namespace, programs: list[list[str]], key: bytes) -> None:
        super().__init__(options, programs, key)
        self.connecting_until = 0.0
        self.next_connect = 0.0
        self.draining = False
        """Whether the head drains, so that this rank's programs are expected to end."""
        self.starting = False
        """Whether this rank's programs were started without a report to the head."""
        self.told: list[int] | None = None
        """The last report to the head of workers that this worker cannot reach."""

    @property
    def link(self) -> Link | None:
        """Return the link to the head, or None."""
        return self.links[0] if self.links else None

    def rank_of(self, link: Link) -> int | None:
        return 0 if link in self.links else None

    def _silent(self, now: float, seconds: float) -> list[int]:
        """Return the other workers that have not answered for `seconds`."""
        answered = self.mesh.answered if self.mesh else {}
        return [
            rank
            for rank in range(1, len(self.nodes))
            if rank != self.rank and now - answered.get(rank, float("-inf")) > seconds
        ]

    def _look_around(self, link: Link, now: float) -> None:
        """Report unreachable peers to the head; once the group has formed, end it."""
        silence = self.options.silence_seconds
        if self.incarnation is None:
            missing = self._silent(now, silence)
            early = bool(missing) and now - link.opened < silence / 2
            if link.known and missing != self.told and not early:
                self.told = missing
                link.send("reach", missing=missing)
        elif apart := self._silent(now, silence + APART_SECONDS):
            both = (self.rank_name(self.rank), self.rank_name(apart[0]))
            self.end("%s and %s do not reach each other" % both, self.rank)

    def advance(self, now: float) -> None:
        link = self.link
        if link is None:
            self._connect(now)
        elif not link.known and now - link.opened > self.options.silence_seconds:
            self.drop(link, "says nothing")
        else:
            self._look_around(link, now)
            self._started(link)
        self.state.document["peers"] = {
            self.nodes[0].name: peer(self.nodes[0].address, 0, self.link)
        }

    def _connect(self, now: float) -> None:
        if self.connecting is None:
            if now < self.next_connect:
                return
            self.next_connect = now + AGAIN_SECONDS
            self._dial(now)
        elif select.select([], [self.connecting], [], 0)[1]:
            connecting, self.connecting = self.connecting, None
            problem = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                connecting.close()
                self._not_reached(os.strerror(problem))
            else:
                self._greet(connecting)
        elif now > self.connecting_until:
            self.connecting.close()
            self.connecting = None
            self._not_reached("no answer within %g s" % CONNECT_SECONDS)

    def _dial(self, now: float) -> None:
        head = self.nodes[0]
        family = socket.AF_INET6 if ":" in head.address else socket.AF_INET
        dialled = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # From the address by which the others know us, whatever the routes say.
            dialled.bind((self.me.address, 0))
            problem = dialled.connect_ex((head.address, self.options.port))
        except OSError as error:
            dialled.close()
            self._not_reached("from %s: %s" % (self.me.address, error.strerror))
            return
        if problem not in (0, errno.EINPROGRESS):
            dialled.close()
            self._not_reached(os.strerror(problem))
            return
        self.connecting, self.connecting_until = dialled, now + CONNECT_SECONDS

    def _not_reached(self, why: str) -> None:
        head = self.nodes[0]
        # What the head refused us for stays the reason until it says something else.
        if self.state.document["phase"] != "refused":
            self.wait_with(
                "waiting",
                "waits for %s (%s port %d): %s" % (head.name, head.address, self.options.port, why),
            )

    def _greet(self, connected: socket.socket) -> None:
        try:
            link = Link(connected, self.key, head=False, beat=self.beat_seconds)
        except OSError as error:  # it is gone already
            connected.close()
            self._not_reached(str(error.strerror))
            return
        self.links.append(link)
        self.told = None
        link.send(
            "hello",
            replica=self.options.replica,
            rank=self.rank,
            same=self.same,
            counter=self.state.counter,
            serves=self.options.serves,
            boot_id=boot_id(),
        )

    def take(self, link: Link, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "large":
            link.send("got")
            link.send("large", pad=message.get("pad"))
        elif kind == "waiting" and self.incarnation is None:
            self.state.set_phase("waiting", str(message.get("why")))
            self.say("%s has accepted us" % self.nodes[0].name)
        elif kind == "refused":
            self.wait_with("refused", str(message.get("why")))
            self.next_connect = time.monotonic() + REFUSED_SECONDS
            self.links.remove(link)
            link.close()
        elif kind == "form":
            self._form(link, message["group"])
        elif kind == "start":
            self._start()
        elif kind == "draining":
            self.draining = True
            self.state.set_phase("draining", str(message.get("why")))
            if self.options.serves and self.children.pids:
                self.children.terminate(self.children.pids[-1])
        elif kind == "over":
            self.end(
                str(message.get("why")),
                int(message.get("rank") or 0),
                stopped=bool(message.get("stopped")),
                status=0 if message.get("stopped") else 1,
            )

    def _form(self, link: Link, group: dict[str, Any]) -> None:
        if group["counter"] <= self.state.counter:
            raise LostError(
                "offers incarnation %d after %d" % (group["counter"], self.state.counter)
            )
        self.incarnation = {
            name: group[name] for name in ("id", "counter", "master_port", "rpc_port")
        }
        link.incarnation, link.bound = group["id"], True
        if self.mesh:
            self.mesh.pin()
        self.state.begin_incarnation(self.incarnation)
        self.state.set_phase("starting", "%s has to start first" % self.nodes[0].name)
        self.say("incarnation %(counter)d, %(id)s, master port %(master_port)d" % self.incarnation)
        link.send("formed")

    def _start(self) -> None:
        for program in self.programs:
            if self.ending is None:
                self.start(program)
        self.starting = True

    def _started(self, link: Link) -> None:
        """
        Report to the head that this rank's programs are ready, so that it starts further programs.
        """
        if self.starting and self.ending is None and self.ready():
            self.starting = False
            link.send("started")
            self.state.set_phase("running")

    def link_lost(self, link: Link, why: str) -> None:
        if not link.known and "closed" in why:
            why += ", before it said anything: do both have the same cluster key?"
        if self.incarnation is not None:
            self.end("%s %s" % (self.rank_name(0), why), 0)
        else:
            self._not_reached(why)

    # The end

    def stop(self) -> None:
        if self.incarnation is None:
            self.status = 0
            return
        self.drain("%s was stopped" % self.rank_name(self.rank), self.rank)
        if self.link:
            self.link.send("leaving")

    def program_ended(self, why: str, status: int) -> None:
        if self.draining or self.ending is not None:
            self.say(why)
            if not self.link:
                return
            if not self.options.serves:
                self.link.send("gone", why=why)
            elif self.children.pids[-1] not in self.children.running:
                self.link.send("drained")
        else:
            super().program_ended(why, status)


def boot_id() -> str | None:
    """Return the id of the node's current boot, or None."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None
