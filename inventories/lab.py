"""Define the lab's nodes: real Linux systems on this machine, with simulated GPUs.

`gpufleet lab up` starts the nodes. The lab's state contains their names, addresses and SSH keys.

- Nodes with GPUs are in the group `gpu`, and in a group with the name of their simulated hardware,
  such as `gpu_h100x8`.
- Nodes without GPUs (`mon-03=none`) are in the group `monitoring`.

group_vars/lab.yml declares what is deployed. The lab writes the addresses of the downloads to the
folder of its state.
"""

from gpufleet import inventory
from lab.inventory import MONITORING, groups, state

_groups = groups()

_gpu = [name for name in _groups if name != MONITORING]

globals().update(
    inventory.load(__file__, groups=_groups, children={"gpu": _gpu}, also=[state().dir])
)
