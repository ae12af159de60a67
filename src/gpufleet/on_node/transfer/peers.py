"""RUNS ON THE NODE: exchange pieces of a tree over TCP. A node already serves while it downloads.

    server: <nonce>\\n                  client: <name> <HMAC-SHA256 of nonce and name>\\n
    client: P <number>\\n               server: = <bytes>\\n and the piece, when the server has it
    client: M\\n                        server: the same with the manifest
                                       server: +\\n every second while the client must wait
    client: D <half>\\n                 the client has this half and will request nothing more

A client that does not know the run's token gets no answer. The token itself is never sent.
Transfers are not encrypted. Data are verified by their SHA-256, whatever their source.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import threading
import time
from typing import Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from gpufleet.on_node.transfer.manifest import MOST_BYTES, RefusedError, Tree
from gpufleet.on_node.transfer.store import Files

HALVES = 2
"""
Pieces with even and with odd numbers are distributed along two different trees of nodes, so that no
node sends more than one whole copy.
"""
CONNECT_SECONDS = 5.0
# A sender that has nothing to send reports this every second. If it is silent for much longer, the
# node or the connection is dead.
BEAT_SECONDS = 1.0
SILENT_SECONDS = 8.0
# A source that is alive but has received nothing new for this time is no longer used. Its own
# source may have died. It needs SILENT_SECONDS to find that out and to use a different source.
STALLED_SECONDS = 20.0
# A node gives up if it receives no new piece from any source for this time.
GIVE_UP_SECONDS = 60.0
# Times that a node continues to serve after its last piece. The first is for clients that have not
# connected yet, the second for clients that may connect again.
UNSEEN_SECONDS = 30.0
GONE_SECONDS = 10.0
# The most time between two requests. A client hashes and writes a piece between them, and its disk
# may be busy.
IDLE_SECONDS = 30.0
# Number of pieces that are requested in advance, so that the connection is not idle while a piece
# is hashed and written.
ASKED_AHEAD = 2
LINE_BYTES = 512
CONNECTIONS = 64
# Connections that have not proven yet that they know the token have their own slots. There are few
# slots for each address, and a connection has little time, because a node needs only milliseconds.
# If all slots are taken, the oldest connection is closed.
UNPROVEN = 64
UNPROVEN_OF_ADDRESS = 16
PROOF_SECONDS = 5.0
# Bytes that are sent at a time if the rate is limited. At 100 Mbit/s, 256 KiB take 21 ms.
CHUNK_BYTES = 256 << 10


class LostError(Exception):
    """Raised if a source cannot be used for now. Its text is the reason."""


class Source(NamedTuple):
    """A node that serves pieces."""

    name: str
    host: str
    port: int


class Bucket:
    """A rate limit. A thread that wants to send bytes waits until it may send them."""

    def __init__(self, bits_per_second: float) -> None:
        self._seconds = 8.0 / bits_per_second
        self._lock = threading.Lock()
        self._next = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        with self._lock:
            self._next = max(self._next, time.monotonic()) + count * self._seconds
            wait = self._next - time.monotonic()
        time.sleep(max(0.0, wait))


class HeldPieces:
    """The pieces that this node has. A new piece wakes the threads that wait for this piece."""

    def __init__(self, tree: Tree, manifest: bytes, files: Files, *, whole: bool) -> None:
        self.tree, self.manifest, self.files = tree, manifest, files
        self.changed = threading.Condition()
        self.have: Set[int] = set(range(len(tree.pieces))) if whole else set()
        self.bytes = tree.bytes if whole else 0
        self.failed = ""

    def add(self, number: int) -> None:
        """Record that a piece has arrived."""
        with self.changed:
            if number not in self.have:
                self.have.add(number)
                self.bytes += self.tree.size(number)
            self.changed.notify_all()

    def fail(self, why: str) -> None:
        """Record that no more pieces will arrive."""
        with self.changed:
            self.failed = self.failed or why
            self.changed.notify_all()

    @property
    def is_whole(self) -> bool:
        """Return whether all pieces have arrived."""
        return len(self.have) == len(self.tree.pieces)

    def wait(self, number: int, seconds: float) -> bool:
        """
        Wait at most `seconds` for a piece.

        Return True if the piece has arrived or the download has failed, else False.
        """
        with self.changed:
            return self.changed.wait_for(lambda: number in self.have or self.failed != "", seconds)


class Server:
    """A server that sends this node's pieces to clients that know the token."""

    def __init__(
        self,
        holding: HeldPieces,
        token: str,
        address: str,
        port: int,
        rate_mbit: Optional[float],
    ) -> None:
        """Listen on the port. Raises `OSError` if the port is in use."""
        self.holding = holding
        self.token = token.encode("ascii")
        self.bucket = Bucket(rate_mbit * 1e6) if rate_mbit else None
        self.seen: Set[str] = set()
        self.done: Set[str] = set()
        self.sent = 0
        self.open = 0
        """Number of connections that have proven that they know the token."""
        self._unproven: Dict[socket.socket, str] = {}
        self.quiet_since = time.monotonic()
        self._changed = threading.Condition()
        self._socket = _listening(address, port)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def linger(self, expected: Set[str], end: float) -> None:
        """
        Serve until all expected clients have everything, or until no client is left.

        `expected` has the clients, each with the half that it downloads from this node, for example
        `gpu-02/1`.
        """
        began = time.monotonic()
        with self._changed:
            while not expected <= self.done and time.monotonic() < end:
                now = time.monotonic()
                names = {each.rpartition("/")[0] for each in expected}
                patience = GONE_SECONDS if names <= self.seen else UNSEEN_SECONDS
                if not self.open and now - max(began, self.quiet_since) > patience:
                    return
                self._changed.wait(0.2)

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, address = self._socket.accept()
            except OSError:
                return
            if not self._admit(connected, address[0]):
                connected.close()
                continue
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _admit(self, connected: socket.socket, address: str) -> bool:
        """
        Reserve a slot for a connection that has not proven the token yet.

        Return False if its address has too many such connections.
        """
        with self._changed:
            if list(self._unproven.values()).count(address) >= UNPROVEN_OF_ADDRESS:
                return False
            if len(self._unproven) >= UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._unproven[connected] = address
        return True

    def _count(self, change: int) -> None:
        with self._changed:
            self.open += change
            self.quiet_since = time.monotonic()
            self._changed.notify_all()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with contextlib.closing(Lines(connected)) as lines:
                try:
                    name = self._known(lines)
                finally:
                    with self._changed:
                        self._unproven.pop(connected, None)
                if self.open < CONNECTIONS:
                    self._count(1)
                    try:
                        self._answer(lines, name)
                    finally:
                        self._count(-1)
        except (OSError, LostError, RefusedError, ValueError):
            pass  # the client connects again, or uses a different source

    def _known(self, lines: Lines) -> str:
        """Return the client's name after the client has proven that it knows the token."""
        nonce = os.urandom(16).hex().encode("ascii")
        lines.write(nonce + b"\n")
        name, _, shown = lines.read(time.monotonic() + PROOF_SECONDS).partition(b" ")
        if not hmac.compare_digest(proof(self.token, nonce, name), shown):
            raise LostError("a stranger")
        return name.decode("ascii")

    def _answer(self, lines: Lines, name: str) -> None:
        """Serve a peer's requests until it closes the connection."""
        with self._changed:
            self.seen.add(name)
        lines.socket.settimeout(IDLE_SECONDS)
        while True:
            verb, _, word = lines.read().partition(b" ")
            if verb == b"D":
                with self._changed:
                    self.done.add("%s/%s" % (name, word.decode("ascii")))
                    self._changed.notify_all()
            elif verb == b"M":
                self._send(lines, self.holding.manifest)
            elif verb == b"P" and word.isdigit():
                self._piece(lines, int(word))
            else:
                return

    def _piece(self, lines: Lines, number: int) -> None:
        if number >= len(self.holding.tree.pieces):
            raise LostError("this piece does not exist")
        while not self.holding.wait(number, BEAT_SECONDS):
            lines.write(b"+\n")
        if number not in self.holding.have:
            raise LostError(self.holding.failed)
        lines.write(b"= %d\n" % self.holding.tree.size(number))
        for part in self.holding.tree.parts(number):
            descriptor = self.holding.files.open(part.path)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                for offset, count in _chunks(part.offset, part.length, self.bucket is not None):
                    if self.bucket:
                        self.bucket.take(count)
                    if lines.socket.sendfile(file, offset, count) != count:
                        raise LostError("%s became shorter" % part.path)
                    self.sent += count

    def _send(self, lines: Lines, data: bytes) -> None:
        lines.write(b"= %d\n" % len(data))
        for at, count in _chunks(0, len(data), self.bucket is not None):
            if self.bucket:
                self.bucket.take(count)
            lines.write(data[at : at + count])


class Lines:
    """A connection from which lines and given numbers of bytes are read."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(SILENT_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._left = b""

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def write(self, data: bytes) -> None:
        """Send all bytes."""
        self.socket.sendall(data)

    def read(self, end: Optional[float] = None) -> bytes:
        """
        Return the next line without its line end. Raises `LostError` if the connection has ended.

        The whole line must arrive before `end` (in the time of `time.monotonic`), even if the
        sender is slow.
        """
        while b"\n" not in self._left:
            if end is not None:
                self.socket.settimeout(max(0.001, end - time.monotonic()))
            more = self.socket.recv(1 << 16) if len(self._left) <= LINE_BYTES else b""
            if not more:
                raise LostError("the connection ended")
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return line

    def fill(self, into: memoryview) -> None:
        """
        Fill `into` with bytes. Raises `LostError` if the connection ends before that.
        """
        count = min(len(self._left), len(into))
        into[:count] = self._left[:count]
        self._left = self._left[count:]
        while count < len(into):
            more = self.socket.recv_into(into[count:])
            if not more:
                raise LostError("the connection ended")
            count += more


def proof(token: bytes, nonce: bytes, name: bytes) -> bytes:
    """Return the proof that a peer with this name knows the token."""
    said = b"gpufleet pieces 1\n" + nonce + b"\n" + name
    return hmac.new(token, said, hashlib.sha256).hexdigest().encode("ascii")


@contextlib.contextmanager
def connected(
    source: Source, name: str, token: str, seconds: float = SILENT_SECONDS
) -> Iterator[Lines]:
    """
    Yield an authenticated connection to a source. It ends if the source is silent for `seconds`.

    Raises `OSError` or `LostError` if the source cannot be used.
    """
    joined = socket.create_connection((source.host, source.port), min(seconds, CONNECT_SECONDS))
    with contextlib.closing(Lines(joined)) as lines:
        joined.settimeout(seconds)
        nonce = lines.read()
        own = name.encode("ascii")
        lines.write(own + b" " + proof(token.encode("ascii"), nonce, own) + b"\n")
        yield lines


def manifest(source: Source, name: str, token: str) -> bytes:
    """
    Return the packed manifest of a source. Raises `OSError` or `LostError` if this fails.
    """
    with connected(source, name, token) as lines:
        lines.write(b"M\n")
        found = bytearray(_length(lines.read(), MOST_BYTES))
        lines.fill(memoryview(found))
        return bytes(found)


def download_pieces(
    lines: Lines,
    tree: Tree,
    numbers: List[int],
    take: Callable[[int, memoryview], None],
    have: Callable[[int], bool],
) -> None:
    """
    Download pieces over one connection in this order. Pass on each piece after verifying its hash.

    Raises `OSError` or `LostError` if the source can no longer be used.
    """
    waiting: Deque[int] = collections.deque()
    coming = collections.deque(numbers)
    buffer = bytearray(tree.piece)
    heard = time.monotonic()
    while coming or waiting:
        while coming and len(waiting) < ASKED_AHEAD:
            number = coming.popleft()
            if not have(number):
                waiting.append(number)
                lines.write(b"P %d\n" % number)
        if not waiting:
            return
        line = lines.read()
        if line == b"+":
            if time.monotonic() - heard > STALLED_SECONDS:
                raise LostError("it has received nothing new for %.0f s" % STALLED_SECONDS)
            continue
        number = waiting.popleft()
        if _length(line, tree.piece) != tree.size(number):
            raise LostError("it sent piece %d with a wrong size" % number)
        data = memoryview(buffer)[: tree.size(number)]
        lines.fill(data)
        if hashlib.sha256(data).hexdigest() != tree.pieces[number]:
            raise LostError("piece %d differs from the manifest" % number)
        take(number, data)
        heard = time.monotonic()


def _length(line: bytes, most: int) -> int:
    sign, _, word = line.partition(b" ")
    if sign != b"=" or not word.isdigit() or len(word) > 12 or int(word) > most:
        raise LostError("it does not report the size of its data")
    return int(word)


def _chunks(offset: int, count: int, small: bool) -> Iterator[Tuple[int, int]]:
    size = CHUNK_BYTES if small else count
    for at in range(offset, offset + count, max(1, size)):
        yield at, min(size, offset + count - at)


def _listening(address: str, port: int) -> socket.socket:
    """
    Listen on an address, or on all addresses if it is a name or not an address of this machine.
    """
    try:
        number = ipaddress.ip_address(address)  # this machine may know its name as 127.0.1.1
        family = socket.AF_INET6 if number.version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=CONNECTIONS)
    except ValueError:
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", port), backlog=CONNECTIONS)
