"""RUNS ON THE NODE: run rank 0, to which the other ranks connect and which starts the group."""

from __future__ import annotations

import argparse
import binascii
import os
import select
import socket
import time
from typing import Any, Callable

from gpufleet.on_node.rank.children import is_listening
from gpufleet.on_node.rank.life import Rank, peer
from gpufleet.on_node.rank.wire import Link

# The tether's own port is the first of 16; two incarnations in a row share none of the others.
PORTS = 16
MASTER_PORTS = (1, 8)  # first offset, how many
RPC_PORTS = (9, 7)
# Who has not proven to have the key by then is a stranger.
STRANGER_SECONDS = 5.0
STRANGERS = 32
# Said, not refused: nothing here needs clocks in step, but journals that are read side by side do.
CLOCK_SECONDS = 1.0
# A message that needs packets of full size, many times over, in both directions.
LARGE = "x" * (64 << 10)
# On a line that loses 30 % they take longer than a silence, and do arrive.
LARGE_SILENCES = 3


class Head(Rank):
    """The head, which waits for all ranks, compares them, forms the group, and relays its end."""

    def __init__(self, options: argparse.Namespace, programs: list[list[str]], key: bytes) -> None:
        super().__init__(options, programs, key)
        self.listener: socket.socket | None = None
        self.next_bind = 0.0
        self.ranks: dict[int, Link] = {}
        """The link of every accepted rank."""
        self.hello: dict[int, dict[str, Any]] = {}
        self.tested: dict[int, str] = {}
        """State of the test with large messages by rank: there, back, done."""
        self.apart: dict[int, list[int]] = {}
        """The workers that each worker cannot reach."""
        self.draining: set[int] = set()
        """The workers that also serve clients and have not finished."""
        self.formed: set[int] = set()
        self.started: set[int] = set()
        self.refused: dict[int, str] = {}
        self.told = ""
        self.step = "gather"
        self.steps: dict[str, Callable[[], None]] = {
            "gather": self._gather,
            "form": self._form,
            "first": self._first,
            "workers": self._workers,
            "running": lambda: None,
        }

    @property
    def workers(self) -> list[int]:
        """Return the ranks of all workers."""
        return list(range(1, len(self.nodes)))

    # Who is here

    def sockets(self) -> list[Any]:
        return [self.listener] if self.listener else []

    def advance(self, now: float) -> None:
        self._listen(now)
        self._accept()
        for link in list(self.links):
            if not link.known and now - link.opened > STRANGER_SECONDS:
                self.drop(link, "said nothing")
        if self.step == "gather":
            self._give_up_on_large(now)
        before = ""
        while before != self.step and self.ending is None:
            before = self.step
            self.steps[before]()
        self._note_peers()

    def _listen(self, now: float) -> None:
        if self.listener or now < self.next_bind:
            return
        self.next_bind = now + 1
        family = socket.AF_INET6 if ":" in self.me.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.me.address, self.options.port))
            listener.listen(64)
        except OSError as error:
            listener.close()
            self.wait_with(
                "waiting",
                "cannot listen on %s port %d: %s"
                % (self.me.address, self.options.port, error.strerror),
            )
            return
        self.listener = listener

    def _accept(self) -> None:
        addresses = {node.address for node in self.nodes}
        for _ in range(STRANGERS):  # no more at once: a flood must not keep us from the others
            if not self.listener or not select.select([self.listener], [], [], 0)[0]:
                return
            try:
                connected, (address, *_) = self.listener.accept()
            except OSError:
                return
            if address not in addresses:
                connected.close()
                continue
            try:
                link = Link(connected, self.key, head=True, beat=self.beat_seconds)
            except OSError:  # it is gone already
                connected.close()
                continue
            strangers = [each for each in self.links if not each.known]
            if len(strangers) >= STRANGERS:
                self.drop(strangers[0], "said nothing")
            self.links.append(link)

    def take(self, link: Link, message: dict[str, Any]) -> None:
        kind = message["kind"]
        rank = self.rank_of(link)
        if link.refused:
            return
        if kind == "hello" and rank is None:
            self._meet(link, message)
        elif rank is None:
            self.drop(link, "did not identify itself")
        elif kind == "got":
            self.tested[rank] = "back"
        elif kind == "large":
            self.tested[rank] = "done"
        elif kind == "reach":
            self.apart[rank] = [each for each in self.workers if each in message["missing"]]
        elif kind == "formed":
            link.bound = True
            self.formed.add(rank)
        elif kind == "started":
            self.started.add(rank)
        elif kind == "drained":
            self.draining.discard(rank)
            self._drained()
        elif kind == "gone":
            self._hurry(str(message.get("why")))
        elif kind == "leaving":
            self.drain("%s was stopped" % self.rank_name(rank), rank)
        elif kind == "over":
            self.end(str(message.get("why")), rank)

    def rank_of(self, link: Link) -> int | None:
        return next((rank for rank, each in self.ranks.items() if each is link), None)

    def _meet(self, link: Link, hello: dict[str, Any]) -> None:
        rank = hello.get("rank")
        if self.ending is not None:
            self.drop(link, "connected while the group ends")
            return
        if why := self._stranger(link, hello):
            self._refuse(link, why)
            return
        assert isinstance(rank, int)
        if self.step != "gather":
            # It should be part of the group, and its program is a new one.
            new = "its node" if hello.get("boot_id") != self.hello[rank].get("boot_id") else "it"
            self.end("%s: %s was restarted" % (self.rank_name(rank), new), rank)
            return
        if why := "; ".join(self._differences(rank, hello)):
            self.refused[rank] = why
            self._refuse(link, why)
            return
        if rank in self.ranks:
            self.drop(self.ranks[rank], "was replaced by a new connection of the same rank")
        self.refused.pop(rank, None)
        self.ranks[rank] = link
        self.hello[rank] = hello
        self.tested[rank] = "there"
        self.apart.pop(rank, None)
        self.told = ""
        link.send("welcome")  # a small one first: from strangers none of this size is taken
        link.send("large", pad=LARGE)

    def _stranger(self, link: Link, hello: dict[str, Any]) -> str:
        """Return why a peer is no rank of this replica, or ""."""
        rank = hello.get("rank")
        if hello.get("replica") != self.options.replica:
            return "this is %s, not %s" % (self.options.replica, hello.get("replica"))
        if rank not in self.workers:
            return "there is no worker of rank %s" % rank
        if link.address != self.nodes[rank].address:
            return "rank %d is %s, not %s" % (rank, self.nodes[rank].address, link.address)
        return ""

    def _differences(self, rank: int, hello: dict[str, Any]) -> list[str]:
        theirs = hello.get("same")
        theirs = theirs if isinstance(theirs, dict) else {}
        return [
            "%s: %s has %s, %s has %s"
            % (
                name,
                self.me.name,
                self.same.get(name, "none"),
                self.nodes[rank].name,
                theirs.get(name, "none"),
            )
            for name in sorted({*self.same, *theirs})
            if self.same.get(name) != theirs.get(name)
        ]

    def _refuse(self, link: Link, why: str) -> None:
        # The other side closes: if we did, the kernel might throw away our last word.
        self.say("refused %s: %s" % (link.address, why))
        link.refused = True
        link.send("refused", why=why)

    def link_lost(self, link: Link, why: str) -> None:
        rank = self.rank_of(link)
        if rank is None:
            if not link.refused and (link.known or "key" in why):
                self.say("%s %s" % (link.address, why))
            return
        # Either side may be the first to give up; usually the test takes milliseconds.
        late = time.monotonic() - link.opened > self.options.silence_seconds / 2
        if self.tested[rank] != "done" and late:
            why = self.refused[rank] = self._not_large(rank)
        del self.ranks[rank]
        self.say("%s %s" % (self.rank_name(rank), why))
        if self.step != "gather":
            self.end("%s %s" % (self.rank_name(rank), why), rank)

    def _give_up_on_large(self, now: float) -> None:
        for rank, link in list(self.ranks.items()):
            late = now - link.opened > self.options.silence_seconds * LARGE_SILENCES
            if self.tested[rank] != "done" and late:
                self.drop(link, "has not answered a large message")

    def _not_large(self, rank: int) -> str:
        """Return a sentence with the direction in which large messages are lost."""
        ends = [self.me, self.nodes[rank]][:: 1 if self.tested[rank] == "there" else -1]
        return (
            "messages of 64 KiB from %s (%s) to %s (%s) do not arrive, while small ones do: "
            "give all interfaces between them the same MTU" % (*ends[0], *ends[1])
        )

    def _note_peers(self) -> None:
        self.state.document["peers"] = {
            self.nodes[rank].name: self._peer(rank, self.ranks.get(rank)) for rank in self.workers
        }

    def _peer(self, rank: int, link: Link | None) -> dict[str, Any]:
        boot_id = self.hello.get(rank, {}).get("boot_id")
        return {**peer(self.nodes[rank].address, rank, link), "boot_id": boot_id}

    # The steps to a group that runs

    def _gather(self) -> None:
        ready = {
            rank
            for rank, link in self.ranks.items()
            if self.tested[rank] == "done"
            and link.round_trip is not None
            and self.apart.get(rank) == []
        }
        missing = [rank for rank in self.workers if rank not in ready]
        pause = self.state.pause_left()
        if missing:
            named = [rank for rank in missing if not self._waits_too(rank)]
            self.wait_with(
                "waiting", "waits for " + ", ".join(map(self._missing, named or missing))
            )
        elif pause > 0:
            short = self.state.document["short_lives"]
            self.state.set_phase(
                "pausing", "%d short runs in a row: waits %d s more" % (short, pause + 1)
            )
            self.say("%d short runs in a row: waits before the next start" % short)
        elif self.listener:
            self._form_group()
        if self.told != self.state.document["why"]:
            self.told = self.state.document["why"]
            for link in self.ranks.values():
                link.send("waiting", why=self.told)

    def _waits_too(self, rank: int) -> bool:
        """
        Return whether a rank is connected here, and none of the ranks that it cannot reach is.
        """
        apart = self.apart.get(rank) or []
        return rank in self.ranks and bool(apart) and not any(each in self.ranks for each in apart)

    def _missing(self, rank: int) -> str:
        """Return the name of an awaited rank, with the reason for its absence if known."""
        name = self.nodes[rank].name
        if rank in self.refused:
            return "%s (%s)" % (name, self.refused[rank])
        # A rank that is missing here is not reached by the others either.
        apart = [self.nodes[each].name for each in self.apart.get(rank, []) if each in self.ranks]
        if rank in self.ranks and apart:
            port = self.options.port
            return "%s (does not reach %s, UDP port %d)" % (name, " and ".join(apart), port)
        return name

    def _form_group(self) -> None:
        seen = [int(hello.get("counter") or 0) for hello in self.hello.values()]
        last = max([self.state.counter, *seen])
        for counter in range(last + 1, last + 1 + MASTER_PORTS[1]):
            master, rpc = (
                self.options.port + first + counter % count
                for first, count in (MASTER_PORTS, RPC_PORTS)
            )
            if not is_listening(master) and not is_listening(rpc):
                break
        else:
            self.wait_with("waiting", "all ports behind %d are in use" % self.options.port)
            return
        self.incarnation = {
            "id": binascii.hexlify(os.urandom(8)).decode(),
            "counter": counter,
            "master_port": master,
            "rpc_port": rpc,
        }
        if self.mesh:
            self.mesh.pin()
        self.state.begin_incarnation(self.incarnation)
        self.state.set_phase("starting", "forms the group")
        self.say("incarnation %(counter)d, %(id)s, master port %(master_port)d" % self.incarnation)
        for rank, link in self.ranks.items():
            if link.clock_offset is not None and abs(link.clock_offset) > CLOCK_SECONDS:
                self.say(
                    "%s: its clock is off by %+.1f s" % (self.rank_name(rank), link.clock_offset)
                )
            link.incarnation = self.incarnation["id"]
            link.send("form", group=self.incarnation)
        self.step = "form"

    def _form(self) -> None:
        if self.formed == set(self.workers):
            self.step = "first"
            self.start(self.programs[0])

    def _first(self) -> None:
        if not self.ready():
            return
        self.step = "workers"
        self.state.set_phase("starting", "the workers start")
        for link in self.ranks.values():
            link.send("start")

    def _workers(self) -> None:
        if self.started != set(self.workers):
            return
        for program in self.programs[1:]:
            if self.ending is None:
                self.start(program)
        if self.ending is None:
            self.step = "running"
            self.state.set_phase("running")
            self.say("all %d ranks run" % len(self.nodes))

    # The end

    def stop(self) -> None:
        if self.incarnation is None:
            self.status = 0
            return
        self.drain("%s was stopped" % self.rank_name(0), 0)

    def drain(self, why: str, rank: int) -> None:
        """Drain like any rank, and wait for the servers of this and other ranks."""
        if self.ending is not None:
            return
        super().drain(why, rank)
        self.draining = {each for each in self.started if self.hello[each].get("serves")}
        for link in self.ranks.values():
            link.send("draining", why=why, rank=rank)
        server = self._server_pid()
        if server is not None:
            self.children.terminate(server)
        self._drained()

    def program_ended(self, why: str, status: int) -> None:
        if self.ending is None:
            super().program_ended(why, status)
        else:
            self._drained()
            if self._server_pid() is not None:
                self._hurry(why)

    def _hurry(self, why: str) -> None:
        """
        Shorten a drain, because servers have lost a program and their requests may hang.

        The drain ends with a delay, because workers' programs may end a moment before the finished
        server.
        """
        if self.ending is not None and self.ending.step == "drain":
            self.hurry = self.hurry or why
            soon = time.monotonic() + self.options.grace_seconds
            self.ending = self.ending._replace(until=min(self.ending.until, soon))

    def _drained(self) -> None:
        """End the group when no rank serves requests."""
        drains = self.ending is not None and self.ending.step == "drain"
        if drains and self._server_pid() is None and not self.draining:
            self.end("no rank serves any more", 0)

    def _server_pid(self) -> int | None:
        """Return the process id of the last program if it runs, or None."""
        pids = self.children.pids
        server = pids[-1] if len(pids) == len(self.programs) else None
        return server if server in self.children.running else None
