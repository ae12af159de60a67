"""What a program for nodes is given, read out of its text."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

from gpufleet.remote.payload import Payload


def parameters(program: Payload) -> dict[str, Any]:
    """Return the parameters that a program carries."""
    packed = re.search(r'"PARAMETERS": json.loads\(text\("([^"]+)"\)\)', program[:])
    assert packed
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return found
