"""A part that is not declared any more is taken from its node: this machine is one.

In a mount namespace of its own, so that nothing of it stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

INVENTORY = """\
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"here": ["@local"]}))
"""
# An overlay needs an upper folder on no overlay: a tmpfs.
APART = """\
set -e
mount -t tmpfs none /run
mkdir /run/upper /run/work
mount -t overlay none -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
"""
NODE = """\
mount -t tmpfs none /var/lib
mkdir -p /etc/gpufleet/gateway
echo "global" > /etc/gpufleet/gateway/haproxy.cfg
for options in --dry -y -y; do
    "$PYINFRA" $options "$1" deploys/gateway.py 2>&1 || :
    echo "== $(ls /etc/gpufleet)"
done
"""
UNSHARE = ("unshare", "-rm", "sh", "-c")


@pytest.mark.skipif(
    subprocess.run((*UNSHARE, APART), capture_output=True, check=False).returncode != 0,
    reason="this user may not mount in a namespace of its own",
)
def test_a_gateway_that_is_not_declared_any_more_is_named_then_removed_once(tmp_path: Path) -> None:
    (tmp_path / "inventories").mkdir()
    (tmp_path / "group_vars").mkdir()
    inventory = tmp_path / "inventories/here.py"
    inventory.write_text(INVENTORY)
    (tmp_path / "group_vars/here.yml").write_text("gpu_node: false\n")

    done = subprocess.run(
        [*UNSHARE, APART + NODE, "sh", str(inventory)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYINFRA": str(Path(sys.executable).with_name("pyinfra")),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    dry, first, second, _ = done.stdout.split("== ")
    assert "would remove /etc/gpufleet/gateway" in dry
    assert first.startswith("gateway\n")  # as the dry run left it
    assert "remove /etc/gpufleet/gateway" in first
    # Nothing is there any more: no operation, and the sentence for a run without a gateway.
    assert second.startswith("\n")
    assert "no node of this run is a gateway" in second
    assert "not declared any more" not in second
