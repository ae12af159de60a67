"""Define the production fleet: copy this example and replace its nodes with your own.

    gpufleet inventory inventories/prod.py                # every value, and the line that sets it
    pyinfra --dry inventories/prod.py deploys/vllm.py     # what would change

Variables are in group_vars/ and host_vars/. gpufleet reads a node's values from these places, and a
later place overrides an earlier one:

1. all.yml
2. prod.yml, which has the name of this file
3. gpu.yml, the node's outer group
4. gpu_h100.yml, the node's inner group
5. host_vars/<node>.yml
6. the values beside the node's name in this file
7. --data

docs/configure/inventory.md describes how to create inventories/known_hosts. gpufleet does not
connect to a node if the node's host key is not in this file or has changed.
"""

from gpufleet import inventory

globals().update(
    inventory.load(
        __file__,
        groups={
            # A name that SSH can resolve, or any name together with the address.
            "gpu_h100": [
                "gpu-h100-01.example.net",
                "gpu-h100-02.example.net",
            ],
            "gpu_a100": [
                ("gpu-a100-01", {"ssh_hostname": "192.0.2.21"}),
                ("gpu-a100-02", {"ssh_hostname": "192.0.2.22", "ssh_port": 2222}),
            ],
            # To add monitoring nodes without GPUs, write a group "monitoring" in the same form.
            # group_vars/monitoring.yml has the settings of this group.
        },
        # Every node of the inner groups is also in the outer group.
        children={"gpu": ["gpu_h100", "gpu_a100"]},
    )
)
