"""Run a command once and write what it took, as JSON, to the file that is named first.

A process of its own, and a small one: a child's peak memory counts what its parent had when it was
made (getrusage(2), ru_maxrss survives exec).
"""

import json
import os
import sys
import time

began = time.monotonic()
process = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(process, 0)
spent = time.monotonic() - began
with open(sys.argv[1], "w") as file:  # noqa: PTH123
    json.dump(
        {
            "clock": spent,
            "controller": used.ru_utime + used.ru_stime,
            "peak_mib": used.ru_maxrss / 1024,
        },
        file,
    )
sys.exit(os.waitstatus_to_exitcode(status) and 1)
