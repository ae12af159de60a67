"""
A batch without nodes: what `gpufleet batch` does, against a server whose load its /metrics has.

    python -m tests.support.batch_alone URL INPUT OUTPUT [--slots 16] [--guest 0.5]

Prints the summary of the output as JSON. A process of its own, for gevent patches all of it.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import argparse  # noqa: E402
import json  # noqa: E402
import urllib.request  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import closing  # noqa: E402
from pathlib import Path  # noqa: E402

from gpufleet.batch.asking import Asker  # noqa: E402
from gpufleet.batch.batch_input import BatchInput, InputRules  # noqa: E402
from gpufleet.batch.batch_output import BatchOutput  # noqa: E402
from gpufleet.batch.batch_run import BatchRun  # noqa: E402
from gpufleet.load_test import guest  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--guest", type=float, default=0.5)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--retry-failed", action="store_true")
    given = parser.parse_args()

    def look(under_way: Callable[[], int]) -> guest.Allowance:
        try:
            with urllib.request.urlopen(f"{given.url}/metrics", timeout=5) as page:
                lines = page.read().decode().splitlines()
        except OSError as error:
            return guest.Allowance(0, str(error))
        running, waiting, _ = (float(line.split()[1]) for line in lines)
        load = guest.ServerLoad("stand-in-0", running, waiting, 0.0, given.slots)
        return guest.allowance([load], under_way(), given.guest)

    with closing(BatchInput(given.input, InputRules("stand-in", 1 << 20))) as source:
        checked = source.check()
        output = BatchOutput(given.output, checked, "stand-in", retry_failed=given.retry_failed)
        asker = Asker(given.url, "", "", ca_file=None, seconds=30)
        with closing(output), closing(asker):
            run = BatchRun(
                asker,
                source.requests(output.done),
                output,
                look,
                most=None,
                seconds=30,
                patience_seconds=given.patience,
                look_seconds=0.2,
            )
            run.run()
            totals = output.totals
            found = {"answered": totals.answered, "failed": totals.failed, "stopped": run.stopped}
            print(json.dumps(found))


if __name__ == "__main__":
    main()
