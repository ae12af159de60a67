#!/usr/bin/python3 -I
"""A stand-in for DCGM's command: `dcgmi discovery -l` and `dcgmi --version`.

Runs on the node: standard library only, Python 3.8. It refuses unsupported commands, because a
diagnosis that always passes would be false.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

VERSION = "@VERSION@"
TIMEOUT = 10.0  # seconds


def main() -> None:
    """Run the only supported sub-command."""
    if sys.argv[1:] in (["--version"], ["-v"]):
        sys.stdout.write(f"dcgmi  version: {VERSION}\n")
    elif sys.argv[1:] in (["discovery", "-l"], ["discovery", "--list"]):
        discovery(ask("127.0.0.1", 5555))
    else:
        sys.exit("dcgmi: this is the lab's stand-in; it knows `discovery -l` and `--version`.")


def ask(host: str, port: int) -> dict[str, Any]:
    """Return the host engine's readings."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT) as connection:
            connection.sendall(b"readings\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
    except (OSError, ValueError):
        sys.exit(
            "Error: unable to establish a connection to the specified host: localhost\n"
            "Error: Unable to connect to host engine. Host engine connection invalid/disconnected."
        )
    return answer


def discovery(answer: dict[str, Any]) -> None:
    """Print the GPUs."""
    if "error" in answer:
        sys.exit("Error: Cannot get GPU list from remote node. Return: " + answer["error"])
    sys.stdout.write("{} GPUs found.\n".format(len(answer["gpus"])))
    for gpu in answer["gpus"]:
        identity = "GPU {gpu}: {name} ({pci_bus_id}, {uuid})\n".format(**gpu)
        sys.stdout.write(identity)


if __name__ == "__main__":
    main()
