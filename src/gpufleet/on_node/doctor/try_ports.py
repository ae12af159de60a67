"""RUNS ON THE NODE: connect to ports of other nodes at the same time, then disconnect."""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import CannotRead, read
from gpufleet.on_node.common.stage_units import unit_of
from gpufleet.on_node.serving.unit_command import command, value

# TCP sends a lost packet again after 1 s (RFC 6298).
SECONDS = 2.0
MOST = 32
UNITS = "/etc/systemd/system/"


class Attempts:
    """
    Running connection attempts. Each has its own thread, because name resolution may hang.
    """

    def __init__(self, places: Mapping[str, Tuple[str, int, str]]) -> None:
        self.found: Dict[str, Dict[str, Any]] = {}
        self.end = time.monotonic() + SECONDS + 0.5
        self.threads: List[threading.Thread] = []
        for name, (address, port, source) in list(places.items())[:MOST]:
            late = "no answer within %g s" % SECONDS
            said = {"address": address, "port": port, "error": late}  # type: Dict[str, Any]
            self.found[name] = said
            thread = threading.Thread(target=attempt, args=(said, source), daemon=True)
            thread.start()
            self.threads.append(thread)

    def results(self) -> Dict[str, Dict[str, Any]]:
        """Return each attempt's address, port and error, which is None on success."""
        for thread in self.threads:
            thread.join(max(0.0, self.end - time.monotonic()))
        return {name: dict(said) for name, said in self.found.items()}


def attempt(said: Dict[str, Any], source: str) -> None:
    """Connect, disconnect, and write the result to `said`."""
    place = said["address"], said["port"]
    try:
        socket.create_connection(place, SECONDS, (source, 0) if source else None).close()
    except socket.timeout:
        return
    except (OSError, OverflowError, UnicodeError) as error:
        said["error"] = getattr(error, "strerror", None) or str(error)
        return
    said["error"] = None


def head_of(stage: str) -> Optional[Tuple[str, int, str]]:
    """
    Return the address and port of a stage's rank 0, and the address of this node's rank.

    The result is None if this node has rank 0, or if the replica is on one node.
    """
    if not re.fullmatch(r"[\w.-]+", stage):
        raise CannotRead("absent", detail="no such unit")
    path = linux_facts.ROOT + UNITS + unit_of(stage)
    with open(path, encoding="utf-8", errors="replace") as file:
        words = command(file.read(1 << 20))
    words = words[: words.index("--")] if "--" in words else words
    addresses = [
        after.partition("=")[2] for word, after in zip(words, words[1:]) if word == "--node"
    ]
    rank, port = int(value(words, "--rank") or 0), value(words, "--port")
    if not port or not 0 < rank < len(addresses):
        return None
    return addresses[0], int(port), addresses[rank]


def heads(stages: List[str]) -> Dict[str, Tuple[str, int, str]]:
    """
    Return {stage: (address and port of rank 0, address of this node's rank)}.

    Stages whose rank 0 is on this node are left out.
    """
    # `read` converts to JSON types: each value is a list, None, or a reason why there is no value.
    found = {each: read(head_of, each) for each in stages}
    return {name: tuple(place) for name, place in found.items() if isinstance(place, list)}
