"""RUNS IN THE SERVER: start SGLang with its keys, which no command line and no log shows.

`RELEASE/bin/python sglang-serve RELEASE/bin/sglang serve ARGUMENTS` does what the program alone
would, but SGLang takes its keys as arguments only, and writes all of them into its log:

- the API key comes from the unit's credential, and becomes an argument inside of this process. The
  key of administrative routes is a random one, which no client has: they change models and caches;
- both are replaced in everything that the server and its processes print;
- GPUs are named by UUID, as an index may be another GPU after a reboot; SGLang reads only numbers;
- a taken port ends the start at once: SGLang would load the model first, and then stay, unready.

SGLang starts its other processes by `spawn`, which runs this file again in each of them, without
`main`. Standard library, but for `pynvml`, which SGLang requires.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

WRONG = 2
"""The exit status after which the unit does not restart."""
KEYS = ("GPUFLEET_SGLANG_API_KEY", "GPUFLEET_SGLANG_ADMIN_KEY")
"""Variables with the keys, for the processes that the server starts."""
GPUS = "CUDA_VISIBLE_DEVICES"
HIDDEN = "<hidden>"


class WithoutKeys(io.TextIOWrapper):
    """Standard output or error that replaces keys in what is written to it."""

    def __init__(self, stream: Any, keys: list[str]) -> None:
        """Write to the file of `stream`."""
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self.keys = keys

    def write(self, text: str) -> int:
        """Write a text without the keys; return the length of the text."""
        shown = text
        for key in self.keys:
            shown = shown.replace(key, HIDDEN)
        super().write(shown)
        return len(text)


def hide_keys() -> None:
    """Replace the keys in all that this process prints from now on."""
    keys = [os.environ[name] for name in KEYS if os.environ.get(name)]
    if keys:
        sys.stdout, sys.stderr = WithoutKeys(sys.stdout, keys), WithoutKeys(sys.stderr, keys)


def refuse(why: str) -> None:
    """End the start with a sentence, and with the status that the unit does not restart after."""
    sys.stderr.write(why + "\n")
    sys.exit(WRONG)


def read_keys() -> list[str]:
    """Return the arguments with the keys."""
    file = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"), "api-key")
    os.environ[KEYS[1]] = secrets.token_hex(32)
    found = ["--admin-api-key", os.environ[KEYS[1]]]
    if file.exists():
        os.environ[KEYS[0]] = file.read_text("utf-8").strip()
        if not os.environ[KEYS[0]]:
            refuse("the API key is empty: put one into the file of `api_key_file`, and deploy")
        found += ["--api-key", os.environ[KEYS[0]]]
    return found


def number_gpus() -> None:
    """Replace the UUIDs of GPUs by their numbers. A GPU that is not there ends the start."""
    named = os.environ.get(GPUS, "").split(",")
    if not any(name.startswith("GPU-") for name in named):
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in named]
        numbers = [pynvml.nvmlDeviceGetIndex(handle) for handle in handles]
    except pynvml.NVMLError as error:
        # Not `refuse`: after the driver is back, a restart finds the GPU.
        sys.exit("%s=%s: %s" % (GPUS, ",".join(named), error))
    os.environ[GPUS] = ",".join(map(str, numbers))


def check_port(arguments: list[str]) -> None:
    """End the start if another program has the server's port."""
    value = dict(zip(arguments, arguments[1:]))
    host, port = value.get("--host", "127.0.0.1"), value.get("--port")
    if port is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            there.bind((host, int(port)))
        except OSError as error:
            sys.exit("cannot listen on %s port %s: %s" % (host, port, error.strerror))


def main() -> None:
    """Become the program of the first argument, with the other arguments and the keys."""
    program, arguments = sys.argv[1], sys.argv[2:]
    check_port(arguments)
    keys = read_keys()
    hide_keys()
    number_gpus()
    # Otherwise it first looks into the model's files for a diffusion model.
    sys.argv = [program, *arguments, "--model-type", "llm", *keys]
    # Not as `__main__`: the processes that SGLang spawns would run the program instead of this.
    code = runpy.run_path(program, run_name="gpufleet_sglang")
    sys.exit(code["main"]())


if __name__ == "__main__":
    main()
else:
    hide_keys()
