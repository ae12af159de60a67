"""Define two nodes with eight H100 each."""

from gpufleet import inventory

globals().update(
    inventory.load(
        __file__, groups={"gpu": ["gpu-01.example.net", ("gpu-02", {"ssh_hostname": "192.0.2.12"})]}
    )
)
