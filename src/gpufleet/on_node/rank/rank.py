"""RUNS ON THE NODE: main process of a rank's unit, which joins the ranks of a replica.

    vllm-rank --replica llama-0 --rank 1 --node gpu-01=10.1.0.1 --node gpu-02=10.1.0.2 --port 29500
              --same release=0.33.0-1f2e --same model=9d1f -- /opt/.../vllm serve ... --headless

Every rank's process connects to the head, which is rank 0, over TCP. The ranks compare their
settings, form a group with an INCARNATION, start their programs in order, and exchange heartbeats.
If a rank, its node, its program or the network fails, the group ends: every rank kills its programs
and exits with 1, and systemd restarts it to form a new group.

Words after a lone `--` are a program; each further lone `--` begins another program. The head
starts its first program. Workers start theirs when it listens on the head's `--ready-port`. The
head starts its other programs when the workers' programs listen on the workers' own `--ready-port`.
`{master_port}`, `{rpc_port}` and `{incarnation}` are replaced by this incarnation's values, in
arguments and in variables. The replica uses `--port` and the 15 ports after it.

Exit status: 0 after SIGTERM here or at the head; 1 after the end of the group; 2 if the arguments,
the key, or the program's arguments are wrong, so that a restart would not help.

Python 3.8, standard library; one thread; nothing in its loop blocks.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import List, Tuple

from gpufleet.on_node.rank.head import PORTS, Head
from gpufleet.on_node.rank.life import WRONG, Node, Rank
from gpufleet.on_node.rank.worker import Worker

# Shorter than a hash can be guessed, or was typed by hand.
KEY_BYTES = 32


def main(argv: List[str]) -> int:
    """Run as a rank until its group ends, and return the exit status."""
    options, programs = arguments(argv)
    try:
        secret = read_key(options.key_file)
    except (OSError, ValueError) as error:
        print("vllm-rank: the cluster key: %s" % error, file=sys.stderr)
        return WRONG
    rank: Rank = (Worker if options.rank else Head)(options, programs, secret)
    return rank.run()


def arguments(argv: List[str]) -> Tuple[argparse.Namespace, List[List[str]]]:
    """Return the options and the programs. Exits with 2 and a message if they are invalid."""
    parser = parser_of_options()
    own, programs = split(argv)
    options = parser.parse_args(own)
    options.state = options.state or "/run/vllm/%s/rank.json" % options.replica
    if not programs or not all(programs):
        parser.error("give the program that this rank runs after `--`")
    if not 0 <= options.rank < len(options.node):
        parser.error("--rank %d of %d nodes" % (options.rank, len(options.node)))
    for what in zip(*options.node):  # strict= is of 3.10
        if len(set(what)) < len(what):
            parser.error("--node: the same name or address twice")
    if not 0 < options.port <= 65536 - PORTS:
        parser.error("--port: all %d ports from it on must be valid" % PORTS)
    return options, programs


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser for the options before the first program."""
    parser = argparse.ArgumentParser(prog="vllm-rank", allow_abbrev=False)
    add = parser.add_argument
    add("--replica", required=True, metavar="ID", help="the same on all ranks: llama-0")
    add("--rank", required=True, type=int, help="which --node this is; 0 is the head")
    add(
        "--node",
        required=True,
        action="append",
        type=node,
        metavar="NAME=ADDRESS",
        help="once for each rank, in their order",
    )
    add("--port", type=int, default=29500, help="of the head's tether, the first of 16")
    add(
        "--same",
        action="append",
        type=pair,
        default=[],
        metavar="NAME=VALUE",
        help="what must be alike on all ranks: release, model",
    )
    add("--ready-port", metavar="PORT", help="other ranks continue once a program listens on it")
    add(
        "--serves",
        action="store_true",
        help="a worker's last program serves clients too: a stop drains it with the head's",
    )
    add(
        "--key-file",
        default=os.environ.get("CREDENTIALS_DIRECTORY", ".") + "/cluster-key",
        help="at least 32 bytes, the same on all ranks",
    )
    add("--state", metavar="FILE", help="what `gpufleet status` reads")
    add("--silence-seconds", type=positive_seconds, default=10.0, help="after which a peer is dead")
    add("--grace-seconds", type=positive_seconds, default=5.0, help="between SIGTERM and SIGKILL")
    add("--drain-seconds", type=float, default=30.0, help="that a stopped server may take")
    add(
        "--start-seconds",
        type=positive_seconds,
        default=1800.0,
        help="until --ready-port is listened on",
    )
    return parser


def split(argv: List[str]) -> Tuple[List[str], List[List[str]]]:
    """Return the arguments before the first lone `--`, and the arguments after each."""
    parts: List[List[str]] = [[]]
    for word in argv:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts[0], parts[1:]


def pair(text: str) -> Tuple[str, str]:
    """Split `NAME=VALUE`. Raises `argparse.ArgumentTypeError` for another form."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError("NAME=VALUE is wanted, not %r" % text)
    return name, value


def node(text: str) -> Node:
    """Return the node in `NAME=ADDRESS`."""
    return Node(*pair(text))


def positive_seconds(text: str) -> float:
    """Return a number of seconds. Raises if it is not above zero."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("a number above 0 is wanted, not %r" % text)
    return seconds


def read_key(path: str) -> bytes:
    """Return the cluster key. Raises `OSError`, or `ValueError` if it is too short."""
    with open(path, "rb") as file:
        found = file.read(1 << 16).strip()
    if len(found) < KEY_BYTES:
        raise ValueError("%s has %d bytes, at least %d are wanted" % (path, len(found), KEY_BYTES))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
