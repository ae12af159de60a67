"""RUNS ON THE NODE, on all nodes of a replica at once: test whether they can reach each other.

Each node listens on its ports and connects to all ports of the other nodes. For each connection, it
uses its own address in the replica's network and the other node's address in it. Each node also
sends datagrams to each other node: small datagrams, and datagrams of full size that may not be
fragmented. Each node records what arrives. So if packets are lost only in one direction, the result
shows this direction.

Takes (`PARAMETERS`):
  token        token of this test; a client without the token gets no answer
  node, address  this node's name and address
  ports        ports on which this node listens for connections
  udp          the port for datagrams; null: no datagrams
  mtu          MTU of the interface that has the address
  peers        {node: {"address", "ports", "udp", "mtu"}} of the other nodes
  seconds      time after which the test ends, even if results are missing
Prints one JSON document:
  schema       1
  unbound      {port: reason} of the ports that could not be opened; the key "udp" is the port for
               datagrams
  connected    {node: {port: null if the connection succeeded, or else the reason}}
  clocks       {node: {"ahead", "within"}}, in seconds: how far the other node's clock is ahead of
               this node's clock, and the error of this value
  heard        {node: {"bytes", "datagrams", "of", "address"}}: the size of the largest packet that
               arrived; the number of small datagrams that arrived; the number of small datagrams
               that were sent, counted from the first to the last that arrived; their source address
  seconds      duration of the test
The test ends as soon as every connection and datagram has arrived on this node and on the others.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import socket
import sys
import time
from functools import partial
from typing import Any, Callable, Dict, List, Set

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

TICK_SECONDS = 0.1
SEND_SECONDS = 0.2
# Interval at which smaller packets are sent too, to nodes that have not confirmed a full-size one.
SIZES_SECONDS = 1.0
RETRY_SECONDS = 0.3
# A connection that has waited this long is reported as without an answer, whatever error it had
# before.
HANGS_SECONDS = 0.5
# In the last second, other nodes that began earlier may have ended. So closed ports on these nodes
# do not show a fault.
LAST_SECONDS = 1.0
# Number of times that the final message is sent, because it may be lost.
FAREWELLS = 5
MESSAGE_BYTES = 4096
# IPv4's header and UDP's (RFC 791, RFC 768), without options.
HEADERS = 28
LARGEST_PACKET = 65535
# Constants of linux/in.h. With PROBE, the kernel sets Don't Fragment, and ignores the MTU of the
# path that it has stored.
IP_MTU_DISCOVER = 10
IP_PMTUDISC_PROBE = 3
# Packet sizes of common networks: tunnels, Ethernet, clouds, InfiniBand, jumbo frames. They show
# how large a packet can be if a full-size packet does not arrive.
SIZES = (576, 1280, 1380, 1400, 1420, 1450, 1460, 1480, 1500, 2044, 4096, 8192, 8896, 8950, 9000)


class Peer:
    """A peer, and the test's results for both directions."""

    def __init__(self, node: str, given: Dict[str, Any], mtu: int) -> None:
        self.node = node
        self.address: str = given["address"]
        self.udp: int | None = given["udp"]
        self.full = min(mtu, given["mtu"], LARGEST_PACKET)
        self.connected: Dict[int, str | None] = dict.fromkeys(given["ports"], "no answer")
        self.clock: Dict[str, float] | None = None
        self.bytes = 0
        self.sent = 0
        """Number of small datagrams that were sent. Both nodes use it to count losses."""
        self.numbers: Set[int] = set()
        """Numbers of the small datagrams that arrived."""
        self.source = ""
        self.told = False
        """Whether the peer has everything that it needs from this node."""
        self.full_arrived = False
        """Whether the peer has received a full-size packet from this node."""

    @property
    def done(self) -> bool:
        """Return whether everything that this node needs from the peer has arrived."""
        connected = not any(self.connected.values())
        return connected and (self.udp is None or self.bytes >= self.full)

    def measure(self, sent: float, theirs: float) -> None:
        """
        Compare the clocks of both nodes.

        A message was sent at `sent`, was answered at `theirs`, and its answer was received now.
        """
        within = max(0.0, time.time() - sent) / 2
        if self.clock is None or within < self.clock["within"]:
            ahead = theirs - sent - within
            self.clock = {"ahead": round(ahead, 4), "within": round(within, 4)}


class Exchange:
    """This node's part of the test between all nodes."""

    def __init__(self, given: Dict[str, Any]) -> None:
        self.given = given
        self.peers = {
            node: Peer(node, each, given["mtu"]) for node, each in sorted(given["peers"].items())
        }
        self.unbound: Dict[str, str] = {}
        self.selector = selectors.DefaultSelector()
        self.began = time.monotonic()
        self.farewells = 0
        self.end = self.began + given["seconds"]
        self.retries: List[Any] = []
        """(time, peer, port) of each connection that will be tried again."""
        self.pending: Dict[Any, float] = {}
        """{(node, port): start time} of the connections in progress."""
        self.datagrams: socket.socket | None = None

    def run(self) -> Dict[str, Any]:
        """Run the test and return its result."""
        self.listen()
        for peer in self.peers.values():
            for port in peer.connected:
                self.connect(peer, port)
        next_send = 0.0
        next_sizes = self.began + SIZES_SECONDS
        while time.monotonic() < self.end and self.farewells < FAREWELLS:
            for key, _ in self.selector.select(TICK_SECONDS):
                with contextlib.suppress(OSError, ValueError):
                    key.data()
            now = time.monotonic()
            self.retry(now)
            if now >= next_send:
                next_send = now + SEND_SECONDS
                self.send(sizes=now >= next_sizes)
                if now >= next_sizes:
                    next_sizes = now + SIZES_SECONDS
                if all(peer.done and peer.told for peer in self.peers.values()):
                    self.farewells += 1
        return self.document()

    def document(self) -> Dict[str, Any]:
        peers = self.peers.values()
        for (node, port), since in self.pending.items():
            if time.monotonic() > since + HANGS_SECONDS:
                self.peers[node].connected[port] = "no answer"
        return {
            "schema": 1,
            "unbound": self.unbound,
            "connected": {each.node: each.connected for each in peers},
            "clocks": {each.node: each.clock for each in peers if each.clock},
            "heard": {
                each.node: {
                    "bytes": each.bytes,
                    "datagrams": len(each.numbers),
                    "of": max(each.numbers) - min(each.numbers) + 1 if each.numbers else 0,
                    "address": each.source,
                }
                for each in peers
                if each.source
            },
            "seconds": round(time.monotonic() - self.began, 2),
        }

    # -- listening

    def listen(self) -> None:
        """Open the ports, and record the errors."""
        address = self.given["address"]
        for port in self.given["ports"]:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(128)
            except OSError as error:
                listener.close()
                self.unbound[str(port)] = str(error.strerror)
                continue
            self.watch(listener, partial(self.accept, listener))
        if self.given["udp"] is None:
            return
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            datagrams.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            # The buffer must have room for the full-size datagrams of eighteen nodes. The default
            # buffer only has room for twenty datagrams of 9000 bytes.
            datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            datagrams.bind((address, self.given["udp"]))
        except OSError as error:
            datagrams.close()
            self.unbound["udp"] = str(error.strerror)
            return
        self.datagrams = datagrams
        self.watch(datagrams, self.receive)

    def watch(self, of: socket.socket, do: Callable[[], None]) -> None:
        self.selector.register(of, selectors.EVENT_READ, do)

    def forget(self, of: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(of)
        of.close()

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection and wait for its message."""
        connection, (source, *_) = listener.accept()
        connection.setblocking(False)
        heard = bytearray()
        self.watch(connection, lambda: self.answer(connection, heard, source))

    def answer(self, connection: socket.socket, heard: bytearray, source: str) -> None:
        """
        Answer a message with the time of this node's clock.

        If the client has sent anything else, close its connection.
        """
        try:
            piece = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        heard += piece
        if piece and b"\n" not in heard and len(heard) < MESSAGE_BYTES:
            return
        message = self.message(bytes(heard))
        if message and message["node"] in self.peers:
            reply = {"token": self.given["token"], "node": self.given["node"]}
            with contextlib.suppress(OSError):
                connection.send(text({**reply, "clock": time.time(), "seen": source}))
        self.forget(connection)

    def message(self, heard: bytes) -> Dict[str, Any] | None:
        """Return a message's content if the message belongs to this test, or None."""
        try:
            message = json.loads(heard.partition(b"\n")[0].decode())
            return message if message["token"] == self.given["token"] else None
        except (ValueError, KeyError, TypeError):
            return None

    # -- connecting

    def connect(self, peer: Peer, port: int) -> None:
        """Start a connection from this node's address to one port of a peer."""
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.pending[peer.node, port] = time.monotonic()
        try:
            connection.bind((self.given["address"], 0))
            code = connection.connect_ex((peer.address, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            self.failed(peer, port, connection, os.strerror(code))
            return
        self.selector.register(
            connection, selectors.EVENT_WRITE, lambda: self.say(peer, port, connection)
        )

    def say(self, peer: Peer, port: int, connection: socket.socket) -> None:
        """Send this node's message once the connection is established."""
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.failed(peer, port, connection, os.strerror(code))
            return
        # The other node's kernel has accepted the connection. Only an answer shows that this
        # program accepted it.
        peer.connected[port] = "no answer"
        sent = time.time()
        connection.send(text({"token": self.given["token"], "node": self.given["node"]}))
        self.selector.modify(
            connection,
            selectors.EVENT_READ,
            lambda: self.hear(peer, port, connection, sent),
        )

    def hear(self, peer: Peer, port: int, connection: socket.socket, sent: float) -> None:
        """Receive a peer's answer, and record the result of the connection and the peer's clock."""
        try:
            heard = connection.recv(MESSAGE_BYTES)
        except OSError as error:
            self.failed(peer, port, connection, str(error.strerror))
            return
        message = self.message(heard)
        if not heard:
            self.failed(peer, port, connection, "it closed the connection")
            return
        if message is None or message["node"] != peer.node:
            self.failed(peer, port, connection, "another program answered")
            return
        if message["seen"] != self.given["address"]:
            self.failed(peer, port, connection, "it was seen as %s" % message["seen"])
            return
        peer.measure(sent, message["clock"])
        peer.connected[port] = None
        self.pending.pop((peer.node, port), None)
        self.forget(connection)

    def failed(self, peer: Peer, port: int, connection: socket.socket, why: str) -> None:
        """Record the error. Try again soon, because the other node may not be ready yet."""
        self.forget(connection)
        now = time.monotonic()
        hung = now > self.pending.pop((peer.node, port), now) + HANGS_SECONDS
        if now < self.end - LAST_SECONDS:
            peer.connected[port] = why
            self.retries.append((now + RETRY_SECONDS, peer, port))
        elif hung:
            peer.connected[port] = "no answer"

    def retry(self, now: float) -> None:
        due = [each for each in self.retries if each[0] <= now]
        self.retries = [each for each in self.retries if each[0] > now]
        for _, peer, port in due:
            self.connect(peer, port)

    # -- datagrams

    def send(self, *, sizes: bool) -> None:
        """
        Send each peer the datagrams that the peer may still need.

        With `sizes`, also send datagrams of smaller sizes.
        """
        for peer in self.peers.values():
            if self.datagrams is None or peer.udp is None:
                continue  # without UDP, neither node learns that the other is done: both stay
            said = {
                "token": self.given["token"],
                "node": self.given["node"],
                "full": peer.bytes >= peer.full,
                "done": peer.done,
            }
            peer.sent += 1
            self.datagram(peer, text({**said, "number": peer.sent}))
            if peer.full_arrived:
                continue
            self.datagram(peer, text(said).ljust(peer.full - HEADERS))
            for size in SIZES:
                if sizes and size < peer.full:
                    self.datagram(peer, text(said).ljust(size - HEADERS))

    def datagram(self, peer: Peer, content: bytes) -> None:
        assert self.datagrams is not None
        with contextlib.suppress(OSError):
            self.datagrams.sendto(content, (peer.address, peer.udp))

    def receive(self) -> None:
        """Record the datagrams that arrived, and their sources."""
        assert self.datagrams is not None
        for _ in range(500):
            try:
                content, (source, *_) = self.datagrams.recvfrom(LARGEST_PACKET + 1)
            except BlockingIOError:
                return
            message = self.message(content)
            peer = self.peers.get(message["node"]) if message else None
            if message is None or peer is None:
                continue
            if "number" in message:
                peer.numbers.add(message["number"])
            peer.source = source
            # From a different address, the datagram took a different path than the replica uses.
            if source == peer.address:
                peer.bytes = max(peer.bytes, len(content) + HEADERS)
            peer.full_arrived = peer.full_arrived or bool(message["full"])
            peer.told = peer.told or bool(message["done"])


def text(message: Dict[str, Any]) -> bytes:
    """Return a message's bytes: a line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def main() -> None:
    """Run the test and print the document."""
    # The test needs two sockets for each port of each peer.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = Exchange(PARAMETERS).run()
    sys.stdout.write(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
