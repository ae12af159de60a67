"""Inputs that no command should trip over, and a way to run a command on one of them."""

from __future__ import annotations

import copy
import gzip
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gpufleet.cli.common_options import print_error
from gpufleet.cli.main import gpufleet
from gpufleet.errors import FleetError

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\n\t\n",
    "NUL": b"\0\0\0\0",
    "Latin-1": "größe: 1\n".encode("latin-1"),
    "UTF-16": "a: 1\n".encode("utf-16"),
    "BOM": b"\xef\xbb\xbf{}",
    "compressed": gzip.compress(b"{}", mtime=0),
    "one long line": b"a" * 100_000,
    "lists in lists": b"[" * 20_000,
    "objects in objects": b'{"a":' * 20_000,
    "YAML in YAML": b"".join(b" " * n + b"a:\n" for n in range(1500)),
    "aliases": b"a0: &a0 x\n"
    + b"".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 12)),
    "a cycle": b"a: &a\n  b: *a\n",
    "an unknown alias": b"a: *b\n",
    "a colon": b":",
    "a tab": b"serving:\n\tq: 1\n",
    "a key twice": b"vllm: {}\nvllm: {}\n",
    "a Python object": b"a: !!python/object/apply:os.system ['true']\n",
    "a vault": b"a: !vault |\n  1234\n",
    "a huge number": b'{"schema": ' + b"9" * 6000 + b"}",
    "no number": b'{"schema": NaN, "a": Infinity}',
    "a list": b"[1, 2, 3]",
    "a text": b'"text"',
    "a number": b"7",
    "null": b"null",
    "a date": b"a: 2026-13-45\n",
    "escape sequences": b'a: "\\e]0;x\\a\\e[2J"\nb: \x1b[31m\n',
    "half a surrogate": b'{"a": "\\ud800"}',
    "a merge of a number": b"<<: 3\n",
    "numbers as keys": b"1: 2\n3: {4: 5}\n",
    "cut off": b'{"schema": 1, "models": {"a',
    "quotes": b"a: 'b\n",
    "several documents": b"a: 1\n---\nb: 2\n---\n- 3\n",
    "keys of settings with texts": b"vllm: x\nserving: y\ngpus: z\nchecks: 1\n",
    "keys of settings with lists": b"vllm: [1]\nserving: [1]\ngpus: [1]\ngateway: [{}]\n",
    "a shell's script": b'#!/bin/sh\nvllm serve $(cat x) "unfinished\n',
}
"""Contents of files, by what is wrong with them."""

WRONG: tuple[Any, ...] = (None, 7, "text", [], {}, [[None]], {"missing": 3})
"""What stands in the place of a value of another kind."""

SAID_BY_LIBRARIES = (
    "Traceback",
    "pydantic",
    "validation error",
    "Input should be",
    "[type=",
    "For further information",
    "Expecting value",
    "Expecting property name",
    "Extra data",
    "Unterminated string",
    "while scanning",
    "while parsing",
    "found character",
    "mapping values are not allowed",
    "expected <",
    "could not determine a constructor",
    "codec can't decode",
    "KeyError",
    "TypeError",
    "AttributeError",
    "ValueError",
    "RecursionError",
    "index out of range",
    "NoneType",
    "not subscriptable",
    "has no attribute",
    "unhashable",
    "safetensors_rust",
)
"""Words of validators, parsers and Python that are none of an operator's."""


PAGE = "measured/hostile-inputs.md"
ANSWERED = "all in sentences"


@dataclass(frozen=True)
class Row:
    """A command line, and files that are written before it runs."""

    name: str
    command: tuple[str, ...]
    files: dict[str, bytes]


def run(arguments: tuple[str, ...]) -> tuple[int | str, str, float]:
    """
    Return a command's exit status, or the exception that it ended in; its words; seconds.

    Seconds of the processor: those of the clock count where they are far more, on a busy machine.
    """
    said = io.StringIO()
    begun, clock = time.process_time(), time.monotonic()
    status: int | str
    with redirect_stdout(said), redirect_stderr(said):
        try:
            found = gpufleet.main(list(arguments), prog_name="gpufleet", standalone_mode=False)
            status = found if isinstance(found, int) else 0
        except click.ClickException as error:
            error.show(file=said)
            status = error.exit_code
        except click.exceptions.Exit as error:
            status = error.exit_code
        except FleetError as error:
            print_error(error)
            status = 2
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except Exception as error:  # noqa: BLE001  # what an operator would see as a traceback
            where = error.__traceback__
            while where and where.tb_next:
                where = where.tb_next
            at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else ""
            status = f"{type(error).__name__}: {str(error)[:200]} at {at}"
    seconds = max(time.process_time() - begun, (time.monotonic() - clock) / 20)
    return status, said.getvalue(), seconds


def fault(row: Row, folder: Path) -> str | None:
    """Return what is wrong with how a command takes an input; None: nothing."""
    for name, content in row.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    status, said, seconds = run(tuple(each.replace("{}", str(folder)) for each in row.command))
    if isinstance(status, str):
        return f"{row.name}: {status}"
    if status not in {0, 1, 2}:
        return f"{row.name}: exit status {status}"
    if seconds > 10:
        return f"{row.name}: {seconds:.0f} s"
    if "\x1b" in said.replace("\x1b[0m", ""):
        return f"{row.name}: an escape sequence reaches the terminal"
    if words := [each for each in SAID_BY_LIBRARIES if each in said]:
        at = said.index(words[0])
        return f"{row.name}: says {words[0]!r}: ...{said[max(0, at - 100) : at + 100]!r}"
    if status and not said.strip():
        return f"{row.name}: says nothing"
    return None


def changed(value: Any, deepest: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield each place of a document down to a depth, and what makes a copy with another value."""
    if not deepest or not isinstance(value, dict | list):
        return
    places = value.items() if isinstance(value, dict) else list(enumerate(value))[:1]
    for key, below in places:

        def put(wrong: Any, key: Any = key) -> Any:
            found = copy.copy(value)
            found[key] = wrong
            return found

        yield str(key), put
        for name, put_below in changed(below, deepest - 1):

            def put_both(wrong: Any, put_below: Any = put_below, put: Any = put) -> Any:
                return put(put_below(wrong))

            yield f"{key}.{name}", put_both


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()
