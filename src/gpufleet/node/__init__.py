"""Parse a probe's document into the node's machine, GPUs, NVLink topology and marks. Pure."""
