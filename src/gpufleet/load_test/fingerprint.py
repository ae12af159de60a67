"""
Describe the measured replica, and everything on which the result of its measurement depends. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gpufleet.redact import HIDDEN, find_secrets, hide_secrets, is_secret_name

# vLLM's options for a replica's address and name, which do not affect its capacity.
_ADDRESSES = (
    "--api-key", "--data-parallel-address", "--data-parallel-rpc-port", "--host", "--master-addr",
    "--master-port", "--node-rank", "--port", "--served-model-name", "--ssl-ca-certs",
    "--ssl-certfile", "--ssl-keyfile", "--uds",
)  # fmt: skip


@dataclass(frozen=True)
class Fingerprint:
    """Everything that affects the rate of one replica."""

    weights: str
    """The repository or folder of the model's weights."""
    revision: str
    """Commit of the repository; "" for a folder."""
    release: str
    """The id of vLLM's release."""
    arguments: tuple[str, ...]
    """The sorted arguments of the replica's systemd unit, without addresses and names."""
    hardware: tuple[str, ...]
    """GPUs of one replica, such as `2 x NVIDIA H100 80GB HBM3`."""

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the fingerprint."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """
        Return how `other` differs, one text per field, such as `release 0.31.0-ab, now 0.32.0-cd`.
        """
        found = []
        for name in ("weights", "revision", "release"):
            then, now = getattr(self, name), getattr(other, name)
            if then != now:
                found.append(f"{name} {then or 'none'}, now {now or 'none'}")
        for name in ("arguments", "hardware"):
            then, now = getattr(self, name), getattr(other, name)
            if then != now:
                gone = ", ".join(each for each in then if each not in now) or "none of these"
                new = ", ".join(each for each in now if each not in then) or "none of these"
                found.append(f"{name} {gone}, now {new}")
        return tuple(found)


@dataclass(frozen=True)
class Subject:
    """The measured replica, or one of several equal ones."""

    weights: str
    """The repository or folder of the model's weights."""
    revision: str
    """Commit of the repository; "" for a folder."""
    release: str
    """The id of vLLM's release."""
    arguments: tuple[str, ...]
    """The arguments of the replica's systemd unit, one per line. Keys and tokens are replaced."""
    gpus: Mapping[str, int]
    """The number of GPUs of one replica, by GPU name."""
    driver: str | None
    """The NVIDIA driver's version, or None if it is unknown or there is no driver."""
    nodes: tuple[str, ...]
    """The nodes of the replicas."""

    def __post_init__(self) -> None:
        # Anyone may read a result's file, and equal replicas need not have equal keys.
        object.__setattr__(self, "arguments", tuple(map(_without_secrets, self.arguments)))

    @property
    def fingerprint(self) -> Fingerprint:
        """Return everything on which the result of a measurement depends."""
        options = (each for each in self.arguments if each.startswith("-"))
        kept = (each for each in options if re.split(r"[ =]", each)[0] not in _ADDRESSES)
        hardware = tuple(f"{count} x {name}" for name, count in sorted(self.gpus.items()))
        return Fingerprint(self.weights, self.revision, self.release, tuple(sorted(kept)), hardware)


def _without_secrets(line: str) -> str:
    """
    Return an argument with all keys and tokens replaced.

    >>> _without_secrets("--api-key abc"), _without_secrets("--port 8000")
    ('--api-key (not shown)', '--port 8000')
    """
    name = re.split(r"[ =]", line, maxsplit=1)[0]
    value = line[len(name) + 1 :]
    if value and is_secret_name(name):
        return f"{line[: len(name) + 1]}{HIDDEN}"
    try:
        inside = json.loads(value.strip("'"))
    except (ValueError, RecursionError):
        inside = None
    return hide_secrets(line, find_secrets(inside))
