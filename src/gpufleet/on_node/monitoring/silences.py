"""RUNS ON THE NODE: read and change silences of this node's Alertmanager.

Alertmanager can be reached only from its own node, so this program runs there.
Takes (`PARAMETERS`):
  url    URL of Alertmanager on this node
  open   silences to create, in the form of Alertmanager's API
  close  ids of silences to end
Prints one JSON document {"error": null or a sentence, "opened": [id, ...], "silences": [...]}.
`silences` has all silences after the changes, in the form of Alertmanager's API. The program needs
only Python 3.8 and the standard library.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}
SECONDS = 10


def main() -> None:
    """Create and end silences, then print the document."""
    found: "dict[str, Any]" = {"error": None, "opened": [], "silences": []}
    try:
        for silence in PARAMETERS["open"]:
            found["opened"].append(request_api("POST", "silences", silence)["silenceID"])
        for known in PARAMETERS["close"]:
            request_api("DELETE", "silence/" + known)
        found["silences"] = request_api("GET", "silences")
    except urllib.error.HTTPError as problem:
        said = problem.read(4096).decode("utf-8", "replace").strip()
        found["error"] = "%s: %s" % (PARAMETERS["url"], said or problem)
    except (OSError, ValueError, KeyError) as problem:
        found["error"] = "%s: %s" % (PARAMETERS["url"], problem)
    sys.stdout.write(json.dumps(found) + "\n")


def request_api(method: str, path: str, document: Any = None) -> Any:
    """
    Return the answer of Alertmanager's API. Raises `OSError` or `ValueError` if there is none.
    """
    request = urllib.request.Request(
        PARAMETERS["url"] + "/api/v2/" + path,
        data=None if document is None else json.dumps(document).encode(),
        headers={"Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text = answer.read(16 << 20)
    return json.loads(text) if text.strip() else None


if __name__ == "__main__":
    main()
