"""A lab: real Linux nodes with simulated GPUs on one machine."""
