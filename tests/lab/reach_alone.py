"""The proof that nodes reach each other, and the stages after it: all else is left out."""

from gpufleet.fleet.run import refusals
from gpufleet.operations.check_reachability import check_reachability
from tests.lab.ground import stages_alone

with refusals():
    node, rendered, stages = stages_alone()
    check_reachability(stages, node.stages, name="nodes of a replica reach each other")
    stages.files(name="units")
    stages.units(name="stages")
