"""Verify that the fleet serves as planned, without changing anything.

    pyinfra -y inventories/prod.py deploys/verify.py

For every stage, the deploy verifies that:

- the unit is active;
- /health returns 200, and /v1/models lists the model;
- the server answers a completion request, or a request of the kind that its model serves;
- the server refuses every request without the API key.

For every node, the deploy verifies that both exporters serve the metric families that the alerts
need.
"""

from gpufleet.fleet.run import node_plan, refusals
from roles.verify import verify

with refusals():
    node = node_plan(unfit_stops=False)
    if node:
        verify(node)
