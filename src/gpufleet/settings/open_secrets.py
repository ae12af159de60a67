"""Find secrets among a node's variables.  Pure.

Variables are under version control. Their values appear in units and command lines, which every
account of a node can read. So a secret belongs in a file that git does not track, and a setting has
the path of this file. A value is recognised as a secret by its form. In environment variables and
flags, it is also recognised by the name of its key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.redact import find_secrets, is_secret, is_secret_name
from gpufleet.settings.base import KeyPath

_USER_IN_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s?#@]*@", re.IGNORECASE)
_FILE = "write the secret to a file that git does not track"


@dataclass(frozen=True)
class OpenSecret:
    """A secret in variables: its key, its value, and a message that explains what to do instead."""

    at: KeyPath
    value: str
    sentence: str


def open_secrets(data: Mapping[str, Any]) -> Iterator[OpenSecret]:
    """
    Yield the secrets in variables.

        {"vllm": {"environment": {"AWS_SECRET_ACCESS_KEY": "abc"}}}
        -> vllm.environment.AWS_SECRET_ACCESS_KEY: is a secret by its name, ...
    """
    for at, value in _strings(data):
        if _USER_IN_ADDRESS.search(value):
            yield OpenSecret(at, value, _in_address(at))
        elif is_secret(value):
            yield OpenSecret(at, value, f"looks like a key or a token: {_remedy(at)}")
        elif value and _is_free(at) and is_secret_name(str(at[-1])):
            yield OpenSecret(at, value, f"is a secret, judging by its name: {_remedy(at)}")
        elif _is_free(at):
            for inner in find_secrets(_json(value)):
                yield OpenSecret(at, inner, f"contains a secret in its JSON: {_remedy(at)}")


def _strings(value: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _strings(below, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from _strings(below, (*at, number))
    elif isinstance(value, str):
        yield at, value


def _is_free(at: KeyPath) -> bool:
    """
    Return whether the operator chose the name of a key, as in environment variables and in flags.
    """
    return bool({"environment", "flags", "_env"} & set(at[:-1]))


def _json(value: str) -> Any:
    if value[:1] not in {"{", "["}:
        return None
    try:
        return json.loads(value)
    except ValueError:
        return None


def suggested_file(variable: str, owner: str = "") -> str:
    """
    Return the file name that messages suggest for the value of a secret variable.

    >>> suggested_file("AWS_SECRET_ACCESS_KEY"), suggested_file("MY_KEY", "chat")
    ('secrets/aws-secret-access-key', 'secrets/chat-my-key')
    """
    return "secrets/" + "-".join(filter(None, (owner, variable.lower().replace("_", "-"))))


def _remedy(at: KeyPath) -> str:
    if "environment" in at[:-1]:
        name = str(at[-1])
        file = suggested_file(name)
        return (
            "all users of the node can read units, and all users of the repository can "
            f"read variables: {_FILE}, and set the file in `environment_files` instead: "
            f"{{{name}: {file}}}"
        )
    if "flags" in at[:-1]:
        return (
            f"all users of the node can read arguments: {_FILE}, and set the file in "
            "`environment_files`, if vLLM has an environment variable for this secret"
        )
    return f"{_FILE}, and use a setting that expects the path of such a file (`..._file`)"


def _in_address(at: KeyPath) -> str:
    token = ", or from `hf_token_file` (Hugging Face Hub)" if at[-1] == "hf_endpoint" else ""
    return (
        "contains an address with a user or a password, which would appear in command "
        "lines: write the address without user and password; nodes read both from "
        f"/root/.netrc (pip, uv) and /etc/apt/auth.conf.d (apt){token}"
    )
