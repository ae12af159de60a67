"""This machine alone, without SSH: for a single server, or for a first look.

pyinfra inventories/local.py deploys/vllm.py

Its variables are in group_vars/local.yml, named after this file.
"""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))
