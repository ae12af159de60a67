"""Test that the compared ways converge the same state. Status 1 if not.

    python -m benchmarks.converge.same [NODES]

On 2 lab nodes that deploys/vllm.py has converged, the other ways find nothing to change. Then one
file, one mode and one unit of a node are put wrong, and each way puts them right: what is on the
nodes is compared with what was. At last Ansible converges bare nodes, and neither deploys/vllm.py
nor pyinfra's own operations find anything to change there. Needs root.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.converge import ansible, declared
from benchmarks.converge.fleet import PACKED, BenchFleet, handed_over, ran, ready
from benchmarks.converge.ways import changed, way

WAYS = ("ours", "stock", "ansible")
# One of each kind of repair.
DIRTY = """
echo '# by hand' >> /etc/gpufleet/watchdog.json
chmod 0777 /etc/vllm
systemctl stop prometheus-node-exporter.service
"""


def main() -> int:
    """Compare; print each step and what differs."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    fleet = ready(count)
    folder = fleet.lab.state / "declared"
    declared.written(fleet, folder)
    ansible.inventory(fleet, folder)
    wrong = [
        problem
        for name in WAYS
        for problem in said(f"{name} after deploys/vllm.py", run(name, fleet, folder))
    ]
    was = state(fleet, folder)
    for name in WAYS:
        on_node(fleet, fleet.nodes[0], DIRTY)
        seen = differences(was, state(fleet, folder))
        wrong += said("what was put wrong is seen", [] if len(seen) == 3 else seen or ["none"])
        done = run(name, fleet, folder)
        wrong += said(f"{name} repairs", [] if done else ["nothing"])
        wrong += said(f"the state after {name}", differences(was, state(fleet, folder)))
    # Away with the nodes, and with all they had written; the lab's keys and the API's stay.
    fleet.lab.up({f"gpu-{count + 1:02}": "t4x1"}, packages=PACKED)
    fleet = handed_over(count)
    done = run("ansible", fleet, folder)
    wrong += said("ansible converges bare nodes", [] if done else ["nothing"])
    wrong += said("the state after it", differences(was, state(fleet, folder)))
    for name in WAYS:
        wrong += said(f"{name} after it", run(name, fleet, folder))
    print("the same" if not wrong else f"{len(wrong)} differences")
    return int(bool(wrong))


def run(name: str, fleet: BenchFleet, folder: Path) -> list[str]:
    """Converge in one of the ways; return what it says it changed. Ends the program on failure."""
    with way(name, fleet, folder) as found:
        return changed(name, ran([*found.argv], found.environment))


def state(fleet: BenchFleet, folder: Path) -> set[str]:
    """Return the state of everything declared on the nodes: a line per node and item."""
    found: set[str] = set()
    for node in fleet.nodes:
        of = declared.read(folder, node)
        files = [each["path"] for each in of["files"]]
        paths = files + [each["path"] for each in of["directories"]]
        gone = of["absent"] + [f"{declared.UNIT_DIRECTORY}/{name}" for name in of["units_gone"]]
        units = [each["name"] for each in of["units"]]
        watched = [each["directory"] for each in of["only_files"]]
        script = f"""
        stat -c '%n %F %U:%G %a' {shlex.join(paths)}
        sha256sum {shlex.join(files)} | sed 's/  / is the content of /'
        for unit in {shlex.join(units)}; do
            echo "$unit: $(systemctl is-active $unit) $(systemctl is-enabled $unit)"
        done
        find {shlex.join(watched)} -mindepth 1 2>/dev/null | sort
        ls {shlex.join(gone)} 2>/dev/null
        dpkg-query -W -f '${{Package}} ${{db:Status-Abbrev}}\n' {shlex.join(of["packages"])}
        getent passwd vllm | cut -d: -f1,6,7; id -nG vllm
        """
        found |= {f"{node}: {line}" for line in _lines(fleet, node, script)}
    return found


def differences(before: set[str], after: set[str]) -> list[str]:
    """Return the lines that were and are not, and those that are new, under other names."""
    lost = sorted(before - after)
    return lost or sorted(f"new: {line}" for line in after - before)


def said(what: str, problems: list[str]) -> list[str]:
    """Print one comparison; return its problems, each with what was compared."""
    print(f"{'DIFFERS' if problems else 'ok     '} {what}", *problems, sep="\n        ", flush=True)
    return [f"{what}: {problem}" for problem in problems]


def on_node(fleet: BenchFleet, node: str, script: str) -> None:
    """Run a script on a node; raises when it fails."""
    _lines(fleet, node, f"set -e\n{script}")


def _lines(fleet: BenchFleet, node: str, script: str) -> list[str]:
    done = subprocess.run(
        ["ssh", "-F", str(fleet.lab.facts.ssh_config), node, "sh"],
        input=f"{script}\ntrue\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
