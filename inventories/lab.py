"""The lab's nodes: real machines on this one, with simulated GPUs. `gpufleet lab up` starts them.

Which nodes there are, their addresses and their keys come from the lab's state. Its nodes are in
the group `gpu` and in one named after the hardware they simulate, such as `gpu_h100x8`; those
without GPUs (`mon-03=none`) in the group `monitoring`. What is deployed is in group_vars/lab.yml;
where it is downloaded from, the lab writes beside its state.
"""

from gpufleet import inventory
from lab.inventory import MONITORING, groups, state

_groups = groups()

_gpu = [name for name in _groups if name != MONITORING]

globals().update(
    inventory.load(__file__, groups=_groups, children={"gpu": _gpu}, also=[state().dir])
)
