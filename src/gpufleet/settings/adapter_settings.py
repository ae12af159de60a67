"""Settings of LoRA adapters, and checks of the adapters' names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from gpufleet.settings.base import KeyPath, Setting, Sha256, pattern_rule

# Clients send this name. HAProxy's maps and `--lora-modules NAME=PATH` contain it. A name has no
# `/`, so that it never looks like a path.
AdapterName = Annotated[
    str,
    pattern_rule(
        r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,62}[A-Za-z0-9])?",
        "at most 64 letters, digits, `.`, `_`, `:` and `-`, with a letter or digit first and last",
    ),
]

FLAGS = frozenset({"default-mm-loras", "enable-lora", "lora-modules"})
"""Flags that gpufleet sets from `adapters`, and flags that would load other adapters."""


class Adapter(Setting):
    """A LoRA adapter. Every replica of the model loads it."""

    source: Annotated[
        str,
        pattern_rule(
            # `=` and `,` are not allowed, because of `--lora-modules NAME=PATH`.
            r"(/[A-Za-z0-9_+@.-]+)+|[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*",
            "a Hugging Face id, for example org/sql-lora, or the absolute path of a "
            "directory on the node, for example /srv/adapters/sql; the path may contain "
            "letters, digits, `.`, `_`, `+`, `@` and `-`",
        ),
        Field(
            description="Hugging Face id, which the node downloads, or the absolute path of a "
            "directory on the node"
        ),
    ]
    revision: Annotated[
        str | None,
        pattern_rule(
            r"[0-9a-f]{40}",
            "a commit with all of its 40 digits; `git ls-remote` prints the commit, and "
            "the adapter's page on the Hub shows the commit under `Files`, `History`",
        ),
        Field(description="Commit of a Hugging Face adapter, with all 40 digits"),
    ] = None
    sha256: Annotated[
        Sha256 | None,
        Field(
            description="If `source` is a path: SHA-256 of the file "
            "`adapter_model.safetensors` in it, with 64 digits. Nodes serve a copy with "
            "this content. null: nodes serve the files that they find at each start"
        ),
    ] = None

    @property
    def is_path(self) -> bool:
        """Return whether the adapter is a directory on the node, not a download."""
        return self.source.startswith("/")

    @model_validator(mode="after")
    def _content_is_pinned(self) -> Adapter:
        mistakes = []
        if self.is_path and any(part in {".", ".."} for part in self.source.split("/")):
            mistakes.append("`source` must be an absolute path without the parts . and ..")
        if self.is_path and self.revision is not None:
            mistakes.append(
                "`revision` has no effect if `source` is a path: remove `revision`; to pin the "
                "files of a path, set `sha256`"
            )
        if not self.is_path and self.revision is None:
            mistakes.append(
                f"`revision` is missing: set the commit of {self.source}, so that every replica "
                "serves the same files"
            )
        if not self.is_path and self.sha256 is not None:
            mistakes.append(
                "`sha256` has no effect if `source` is a Hugging Face id: remove `sha256`; "
                "`gpufleet lock INVENTORY --models` records the hashes of all files of "
                "this commit"
            )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


def flag_mistakes(adapters: Mapping[str, Adapter], flags: Iterable[str]) -> Iterator[str]:
    """Yield a mistake if an entry sets adapters both in `flags` and in `adapters`."""
    if adapters and (both := sorted(FLAGS & set(flags))):
        yield (
            f"`flags` and `adapters` both set {', '.join(both)}: remove {', '.join(both)} "
            "from `flags`, and write all adapters in `adapters`"
        )


class NamedModel(NamedTuple):
    """The names of an entry of `serving` on one node."""

    node: str
    entry: str
    served_name: str | None
    adapters: tuple[str, ...]


def name_clashes(models: Iterable[NamedModel]) -> Iterator[tuple[str, KeyPath, str]]:
    """
    Yield a mistake for each adapter whose name is also a model's name or a different adapter's
    name.

    A mistake is (node, key, message). An entry that several nodes declare counts as one entry.
    """
    every = tuple(models)
    owners: dict[str, set[str]] = {}
    for each in every:
        owners.setdefault(each.entry, set()).add(f"the entry serving.{each.entry}")
        if each.served_name:
            owners.setdefault(each.served_name, set()).add(f"serving.{each.entry}.served_name")
        for name in each.adapters:
            owners.setdefault(name, set()).add(f"serving.{each.entry}.adapters.{name}")
    for each in every:
        for name in each.adapters:
            key = ("serving", each.entry, "adapters", name)
            if others := sorted(owners[name] - {".".join(key)}):
                yield (
                    each.node,
                    key,
                    f"{'.'.join(key)}: clients also use this name for "
                    f"{' and '.join(others)}: give the adapter a different name",
                )
