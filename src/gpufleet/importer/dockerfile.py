"""Convert a Dockerfile whose image serves with vLLM to shell lines.  Pure.

Contract: the ENTRYPOINT and CMD of the last stage are read, in both of Docker's forms. The stage's
ENV comes before them. The image vllm/vllm-openai has the entrypoint `vllm serve`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"^\s*([A-Za-z]+)\s+(.*)$", re.DOTALL)
_CONTINUED = re.compile(r"\\[ \t]*\n(?:[ \t]*#[^\n]*\n)*")
_SERVES = ("vllm/vllm-openai", "vllm-openai:")


def is_dockerfile(text: str) -> bool:
    """Return whether the first instruction is FROM, or ARG with FROM after it."""
    first = next(_instructions(text), ("", ""))
    return first[0] == "FROM" or (
        first[0] == "ARG" and re.search(r"(?mi)^FROM\s", text) is not None
    )


def as_script(text: str) -> str:
    """
    Return the shell lines that a container of the image runs.

    >>> as_script('FROM vllm/vllm-openai:v0.11.0\\nENV A=b\\nCMD ["--model", "m"]')
    'export A=b\\nvllm serve --model m'
    """
    variables: list[str] = []
    entry, command = "", ""
    for name, rest in _instructions(text):
        if name == "FROM":
            variables, command = [], ""
            entry = "vllm serve" if any(image in rest for image in _SERVES) else ""
        elif name == "ENV":
            variables.append(f"export {_assignments(rest)}")
        elif name == "ENTRYPOINT":
            entry, command = _command(rest), ""
        elif name == "CMD":
            command = _command(rest)
    return "\n".join([*variables, f"{entry} {command}".strip()])


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    for line in _CONTINUED.sub(" ", text).splitlines():
        match = _INSTRUCTION.match(line)
        if match and not line.lstrip().startswith("#"):
            yield match[1].upper(), match[2].strip()


def _command(rest: str) -> str:
    try:
        words = json.loads(rest)
    except (ValueError, RecursionError):
        return rest
    is_exec = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return shlex.join(words) if is_exec else rest


def _assignments(rest: str) -> str:
    """Return the assignments of ENV as `A=b C=d`. In a Dockerfile, `A b` is also possible."""
    if "=" in rest.split(maxsplit=1)[0]:
        return rest
    name, _, value = rest.partition(" ")
    return f"{name}={shlex.quote(value.strip())}"
