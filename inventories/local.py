"""Define this machine as the only node, without SSH: for a single server or a first test.

pyinfra inventories/local.py deploys/vllm.py

Its variables are in group_vars/local.yml, named after this file.
"""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))
