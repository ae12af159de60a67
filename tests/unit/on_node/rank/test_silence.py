"""When a rank takes a peer for lost: by its connection, and by the datagrams beside it."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.on_node.rank.life import Node, Rank
from gpufleet.on_node.rank.mesh import NEVER, Mesh
from gpufleet.on_node.rank.wire import Link

KEY = b"k" * 32
SILENCE = 10.0


class Watching(Rank):
    """A rank with one link, which writes down why that was lost."""

    said: str | None = None

    def rank_of(self, link: Link) -> int | None:
        return 1 if link in self.links else None

    def link_lost(self, link: Link, why: str) -> None:
        assert link not in self.links, "it is closed first"
        self.said = why


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Watching]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = argparse.Namespace(
        node=[Node("gpu-01", "127.0.0.1"), Node("gpu-02", "127.0.0.2")],
        rank=0,
        replica="m-0",
        same=[],
        silence_seconds=SILENCE,
        state=str(tmp_path / "state"),
        port=port,
    )
    watching = Watching(options, [], KEY)
    watching.mesh = Mesh(0, "127.0.0.1", port, {1: "127.0.0.2"}, key=KEY, silence=SILENCE)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        watching.links.append(Link(ours, KEY, head=True, beat=1.0))
        yield watching
    watching.mesh.close()


@pytest.mark.parametrize(
    ("by_link", "by_datagram", "says"),
    [
        (9, None, None),
        (11, None, "has not answered for 10 s, and never by UDP port {port}: is that open?"),
        (11, 11, "has not answered for 10 s"),
        (11, 9, None),
        (9, 11, None),
        (59, 9, None),
        (61, 9, "answers datagrams, but no message for 60 s"),
    ],
)
def test_a_peer_is_lost_when_neither_way_answers_or_its_connection_is_stuck(
    rank: Watching, by_link: float, by_datagram: float | None, says: str | None
) -> None:
    """Datagrams show that the node lives; a connection that passes nothing for six times as long
    is of no more use."""
    now = time.monotonic()
    (link,) = rank.links
    link.known = True
    link.answered = now - by_link
    assert rank.mesh is not None
    rank.mesh.answered[1] = NEVER if by_datagram is None else now - by_datagram

    rank._judge(now)

    assert rank.said == (says and says.format(port=rank.options.port))
    assert rank.links == ([] if says else [link])


def test_a_stranger_is_not_judged_by_its_silence(rank: Watching) -> None:
    """Who has not proven that it has the key has a deadline of its own."""
    (link,) = rank.links
    link.answered = time.monotonic() - 1000

    rank._judge(time.monotonic())

    assert rank.links == [link]
