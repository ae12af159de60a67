"""Remove gpufleet from nodes; drivers and models stay, unless requested.

pyinfra inventories/prod.py deploys/absent.py           # names all of it, and asks
pyinfra --dry inventories/prod.py deploys/absent.py     # names it only
pyinfra inventories/prod.py deploys/absent.py --data 'absent={"parts": ["gateway"]}'

Units, packages, tables of nftables, files and accounts: docs/operate/removal.md. `--limit` says
from which nodes. What other deploys bring can be brought again.
"""

from pyinfra import host

from gpufleet.fleet.run import refusals
from gpufleet.inventory import loader
from roles.absent import absent

with refusals():
    absent(loader.current().nodes[host.name].settings)
