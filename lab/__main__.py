"""`python -m lab ...` is `gpufleet lab ...`."""

from lab.cli import lab

lab(prog_name="gpufleet lab")
