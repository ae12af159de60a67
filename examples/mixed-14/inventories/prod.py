from gpufleet import inventory

nodes = {
    "gpu_h100": [f"h100-{number:02}" for number in range(1, 13)],
    "gpu_a100": ["a100-01", "a100-02"],
}
globals().update(inventory.load(__file__, nodes, {"gpu": ["gpu_h100", "gpu_a100"]}))
