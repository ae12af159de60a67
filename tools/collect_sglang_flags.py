"""Write the package's schemas of SGLang again, from the releases' wheels.

    pip download --no-deps --dest FOLDER sglang==VERSION    # of each release
    python -m tools.collect_sglang_flags FOLDER

The tool reads every `sglang-*.whl` in FOLDER, and writes `sglang-schemas.json.xz`, with the same
bytes for the same wheels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpufleet.engines.sglang.sglang_schemas import DATA, ENGINE
from gpufleet.errors import FleetError
from gpufleet.flags.extract import flag_document
from gpufleet.flags.schema import sort_key
from tools.collect_flags import pack


def main(arguments: Sequence[str]) -> int:
    """Collect the schemas, and print what was found in each release."""
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    wheels = {path.name.split("-")[1]: path for path in Path(arguments[0]).glob(f"{ENGINE}-*.whl")}
    schemas = {}
    try:
        for version in sorted(wheels, key=sort_key):
            found = flag_document(str(wheels[version]), engine=ENGINE)
            unresolved = found.pop("unresolved")
            schemas[version] = found
            sys.stdout.write(
                f"{version}: {len(found['flags'])} flags, {len(found['env'])} variables\n"
            )
            sys.stdout.writelines(f"  not resolved: {line}\n" for line in unresolved)
    except FleetError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    DATA.write_bytes(pack(schemas, ENGINE))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
