"""A probe's document as values: machine, GPUs, NVLink topology, marks.  Pure."""
