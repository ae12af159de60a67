"""RUNS ON THE NODE: send one alert to this node's Alertmanager, and wait for its delivery.

Takes (JSON header `PARAMETERS`):
  url      URL of Alertmanager on this node
  alert    the alert, in the form of Alertmanager's API
  seconds  the most time to wait for a delivery
Prints one JSON document {"schema": 1, "error": null or a sentence, "before": text, "after": text}.
`before` is Alertmanager's /metrics before the alert. `after` is /metrics when Alertmanager has
counted a notification, or when the time is over. The program needs only Python 3.8 and the standard
library.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}
REQUEST_SECONDS = 5
BETWEEN_SECONDS = 1
BODY_BYTES = 4 << 20
COUNTED = re.compile(r"^alertmanager_notifications(?:_failed)?_total\{.*$", re.MULTILINE)


def main() -> None:
    """Send the alert and print the document."""
    found: "dict[str, Any]" = {"schema": 1, "error": None, "before": "", "after": ""}
    end = time.monotonic() + PARAMETERS["seconds"]
    try:
        found["before"] = found["after"] = request("/metrics")
        request("/api/v2/alerts", [PARAMETERS["alert"]])
        while time.monotonic() < end and counts(found["after"]) == counts(found["before"]):
            time.sleep(BETWEEN_SECONDS)
            found["after"] = request("/metrics")
    except urllib.error.HTTPError as problem:
        said = problem.read(4096).decode("utf-8", "replace").strip()
        found["error"] = "%s: %s" % (PARAMETERS["url"], said or problem)
    except (OSError, ValueError) as problem:
        found["error"] = "%s: %s" % (PARAMETERS["url"], problem)
    sys.stdout.write(json.dumps(found) + "\n")


def counts(page: str) -> "list[str]":
    """Return the lines of /metrics that change when a notification is sent or fails."""
    return COUNTED.findall(page)


def request(path: str, document: Any = None) -> str:
    """Return Alertmanager's response. Raises `OSError` or `ValueError` if there is none."""
    asked = urllib.request.Request(
        PARAMETERS["url"] + path,
        data=None if document is None else json.dumps(document).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=REQUEST_SECONDS) as answer:
        text: str = answer.read(BODY_BYTES).decode("utf-8", "replace")
    return text


if __name__ == "__main__":
    main()
