"""Read the YAML file of vLLM's `--config`.  Pure.

Contract: the file is read as vLLM 0.32 reads it (`utils/argparse_utils.py`, `load_config_file`).
`model` is the model. Any other key is a long option without its dashes. Its value decides what the
option becomes:

* true: the option without a value.
* false: `--no-KEY` if the release has this option, otherwise nothing.
* a list: the option with one word after another.
* a mapping: the option with JSON.
* any other value: the option with the value's text in Python.

vLLM 0.9.2 ignores false. For a list or a mapping, it passes one word, which is the value's text in
Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpufleet.flags.schema import Schema
from gpufleet.importer.server import Launch, Note, Source


def is_config(document: Mapping[str, Any], schema: Schema) -> bool:
    """Return whether at least half of a mapping's keys are options of `vllm serve`."""
    known = sum(_option(key) in schema.by_option for key in document)
    return known > 0 and known * 2 >= len(document)


def read_config(document: Mapping[str, Any], name: str, schema: Schema) -> Source:
    """Return the server that a configuration file describes."""
    argv: list[str] = []
    notes: list[Note] = []
    for key, value in document.items():
        option = _option(key)
        if value is False:
            # The key is not changed, because vLLM looks it up before it replaces `_` by `-`.
            if f"--no-{key}" in schema.by_option:
                argv.append(f"--no-{key}")
            else:
                notes.append(
                    Note(f"`{key}: false` is dropped: vLLM reads nothing from it in its file")
                )
        elif value is True:
            argv.append(option)
        elif isinstance(value, list):
            if value:
                argv += (option, *map(str, value))
        elif isinstance(value, Mapping):
            argv += (option, json.dumps(value, default=str))
        else:
            argv.append(f"{option}={value}")
    return Source((Launch(name, tuple(argv), notes=tuple(notes)),))


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")
