"""Measure what an upgrade costs beyond the time to load the models.

    python -m benchmarks.upgrade.run [UPGRADES]

Boots four lab nodes with a replica each behind a gateway, has clients ask them, upgrades between
two real releases of vLLM UPGRADES times (default 2; the first one builds the other release), and
prints by replica what it was out for beyond its own load, and the whole against the sum of loads.
Two cores that serve, ask and load at once are slow at all of it: so the load is told beside it,
and one of it is measured alone. Needs root.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.upgrade.measure import Cost, cost
from tests.lab.upgrade_fleet import NEW, OLD, UpgradeFleet, upgrade_fleet
from tests.lab.upgrade_load import summary
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfub")


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with (
        tempfile.TemporaryDirectory() as folder,
        upgrade_fleet(LAB_ID, Path(folder), kind=UpgradeFleet) as fleet,
    ):
        fleet.deploy()
        for number in range(count):
            target = OLD if number % 2 else NEW
            with fleet.load(f"upgrade-{number}", 2.0) as load:
                done = fleet.upgrade("--vllm", target)
                load.stop()
            if done.returncode:
                raise SystemExit(done.stdout)
            seen = summary(load.requests())
            print(f"to {target}: {seen.requests} requests, {seen.failed} failed")
            show(cost(fleet.journal()))
        print(f"a restart alone, nothing else going on: {alone(fleet):.1f} s to its first answer")


def show(found: Cost) -> None:
    """Print one upgrade."""
    for each in found.outages:
        print(
            f"  {each.group}: out for {each.out:.1f} s, of which it loaded {each.load:.1f} s: "
            f"{each.rest:.1f} s besides; drained for {each.drain:.1f} s before"
        )
    rests = [each.rest for each in found.outages]
    print(
        f"  besides loading: median {statistics.median(rests):.1f} s, most {max(rests):.1f} s\n"
        f"  whole {found.whole:.0f} s, its waves {found.waves:.0f} s: "
        f"{found.waves / found.loads:.2f} x the {found.loads:.0f} s of loading"
    )


def alone(fleet: UpgradeFleet) -> float:
    """Return how long a server takes from its start to an answer when nobody asks the others."""
    node = fleet.gpu_nodes[0]
    fleet.ssh(node, "systemctl restart 'vllm-tiny-*'", seconds=120)
    began = time.monotonic()
    script = (
        f"header='Authorization: Bearer {fleet.key}'\n"
        'until curl -sf -m 60 -o /dev/null -H "$header" -H "Content-Type: application/json"'
        ' -d \'{"model": "tiny", "prompt": "0", "max_tokens": 1}\''
        f" http://{fleet.address(node)}:8000/v1/completions; do sleep 0.2; done"
    )
    fleet.ssh(node, "bash -s", seconds=300, stdin=script)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
