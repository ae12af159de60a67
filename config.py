"""pyinfra executes this file before it reads the inventory.

It refuses command lines that pyinfra would answer with exit code 0 although nothing was done; see
`gpufleet.inventory.invocation`.
"""

import atexit
import gc

from pyinfra import config
from pyinfra.api.state import MAX_PARALLEL

from gpufleet.inventory import invocation, output_bound, pyinfra_output, pyinfra_patches
from gpufleet.paths import add_project_to_path

# What `gpufleet.inventory.refusal` and `gpufleet.inventory.invocation` rely on is not a public
# interface of pyinfra: they were checked against this series.
config.REQUIRE_PYINFRA_VERSION = invocation.SERIES

invocation.check_invocation()
add_project_to_path()
# What is imported stays: looking through it again and again took a fifth of a plan's time.
gc.set_threshold(100_000, 20, 50)
atexit.register(gc.freeze)
pyinfra_patches.patch_operation_order()
pyinfra_output.patch_output()
output_bound.patch_output_bound()

# pyinfra takes 20 nodes per CPU core at once. Nodes are waited for, not computed: one costs this
# machine 30 to 50 ms of CPU a run, so that all of them may be asked at once, as far as the limit of
# open files goes that this process was started with.
config.PARALLEL = min(500, MAX_PARALLEL)
