"""The production fleet. An example: copy it, keep the shape, write your own nodes.

    gpufleet inventory inventories/prod.py                # every value, and the line that sets it
    pyinfra --dry inventories/prod.py deploys/vllm.py     # what would change

Variables are in group_vars/ and host_vars/. A node's values come from these places, later ones win:
all.yml, prod.yml (this file's name), gpu.yml (its outer group), gpu_h100.yml (its inner group),
host_vars/<node>.yml, what stands beside its name here, and --data.

Host keys: see docs/configure/inventory.md for how inventories/known_hosts is made. Nodes whose key
is not in it, or has changed, are not connected to.
"""

from gpufleet import inventory

globals().update(
    inventory.load(
        __file__,
        groups={
            # A name that SSH can reach, or any name with the address beside it.
            "gpu_h100": [
                "gpu-h100-01.example.net",
                "gpu-h100-02.example.net",
            ],
            "gpu_a100": [
                ("gpu-a100-01", {"ssh_hostname": "192.0.2.21"}),
                ("gpu-a100-02", {"ssh_hostname": "192.0.2.22", "ssh_port": 2222}),
            ],
            # Nodes that watch the others, without GPUs, go into a group "monitoring", with a line
            # like those above: what they are is in group_vars/monitoring.yml.
        },
        # Every node of the inner groups is in the outer one too.
        children={"gpu": ["gpu_h100", "gpu_a100"]},
    )
)
