"""Measure how much longer than one copy it takes until many nodes have the same.

    python -m benchmarks.distribution.run [--nodes 16] [--mib 2048] [--rate 1gbit] [--rounds 5]

Boots so many lab nodes and one that has a tree, limits every node's link to a rate in both
directions, and has the tree copied in turns to one node and to all of them, as deploys do
(on_node/transfer/transfer.py over SSH, two trees). Prints the seconds until the last node has it
in place, their medians and spread, the ratio, and how busy this machine's processors were: where
they are all busy, it is they that are measured and not the links. What arrived is removed after
each copy; never is less than 25 GB left free. Needs root.

The nodes have `--memory` MiB together, their files' pages with it. A virtual machine may get each
page from its host when it is first touched, and give it back when it is free: on the one that this
was written on such pages are written at 340 MiB a second and others at 3 GiB, and 16 copies of
2 GiB into 20 GiB of free memory measured that. Nodes with memory of their own have written to it
since they were started.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.artifacts import distribution
from gpufleet.remote import payload
from lab import cgroup
from lab.nodes import Lab
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfa")
SOURCE = "gpu-240"
DIRECTORY = "/srv/release"
PORT = 8790
FREE_BYTES = 25 * 10**9
# At 1 Gbit/s a tick of 4 ms has 500 kB, and no packet of the kernel's is larger than 64 kB.
SHAPE = ("burst", "512kb", "latency", "50ms")
# What the source has read, and as much for 16 nodes as each takes in two seconds.
MEMORY_MIB = 6144
BOUND = 3.0


@dataclass(frozen=True)
class Copy:
    """One copy to some nodes: until the last had it in place, and what of it was this machine's."""

    seconds: float
    busy: float
    """The share of all processors' time that was spent, of 1."""
    answers: dict[str, dict[str, Any]]


def main() -> int:
    """Measure and print; return 1 where many take more than `BOUND` times as long as one."""
    reader = argparse.ArgumentParser(description=__doc__, add_help=True)
    reader.add_argument("--nodes", type=int, default=16)
    reader.add_argument("--mib", type=int, default=2048)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", type=int, default=5)
    reader.add_argument("--memory", type=int, default=MEMORY_MIB, help="MiB; 0: without bound")
    given = reader.parse_args()
    nodes = [f"gpu-{number:02}" for number in range(1, given.nodes + 1)]
    lab = Lab.open(LAB_ID, print)
    lab.purge()
    try:
        lab.up(dict.fromkeys((SOURCE, *nodes), "t4x1"))
        lab = Lab.open(LAB_ID, print)
        if given.memory:
            cgroup.bound_memory(lab.facts.prefix, given.memory)
        grow(lab.root(SOURCE) / DIRECTORY.lstrip("/"), given.mib)
        shape(lab, (SOURCE, *nodes), given.rate)
        began = time.monotonic()
        tree = ask(lab, SOURCE, "describe", {})
        print(
            f"{tree['files']} files, {tree['bytes'] >> 20} MiB, read once in "
            f"{time.monotonic() - began:.1f} s; links of {given.rate}; nodes have "
            f"{given.memory or 'all'} MiB"
        )
        return compare(lab, nodes, tree, given.rounds)
    finally:
        lab.purge()


def compare(lab: Lab, nodes: Sequence[str], tree: dict[str, Any], rounds: int) -> int:
    """Copy in turns to one and to all."""
    ones, alls = [], []
    for number in range(1, rounds + 1):
        one, every = copied(lab, nodes[:1], tree), copied(lab, nodes, tree)
        ones.append(one.seconds)
        alls.append(every.seconds)
        most = max(each["sent"] for each in every.answers.values()) / tree["bytes"]
        print(
            f"round {number}: 1 node {one.seconds:6.1f} s (processors {one.busy:.0%} busy), "
            f"{len(nodes)} nodes {every.seconds:6.1f} s ({every.busy:.0%} busy): "
            f"{every.seconds / one.seconds:.2f} x; most that one node sent: {most:.2f} copies",
            flush=True,
        )
    ratio = statistics.median(alls) / statistics.median(ones)
    for name, found in (("1 node", ones), (f"{len(nodes)} nodes", alls)):
        print(
            f"{name}: median {statistics.median(found):.1f} s, {min(found):.1f} to {max(found):.1f}"
        )
    print(
        f"ratio of medians {ratio:.2f}, bound {BOUND:g}: {'held' if ratio <= BOUND else 'MISSED'}"
    )
    return ratio > BOUND


def copied(lab: Lab, nodes: Sequence[str], tree: dict[str, Any]) -> Copy:
    """Copy a tree to some nodes at once; remove it there again."""
    need = tree["bytes"] * len(nodes)
    if shutil.disk_usage(lab.state).free - need < FREE_BYTES:
        sys.exit(f"{need >> 20} MiB would leave less than 25 GB free: take fewer nodes, or --mib")
    ways = distribution.sources(SOURCE, nodes)
    expected = distribution.expected_halves(ways)
    where = {name: str(lab.facts.node(name).address) for name in (SOURCE, *nodes)}
    token = secrets.token_hex(32)

    def run(name: str) -> dict[str, Any]:
        halves = [[(each, where[each], PORT) for each in half] for half in ways.get(name, ())]
        more = {
            "digest": tree["digest"],
            "own": name,
            "token": token,
            "address": where[name],
            "port": PORT,
            "rate_mbit": None,
            "expected": expected.get(name, ()),
            "halves": halves,
            "remove": (),
            "files": None,
        }
        return ask(lab, name, "fetch" if halves else "serve", more)

    before, began = ticks(), time.monotonic()
    with ThreadPoolExecutor(len(where)) as pool:
        answers = dict(zip(where, pool.map(run, where), strict=True))
    seconds, after = time.monotonic() - began, ticks()
    for name in nodes:
        for path in (DIRECTORY, "/var/lib/gpufleet/manifests"):
            shutil.rmtree(lab.root(name) / path.lstrip("/"))
    subprocess.run(["sync"], check=True)
    # The lab's disk is a sparse file: what was removed in it stays this machine's otherwise.
    subprocess.run(["fstrim", lab.state / "nodes"], check=False, stderr=subprocess.DEVNULL)
    spent = [now - then for now, then in zip(after, before, strict=True)]
    return Copy(seconds, 1 - spent[1] / spent[0], answers)


def ask(lab: Lab, node: str, action: str, more: dict[str, Any]) -> dict[str, Any]:
    """Run the program on a node; return what it answers."""
    program = payload.program(
        "transfer/transfer",
        action=action,
        directory=DIRECTORY,
        mark=f"{DIRECTORY}/.complete",
        manifests="/var/lib/gpufleet/manifests",
        leave_out=[".complete"],
        lock="",
        python="",
        seconds=1800,
        **more,
    )
    done = subprocess.run(
        ["ssh", "-F", str(lab.state / "ssh_config"), node, "python3 -I -"],
        input=program.encode(),
        capture_output=True,
        check=False,
        timeout=2000,
    )
    if done.returncode:
        sys.exit(f"{node}: {done.stderr.decode()}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["error"]:
        sys.exit(f"{node}: {found['error']}")
    return found


def grow(root: Path, mib: int) -> None:
    """Make a tree as a release is: a few large files, and many small ones."""
    root.mkdir(parents=True)
    small = 2000
    for number in range(small):
        folder = root / f"lib/{number % 100:02}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.py").write_bytes(secrets.token_bytes(1 << 13))
    left = (mib << 20) - (small << 13)
    for number in range(8):
        with (root / f"{number}.so").open("wb") as file:
            for _ in range(left // 8 >> 20):
                file.write(secrets.token_bytes(1 << 20))
    (root / ".complete").touch()


def shape(lab: Lab, nodes: Sequence[str], rate: str) -> None:
    """Limit what each node receives and sends: the lab's own verb limits one direction."""
    for name in nodes:
        node = lab.facts.node(name)
        tbf = ("root", "tbf", "rate", rate, *SHAPE)
        tc = ("tc", "qdisc", "replace", "dev")
        subprocess.run([*tc, lab.facts.port(node), *tbf], check=True)
        inside = ("ip", "netns", "exec", lab.facts.netns(name))
        subprocess.run([*inside, *tc, "eth0", *tbf], check=True)


def ticks() -> tuple[int, int]:
    """Return the processors' time so far and how much of it was idle, in the kernel's ticks."""
    numbers = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(numbers), numbers[3] + numbers[4]


if __name__ == "__main__":
    sys.exit(main())
