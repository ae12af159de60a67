"""Run the LiteLLM proxy on the nodes with `litellm`: names, defaults and aliases of models.

pyinfra inventories/prod.py deploys/litellm.py           # asks before it changes anything
pyinfra --dry inventories/prod.py deploys/litellm.py     # only shows what would change

LiteLLM gets the model names of `serving`, whether or not these models run now. No other node is
queried. Run this deploy again after you have added or removed entries of `serving`. LiteLLM is
restarted only on nodes on which something has changed (docs/traffic/litellm.md).
"""

from pyinfra import host

from gpufleet.fleet.run import hold_nodes, refusals
from gpufleet.inventory import loader
from roles.litellm import litellm

with refusals():
    hold_nodes("litellm")
    litellm(loader.current().nodes, host.name)
