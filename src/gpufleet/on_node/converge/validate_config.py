"""RUNS ON THE NODE: validate a configuration with its server's program before it is installed.

Takes (`PARAMETERS`):
  files    {path below the configuration's directory: content in base64}
  argv     the program that checks the configuration, and its arguments; the program runs in that
           directory
  hidden   secrets in base64, which are removed from the output
  seconds  the most time that the check may take
Prints one JSON document {"error": null, or the program's output}.

The files are written to a directory in memory that only root can read. They are removed after the
check. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}
CHARACTERS = 2000
# Characters that a program may print in a different form than they have in the file.
ESCAPED = re.compile(r"[^\x21-\x7e]+|[\"'\\\\%&<>]")
# Shorter parts of a secret are not hidden, because they may be a word of the message.
SHORTEST = 4


def main() -> None:
    """Validate the configuration and print the document."""
    sys.stdout.write(json.dumps({"error": config_error()}) + "\n")


def config_error() -> "str | None":
    """Return why the configuration is refused, or None if it is valid."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-", dir="/run") as folder:
        for path, content in PARAMETERS["files"].items():
            at = os.path.join(folder, path)
            os.makedirs(os.path.dirname(at), mode=0o700, exist_ok=True)
            with open(at, "wb") as file:
                file.write(base64.b64decode(content))
        try:
            done = subprocess.run(
                PARAMETERS["argv"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PARAMETERS["seconds"],
                check=False,
            )
        except OSError as problem:
            return "%s cannot be run: %s" % (PARAMETERS["argv"][0], problem.strerror)
        except subprocess.TimeoutExpired:
            return "%s took more than %s s" % (PARAMETERS["argv"][0], PARAMETERS["seconds"])
        if done.returncode == 0:
            return None
        said = done.stdout.decode("utf-8", "replace").replace(folder + "/", "")
        return hide_secrets(said.strip())[-CHARACTERS:] or "it ended with %d" % done.returncode


def hide_secrets(said: str) -> str:
    """Return a text without secrets. Secrets with escaped characters are removed too."""
    for secret in PARAMETERS["hidden"]:
        text = base64.b64decode(secret).decode("utf-8", "replace")
        for part in sorted(ESCAPED.split(text), key=len, reverse=True):
            if len(part) >= SHORTEST:
                said = said.replace(part, "***")
    return said


if __name__ == "__main__":
    main()
