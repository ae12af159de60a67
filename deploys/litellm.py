"""Run the LiteLLM proxy on the nodes with `litellm`: names, defaults and aliases of models.

pyinfra inventories/prod.py deploys/litellm.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/litellm.py     # only shows what would change

Names are those of `serving`, whatever runs now: no other node is asked. Run it again when entries
come or go. LiteLLM is restarted where something has changed: docs/traffic/litellm.md.
"""

from pyinfra import host

from gpufleet.fleet.run import hold_nodes, refusals
from gpufleet.inventory import loader
from roles.litellm import litellm

with refusals():
    hold_nodes("litellm")
    litellm(loader.current().nodes, host.name)
