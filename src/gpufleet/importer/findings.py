"""The result of reading one server: settings, notes, and the secrets to hide.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpufleet import redact
from gpufleet.importer.placed import FIRST
from gpufleet.importer.server import Note
from gpufleet.settings.engine_flags import EngineName
from gpufleet.settings.open_secrets import suggested_file

UNSET = re.compile(r"\$\{?[A-Za-z_0-9@*#(]|`")
"""A reference to a variable that the imported text does not set."""

_FILES = {"api_key_file": "secrets/{section}-api-key", "hf_token_file": "secrets/hf-token"}
_TO_A_FILE = "write the value to a file that git does not track"

_ORDER = (
    "model",
    "revision",
    "engine",
    "served_name",
    "kind",
    "replicas",
    "context",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "expert_parallel",
    "distributed_executor_backend",
    "data_parallel_balancing",
    "span_nodes",
    "port",
    "drain_seconds",
    "adapters",
    "flags",
    "environment",
    "environment_files",
)


@dataclass
class Findings:
    """
    What was found about one server. The server's name in `serving` is `key`.

    `section` is the engine whose section has the settings that all servers share.
    """

    key: str
    section: EngineName = "vllm"
    served: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    """Settings for the engine's section. All servers share them."""
    notes: list[tuple[int, Note]] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)

    def say(self, text: str, *, decide: bool = False, at: int = FIRST) -> None:
        """
        Add a note. `at` is the position in the command line of the word that the note is about.
        """
        self.notes.append((at, Note(text, decide=decide)))

    def hide(self, value: str) -> None:
        """Hide a secret in all notes."""
        if not UNSET.match(value):  # otherwise the value is the name of a variable
            self.secrets.append(value)

    def drop_secret(self, what: str, value: str, setting: str | None, at: int = FIRST) -> None:
        """
        Drop a secret, and add a note about it.

        `setting` is the setting for the secret's file. If there is no such setting, it is a
        sentence with the reason, or None.
        """
        self.hide(value)
        if setting is None:
            self.say(
                f"{what} is dropped, and its value is not shown: all users of the "
                "repository can read settings; pass the value to the unit as a systemd "
                "credential",
                decide=True,
                at=at,
            )
            return
        if setting not in _FILES:
            self.say(f"{what} is dropped, and its value is not shown: {setting}", at=at)
            return
        self.shared[setting] = _FILES[setting].format(section=self.section)
        self.say(
            f"{what} is dropped, and its value is not shown: {_TO_A_FILE}, and set "
            f"{self.section}.{setting} to this file",
            decide=True,
            at=at,
        )

    def drop_secret_variable(self, name: str, value: str) -> None:
        """Drop a secret variable, and set a file for its value in `environment_files`."""
        self.hide(value)
        file = suggested_file(name, self.key)
        self.served.setdefault("environment_files", {})[name] = file
        self.say(
            f"{name} is dropped, and its value is not shown: {_TO_A_FILE}, and add this "
            f"file to `environment_files` ({file})",
            decide=True,
        )

    def ordered(self) -> dict[str, Any]:
        """
        Return the server's entry of `serving`. Its keys are in the order in which people read them.
        """
        return {name: self.served[name] for name in _ORDER if name in self.served}

    def sentences(self) -> Iterator[Note]:
        """
        Yield the notes in the order of the command line. Each note appears once and has no secrets.
        """
        seen = set()
        for _, note in sorted(self.notes, key=lambda one: one[0]):
            text = redact.hide_secrets(" ".join(note.text.split()), self.secrets)
            if text not in seen:
                seen.add(text)
                yield Note(text, self.key, note.decide)
