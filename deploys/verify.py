"""Verify that the fleet serves as planned. Changes nothing.

    pyinfra -y inventories/prod.py deploys/verify.py

For every stage: its unit is active, /health is 200, /v1/models names the model, a completion (or
what its kind of model is asked for) comes back, and nothing is answered without the API key. For
every node: both exporters serve the metric families that alerts rest on.
"""

from gpufleet.fleet.run import node_plan, refusals
from roles.verify import verify

with refusals():
    node = node_plan(unfit_stops=False)
    if node:
        verify(node)
