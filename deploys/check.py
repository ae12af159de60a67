"""Check whether nodes are fit to serve, without changing anything on them.

pyinfra inventories/prod.py deploys/check.py

The run ends with status 1 if a node or GPU is blocked or could not be checked. The command
`gpufleet check inventories/prod.py` makes the same checks without pyinfra, and has the options
`--json` and `--from`.
"""

from gpufleet.fleet.run import refusals
from roles.gpu_check import gpu_check

with refusals():
    gpu_check()
