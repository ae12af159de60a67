"""Settings of LoRA adapters, and names that adapters cannot have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from gpufleet.settings.base import KeyPath, Setting, Sha256, pattern_rule

# Clients send it; HAProxy's maps and `--lora-modules NAME=PATH` contain it. It has no `/`, so that
# it never looks like a path.
AdapterName = Annotated[
    str,
    pattern_rule(
        r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,62}[A-Za-z0-9])?",
        "at most 64 letters, digits, `.`, `_`, `:` and `-`, with a letter or digit first and last",
    ),
]

FLAGS = frozenset({"default-mm-loras", "enable-lora", "lora-modules"})
"""Flags that `adapters` sets, or that would load other adapters."""


class Adapter(Setting):
    """A LoRA adapter that every replica of a model loads."""

    source: Annotated[
        str,
        pattern_rule(
            # Without `=` and `,`: `--lora-modules NAME=PATH`.
            r"(/[A-Za-z0-9_+@.-]+)+|[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*",
            "a Hugging Face id, as org/sql-lora, or the absolute path of a directory on the node, "
            "as /srv/adapters/sql, of letters, digits, `.`, `_`, `+`, `@` and `-`",
        ),
        Field(description="Hugging Face id (downloaded on the node), or an absolute path there"),
    ]
    revision: Annotated[
        str | None,
        pattern_rule(
            r"[0-9a-f]{40}",
            "a commit, all 40 digits of it: `git ls-remote` prints it, and so does the adapter's "
            "page on the Hub under `Files`, `History`",
        ),
        Field(description="Commit of a Hugging Face adapter, all 40 digits"),
    ] = None
    sha256: Annotated[
        Sha256 | None,
        Field(
            description="SHA-256 of `adapter_model.safetensors` below a path, 64 digits: nodes "
            "serve a copy with this content; null: the files found at each start"
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
            mistakes.append("`source` must be a plain absolute path, without . or ..")
        if self.is_path and self.revision is not None:
            mistakes.append("`revision` has no effect for a path: remove it; `sha256` pins a path")
        if not self.is_path and self.revision is None:
            mistakes.append(
                f"`revision` is missing: set the commit of {self.source}, so that every replica "
                "serves the same files"
            )
        if not self.is_path and self.sha256 is not None:
            mistakes.append(
                "`sha256` is for a path: remove it; `gpufleet lock INVENTORY --models` writes the "
                "hashes of all files of this commit"
            )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


def flag_mistakes(adapters: Mapping[str, Adapter], flags: Iterable[str]) -> Iterator[str]:
    """Yield a mistake if an entry's flags set adapters beside `adapters`."""
    if adapters and (both := sorted(FLAGS & set(flags))):
        yield (
            f"`flags` sets {', '.join(both)}, and so do `adapters`: remove it from `flags`, and "
            "declare all adapters in `adapters`"
        )


class NamedModel(NamedTuple):
    """The names of an entry of `serving` on one node."""

    node: str
    entry: str
    served_name: str | None
    adapters: tuple[str, ...]


def name_clashes(models: Iterable[NamedModel]) -> Iterator[tuple[str, KeyPath, str]]:
    """
    Yield each adapter name that is also a model's or another adapter's, as (node, key, message).

    An entry that several nodes declare counts as one entry.
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
                    f"{'.'.join(key)}: clients use this name for {' and '.join(others)} too: "
                    "give the adapter another name",
                )
