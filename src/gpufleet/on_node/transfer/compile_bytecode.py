"""RUNS ON THE NODE: compile the bytecode of a release without running its code.

    python3 -ISB - RELEASE/lib

The interpreter is the release's own. It is started without `site` (-S), because otherwise each
start would run the `.pth` files of wheels. Files that this interpreter cannot compile are skipped,
as uv and pip do, because packages contain templates and files for other versions of Python. Any
other error ends the program. For example, a full disk must not leave a release that must be
compiled at every start. The program needs only the standard library.

Bytecode has the hash of its source, not the source's time: nodes that build from the same lock get
the same files. If a person changes a source file, Python still notices it.
"""

from __future__ import annotations

import os
import py_compile
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import List

# Number of files that a process gets at once. Compiling a file takes about 5 ms, and passing it to
# a process takes much less.
AT_ONCE = 32


def sources(folder: str) -> List[str]:
    """Return the paths of all Python files below a folder, without following links."""
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py")
    )


def compile_file(path: str) -> bool:
    """Compile one file to its `__pycache__`; return whether it can be compiled."""
    try:
        py_compile.compile(
            path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
    except py_compile.PyCompileError:
        return False
    return True


def main() -> None:
    """Compile all files below the folder in the only argument."""
    paths = sources(sys.argv[1])
    cores = len(os.sched_getaffinity(0))
    # The processes are forked, because a newly started Python would not find this program, which
    # came from standard input.
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        compiled = sum(pool.map(compile_file, paths, chunksize=AT_ONCE))
    print("Bytecode compiled of %d of %d files" % (compiled, len(paths)))


if __name__ == "__main__":
    main()
