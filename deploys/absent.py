"""Remove gpufleet from nodes; drivers and models are removed only if you request it.

pyinfra inventories/prod.py deploys/absent.py           # lists all parts, then asks
pyinfra --dry inventories/prod.py deploys/absent.py     # only lists all parts
pyinfra inventories/prod.py deploys/absent.py --data 'absent={"parts": ["gateway"]}'

docs/operate/removal.md lists the units, packages, nftables tables, files and accounts that are
removed. `--limit` selects the nodes. The other deploys can install everything again.
"""

from pyinfra import host

from gpufleet.fleet.run import refusals
from gpufleet.inventory import loader
from roles.absent import absent

with refusals():
    absent(loader.current().nodes[host.name].settings)
