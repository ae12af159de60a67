"""RUNS ON THE NODE: exchange datagrams between all ranks, to tell dead peers from slow ones.

* With high packet loss a TCP connection may be silent for long: retransmissions back off, and all
  later data waits. Silence is declared only if none of forty datagrams is answered.
* The network may fail between two workers that both reach the head: their links to it live, and the
  model hangs.

A datagram contains the number of the newest datagram received from the other side. A rank that
finds its own number there knows that both directions work. Each datagram has an HMAC-SHA256 with
the replica's key. A replayed recording has no effect, because a process counts as the rank only if
it answers a newer number than before.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
from typing import Any

from gpufleet.on_node.rank.wire import MAC_BYTES, MAGIC

# As many may be lost in a row before a peer is silent: on a line that loses 30 % of what is sent,
# in either direction, forty in a row are lost once in 10^12.
BEATS = 40
DATAGRAM_BYTES = 2048
# A flood must not keep us from everything else; what is left over is there the next time.
AT_ONCE = 500
NEVER = float("-inf")


class Mesh:
    """
    One rank's datagrams to the others; `others` has addresses by rank.

    `key` is this replica's key, and `silence` the seconds after which a peer counts as gone.

    Raises `OSError` if the address cannot be bound.
    """

    def __init__(
        self,
        rank: int,
        address: str,
        port: int,
        others: dict[int, str],
        *,
        key: bytes,
        silence: float,
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.socket.bind((address, port))
        except OSError:
            self.socket.close()
            raise
        self.rank = rank
        self.port = port
        self.others = others
        self.answered = dict.fromkeys(others, NEVER)
        """For each other rank, the time at which the newest answered datagram was sent."""
        self._key = hmac.new(key, MAGIC + b"datagrams", hashlib.sha256).digest()
        self._pace = silence / BEATS
        self._session = os.urandom(8).hex()
        self._number = 0
        self._sent: dict[int, float] = {}
        self._heard: dict[int, tuple[str, int]] = {}
        self._pinned: dict[int, str] | None = None
        self.due = 0.0
        """Time of the next datagrams."""

    def pin(self) -> None:
        """Fix each rank's process to the last that answered, or else the first that will answer."""
        answered = [rank for rank in self._heard if self.answered[rank] > NEVER]
        self._pinned = {rank: self._heard[rank][0] for rank in answered}

    def pulse(self, now: float) -> None:
        """Process received datagrams, and send due ones."""
        with contextlib.suppress(OSError):
            for _ in range(AT_ONCE):
                self._take(*self.socket.recvfrom(DATAGRAM_BYTES))
        if now < self.due:
            return
        self.due = now + self._pace
        self._number += 1
        self._sent[self._number] = now
        self._sent.pop(self._number - 10 * BEATS, None)
        for rank, address in self.others.items():
            heard = self._heard.get(rank)
            body = json.dumps([self.rank, rank, self._session, self._number, heard]).encode()
            # Refused, unreachable, no room: for the other side it is all one, silence.
            with contextlib.suppress(OSError):
                self.socket.sendto(self._mac(body) + body, (address, self.port))

    def _take(self, datagram: bytes, source: Any) -> None:
        mac, body = datagram[:MAC_BYTES], datagram[MAC_BYTES:]
        if source[0] not in self.others.values() or not hmac.compare_digest(mac, self._mac(body)):
            return
        rank, to, session, number, heard = json.loads(body.decode())
        if to != self.rank or self.others.get(rank) != source[0]:
            return
        ours = heard is not None and heard[0] == self._session
        at = self._sent.get(heard[1], NEVER) if ours else NEVER
        if self._pinned is not None and self._pinned.get(rank, session) != session:
            return
        known = self._heard.get(rank)
        if known is None or known[0] != session:
            # A restarted process counts from 1 again; but is it that, or an older one's word?
            if self.answered[rank] > NEVER and at <= self.answered[rank]:
                return
            self._heard[rank] = (session, number)
        elif known[1] < number:
            self._heard[rank] = (session, number)
        if at > NEVER:
            self.answered[rank] = max(self.answered[rank], at)
            if self._pinned is not None:
                self._pinned.setdefault(rank, session)

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).digest()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
