"""When Python looks for garbage that reference counts do not find.  Pure.

What is imported stays until the end, and is a few hundred thousand objects: Python looks through
all of them several times while they are loaded, and once more when it ends, for nothing. That is a
fifth of the time in which a plan for one node is made.
"""

from __future__ import annotations

import atexit
import gc

# Objects made since the last look; Python's own is 700. Ten times what the judgement of a node
# makes, so that what a fleet of any size leaves behind is some megabytes at most.
OBJECTS = 100_000


def seldom() -> None:
    """Look for garbage seldom, and not when the process ends."""
    gc.set_threshold(OBJECTS, 20, 50)
    atexit.register(gc.freeze)
