"""Measure what a converge with nothing to do costs, in each way to do it.

    python -m benchmarks.converge.run [--nodes 1,8,64] [--rounds 5] [--rounds ansible=1]
        [--ways ours,stock,ansible,file,unit,plan,floor,openssh] [--logins again]
        [--json FILE] [--markdown PAGE]

Brings up so many lab nodes, converges them, and runs each way in turn, as a cold process and when
the nodes rest, so that noise hits all of them. Prints the median (best to worst) of the seconds on
the clock and of the processors of both sides, the largest process of the controller, and the
ratios; status 1 where one misses its goal (table.py). A way that says that it changed something
where nothing was to be changed ends the measurement. docs/measured/performance.md says what is
compared. Needs root.

The first login on a node starts systemd's manager of the user, which ends ten seconds after the
last one: three times what any other login costs. Every run finds nodes where nobody is logged in,
as the first of a day does; with `--logins again` somebody is, all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from glob import glob
from pathlib import Path

import yaml

from benchmarks.converge import ansible, declared
from benchmarks.converge.fleet import ROOT, BenchFleet, ran, ready
from benchmarks.converge.table import NAMES, Run, held, markdown, replaced
from benchmarks.converge.ways import changed, way
from lab import cgroup, node_power
from lab.state import write

ONCE = Path(__file__).with_name("once.py")
# Of one run. Ansible needs minutes for 64 nodes on two cores.
LIMIT_SECONDS = 3600
# A node at rest takes 1.0 to 1.5 ms of a processor each second (measured); one whose exporter has
# just been restarted tens of them, for some seconds.
AT_REST = 0.004
# Ansible's connections stay for a minute after its run, and a manager for ten seconds after those.
CALM_SECONDS = 120
# A user's manager, in a node's own group: machine/payload (lab/node_power.py).
USERS = "machine/payload/user.slice/user-*.slice/user@*.service"
# What ways change on every node. "file": a token for downloads, which no unit reads. "unit": a
# collector off in the node exporter's unit, rendered from its template; the
# exporter restarts, and no server does.
CHANGES = {"file": ("vllm", "hf_token_file"), "unit": ("node_exporter", "without")}


def main() -> int:
    """Measure and print."""
    given = _arguments()
    rounds = _rounds(given.rounds)
    measured: dict[int, dict[str, list[Run]]] = {}
    for count in (int(number) for number in given.nodes.split(",")):
        fleet = ready(count)
        folder = fleet.lab.state / "declared"
        declared.written(fleet, folder)
        ansible.inventory(fleet, folder)
        measured[count] = {name: [] for name in given.ways.split(",")}
        with logged_in(fleet) if given.logins == "again" else nullcontext():
            for number in range(max(rounds.values())):
                for name, runs in measured[count].items():
                    if number < rounds.get(name, rounds[""]):
                        runs.append(measure(name, fleet, folder, given.logins))
                        print(f"{count} nodes, {name}: {runs[-1].clock:.2f} s", flush=True)
        if given.json:
            raw = {
                n: {w: [*map(asdict, r)] for w, r in ways.items()} for n, ways in measured.items()
            }
            Path(given.json).write_text(json.dumps(raw, indent=1) + "\n")
    shown = markdown(measured)
    print(f"\n{shown}")
    if given.markdown:
        page = Path(given.markdown)
        page.write_text(replaced(page.read_text(), shown))
    return int(not all(each.kept for each in held(measured)))


@contextmanager
def logged_in(fleet: BenchFleet) -> Iterator[None]:
    """Keep a user logged in on every node meanwhile."""
    with ExitStack() as logins:
        for name in fleet.nodes:
            command = ["ssh", "-F", str(fleet.lab.facts.ssh_config), name, "exec sleep 1d"]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            logins.callback(process.wait)
            logins.callback(process.terminate)
        yield


def measure(name: str, fleet: BenchFleet, folder: Path, logins: str) -> Run:
    """Run a way once. Ends the program when it fails, or does what it was not to do."""
    if name in CHANGES:
        _vary(fleet, name)
    _calm(fleet, logins)
    with way(name, fleet, folder) as found, tempfile.TemporaryDirectory() as own:
        took, output = Path(own, "took"), Path(own, "output")
        before = _nodes_seconds(fleet)
        with output.open("w") as said_to:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(ONCE), str(took), *found.argv],
                cwd=ROOT,
                env=dict(found.environment),
                stdin=subprocess.DEVNULL,
                stdout=said_to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            limit = threading.Timer(LIMIT_SECONDS, _kill, (process.pid,))
            limit.start()
            process.wait()
            limit.cancel()
        nodes = _nodes_seconds(fleet) - before
        said = output.read_text()
        used = json.loads(took.read_text()) if took.exists() else {}
    if process.returncode:
        sys.exit(f"{name} ended with {process.returncode}\n{said}")
    did = changed(name, said) if name in {"ours", "stock", "ansible", *CHANGES} else []
    if bool(did) != (name in CHANGES):
        sys.exit(f"{name} changed {did or 'nothing'}\n{said}")
    if name in CHANGES:
        _vary(fleet, name, back=True)
        ran([*found.argv], found.environment)
    return Run(nodes=nodes, **used)


def _vary(fleet: BenchFleet, name: str, *, back: bool = False) -> None:
    """Write into the fleet's variables what is to change on every node, or take it out again."""
    path = fleet.project / "group_vars/lab.yml"
    variables = yaml.safe_load(path.read_text())
    part, key = CHANGES[name]
    variables[part].pop(key, None)
    if not back:
        token = fleet.project / "token"
        write(token, "hf_of_the_benchmark\n")
        variables[part][key] = {"file": str(token), "unit": ["zfs"]}[name]
    write(path, yaml.safe_dump(variables, sort_keys=False))


def _calm(fleet: BenchFleet, logins: str) -> None:
    """Wait until the nodes are as a run is to find them. Ends the program when they never are."""
    groups = [cgroup.unified() / node_power.group(fleet.lab.facts, name) for name in fleet.nodes]
    for _ in range(CALM_SECONDS):
        before = _nodes_seconds(fleet)
        time.sleep(1)
        rest = _nodes_seconds(fleet) - before < AT_REST * len(groups)
        # Path.glob would fail if a session ends, and its folder goes, while it reads.
        managers = [bool(glob(str(group / USERS))) for group in groups]  # noqa: PTH207
        if rest and (all(managers) if logins == "again" else not any(managers)):
            return
    wanted = "all" if logins == "again" else "none"
    sys.exit(
        f"after {CALM_SECONDS} s the nodes {'rest' if rest else 'do not rest'}, and somebody is "
        f"logged in on {sum(managers)} of {len(groups)}: with `--logins {logins}` that has to be "
        f"{wanted}, so end what works on them, and measure again"
    )


def _nodes_seconds(fleet: BenchFleet) -> float:
    """Return the seconds of processors that the nodes' processes have used since they are on."""
    total = 0
    for name in fleet.nodes:
        path = cgroup.unified() / node_power.group(fleet.lab.facts, name) / "cpu.stat"
        total += next(
            int(line.split()[1])
            for line in path.read_text().splitlines()
            if line.startswith("usage_usec ")
        )
    return total / 1e6


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _arguments() -> argparse.Namespace:
    reader = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    reader.add_argument("--nodes", default="1,8,64")
    reader.add_argument("--rounds", action="append", default=[], help="5, or WAY=ROUNDS")
    reader.add_argument("--ways", default=",".join(NAMES))
    reader.add_argument("--logins", choices=["first", "again"], default="first")
    reader.add_argument("--json")
    reader.add_argument("--markdown")
    given = reader.parse_args()
    if strange := [name for name in given.ways.split(",") if name not in NAMES]:
        reader.error(f"no way {', '.join(strange)}: there are {', '.join(NAMES)}")
    return given


def _rounds(given: list[str]) -> dict[str, int]:
    """Return rounds by way; "" are those of every other one."""
    found = {"": 5}
    for each in given:
        name, _, number = each.rpartition("=")
        found[name] = int(number)
    return found


if __name__ == "__main__":
    sys.exit(main())
