"""A deploy that has its nodes to itself for HELD_SECONDS, and does nothing there but say so."""

import os
import time

from pyinfra.operations import python

from gpufleet.fleet.run import hold_nodes, refusals

with refusals():
    hold_nodes("gpu_node")

python.call(
    name="work",
    function=lambda: time.sleep(float(os.environ.get("HELD_SECONDS", "0"))),
)
