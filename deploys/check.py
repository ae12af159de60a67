"""Check whether nodes are fit to serve. Read-only: installs and changes nothing.

pyinfra inventories/prod.py deploys/check.py

Ends with status 1 if a node or GPU is blocked or could not be checked. `gpufleet check
inventories/prod.py` is the same without pyinfra around it, with `--json` and `--from`.
"""

from gpufleet.fleet.run import refusals
from roles.gpu_check import gpu_check

with refusals():
    gpu_check()
