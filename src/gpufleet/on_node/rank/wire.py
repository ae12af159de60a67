"""RUNS ON THE NODE: an authenticated connection with heartbeats between two ranks.

* Unauthorised peers are rejected: every frame carries an HMAC-SHA256 with a key for this
  connection, derived from the replica's key and both sides' nonces. A frame of another connection,
  of the other direction, or out of order does not fit.
* Alive means answered: each side sends heartbeats and records the send time of the newest answered
  one. So either side notices a cut of either direction.
* Nothing here blocks: bytes are read and written as far as the kernel allows.

A frame is its length (4 bytes), the HMAC (32) and a JSON object with `kind`. Once a group has
formed, every frame contains its incarnation, and a frame of another incarnation ends the
connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any, Dict, Iterator

# Raised when frames change their meaning: ranks of two protocols refuse each other at the door.
MAGIC = b"gpufleet rank 1\n"
NONCE_BYTES = 32
LENGTH = struct.Struct(">I")
COUNTER = struct.Struct(">Q")
MAC_BYTES = 32
FRAME_BYTES = 1 << 20
# Before the first frame has proven that the peer has the key.
STRANGER_BYTES = 8 << 10
# A peer that takes nothing is silent long before; this only keeps its memory from growing.
UNSENT_BYTES = 4 << 20
# linux/tcp.h. Without it a lost beat is repeated after 0.2, 0.4, 0.8 ... 6.4 s; with it, thin
# streams such as ours repeat at a steady pace, and bad lines are told from dead ones.
TCP_THIN_LINEAR_TIMEOUTS = 16

Message = Dict[str, Any]  # {"kind": str, ...}


class LostError(Exception):
    """The connection is lost; the text is the reason, which follows the peer's name."""


class Link:
    """
    One side of a connection, over a connected socket.

    `beat` is the interval of heartbeats in seconds.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, head: bool, beat: float) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.address = connected.getpeername()[0]
        self.opened = time.monotonic()
        self.answered = self.opened
        """Send time of the newest answered beat; before the first answer, the link's opening."""
        self.round_trip: float | None = None
        """Shortest round trip of a beat so far, in seconds."""
        self.clock_offset: float | None = None
        """Seconds that the peer's clock is ahead of this node's, by the beat of `round_trip`."""
        self.known = False
        """Whether the peer has proven that it has the key."""
        self.incarnation: str | None = None
        self.refused = False
        """Whether this side has refused the peer, whose further messages are ignored."""
        self.bound = False
        """Whether the peer's frames must contain this side's incarnation."""
        self.muted = False
        """Whether beats and answers are stopped, so that the peer regards this side as gone."""
        self._key = key
        self._head = head
        self._beat_seconds = beat
        self._nonce = os.urandom(NONCE_BYTES)
        self._keys: tuple[bytes, bytes] | None = None
        self._counters = [0, 0]  # sent, received
        self._received = bytearray()
        self._unsent = bytearray()
        self._beats: dict[int, tuple[float, float]] = {}
        self._beat = 0
        self._next_beat = self.opened
        self._waiting: list[Message] = []
        for option, value in ((socket.TCP_NODELAY, 1), (TCP_THIN_LINEAR_TIMEOUTS, 1)):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        if not head:
            self._unsent += MAGIC + self._nonce

    def fileno(self) -> int:
        """Return the socket's descriptor for `select`."""
        return self.socket.fileno()

    @property
    def unsent(self) -> bool:
        """Return whether data waits for the kernel to accept it."""
        return bool(self._unsent)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message, or queue it until the keys exist."""
        message = {"kind": kind, "incarnation": self.incarnation, **content}
        if self._keys is None:
            self._waiting.append(message)
            return
        body = json.dumps(message, separators=(",", ":")).encode()
        mac = self._mac(0, body)
        self._unsent += LENGTH.pack(len(body)) + mac + body
        if len(self._unsent) > UNSENT_BYTES:
            raise LostError("takes no messages")

    def flush(self) -> None:
        """Write as much as the kernel accepts. Raises `LostError`."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(bytes(self._unsent[: 1 << 18]))]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise LostError("cannot be reached: %s" % error.strerror) from None

    def receive(self) -> Iterator[Message]:
        """
        Yield the messages that have arrived, without beats and their answers.

        Each message is yielded before the next is checked, because it may change that check. Raises
        `LostError` for invalid frames, and after the last message if the connection has ended.
        """
        ended = None
        try:
            while len(self._received) <= FRAME_BYTES:
                arrived = self.socket.recv(1 << 16)
                if not arrived:
                    ended = LostError("closed the connection")
                    break
                self._received += arrived
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            ended = LostError("closed the connection: %s" % error.strerror)
        yield from self._taken()
        if ended:
            raise ended

    def pulse(self, now: float) -> None:
        """Send a heartbeat if one is due."""
        if self._keys is None or self.muted or now < self._next_beat:
            return
        if self._head and not self.known:
            return
        self._beat += 1
        # What was not answered after a thousand beats never will be.
        self._beats.pop(self._beat - 1000, None)
        self._beats[self._beat] = (now, time.time())
        self._next_beat = now + self._beat_seconds
        self.send("beat", number=self._beat)

    def finish_sending(self) -> None:
        """Send the queue, then shut down the sending side."""
        with contextlib.suppress(LostError, OSError):
            self.flush()
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection after writing what the kernel accepts without blocking."""
        with contextlib.suppress(LostError, OSError):
            self.flush()
        self.socket.close()

    def _taken(self) -> Iterator[Message]:
        if self._keys is None and not self._greeted():
            return
        while len(self._received) >= LENGTH.size + MAC_BYTES:
            (length,) = LENGTH.unpack_from(self._received)
            if length > (FRAME_BYTES if self.known else STRANGER_BYTES):
                raise LostError("sent a frame of %d bytes" % length)
            end = LENGTH.size + MAC_BYTES + length
            if len(self._received) < end:
                break
            mac = bytes(self._received[LENGTH.size : LENGTH.size + MAC_BYTES])
            body = bytes(self._received[LENGTH.size + MAC_BYTES : end])
            del self._received[:end]
            if not hmac.compare_digest(mac, self._mac(1, body)):
                known = "sent a frame out of order, or altered"
                raise LostError(known if self.known else "has another cluster key")
            self.known = True
            message = self._checked(body)
            if message["kind"] == "beat":
                if not self.muted:
                    self.send("echo", number=message.get("number"), clock=time.time())
            elif message["kind"] == "echo":
                self._echoed(message)
            else:
                yield message

    def _greeted(self) -> bool:
        """Process the peer's nonce; return whether it is complete. The head then sends its own."""
        wanted = len(MAGIC) + NONCE_BYTES
        if bytes(self._received[: len(MAGIC)]) != MAGIC[: len(self._received)]:
            raise LostError("does not use this release's protocol")
        if len(self._received) < wanted:
            return False
        theirs = bytes(self._received[len(MAGIC) : wanted])
        del self._received[:wanted]
        if self._head:
            self._unsent += MAGIC + self._nonce
        nonces = self._nonce + theirs if self._head else theirs + self._nonce
        keys = [
            hmac.new(self._key, name + nonces, hashlib.sha256).digest() for name in (b"h", b"w")
        ]
        self._keys = (keys[0], keys[1]) if self._head else (keys[1], keys[0])
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(**{**message, "incarnation": self.incarnation})
        return True

    def _mac(self, direction: int, body: bytes) -> bytes:
        """Return the HMAC of the next frame; `direction` is 0 for outgoing, 1 for incoming."""
        assert self._keys is not None
        counter = COUNTER.pack(self._counters[direction])
        self._counters[direction] += 1
        return hmac.new(self._keys[direction], counter + body, hashlib.sha256).digest()

    def _checked(self, body: bytes) -> Message:
        try:
            message = json.loads(body.decode())
        except ValueError:
            raise LostError("sent a frame that is not JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise LostError("sent a frame without a kind")
        theirs = message.get("incarnation")
        if theirs is None and not self.bound:
            return message
        if theirs == self.incarnation or (self.incarnation is None and message["kind"] == "form"):
            return message
        raise LostError("is of incarnation %s, this node of %s" % (theirs, self.incarnation))

    def _echoed(self, message: Message) -> None:
        sent = self._beats.pop(number(message.get("number")), None)
        if sent is None:
            return
        at, clock = sent
        self.answered = max(self.answered, at)
        taken = time.monotonic() - at
        theirs = message.get("clock")
        if isinstance(theirs, (int, float)) and (
            self.round_trip is None or taken < self.round_trip
        ):
            self.round_trip = taken
            self.clock_offset = theirs - (clock + taken / 2)


def number(value: Any) -> int:
    """Return a peer's count, or 0 if it is invalid."""
    return value if isinstance(value, int) else 0
