"""Parse a probe's document: machine, GPUs, NVLink topology, marks.  Pure."""
