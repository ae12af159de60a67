"""The lab's nodes: real machines on this one, with simulated GPUs. `gpufleet lab up` starts them.

Which nodes there are, their addresses and their keys come from the lab's state. Its nodes are in
the group `gpu` and in one named after the hardware they simulate, such as `gpu_h100x8`. What is
deployed is in group_vars/lab.yml; where it is downloaded from, the lab writes beside its state.
"""

from gpufleet import inventory
from lab.inventory import groups, state

_groups = groups()

globals().update(
    inventory.load(__file__, groups=_groups, children={"gpu": list(_groups)}, also=[state().dir])
)
