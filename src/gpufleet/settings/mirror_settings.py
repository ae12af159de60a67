"""Settings of networks without internet access: `mirror`, and the archives for filling it.

Pure models. `settings/mirror_rewrite.py` applies them, `bundle/` fills a mirror.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from gpufleet.settings.base import Setting, pattern_rule

Address = Annotated[
    str,
    pattern_rule(
        r"https?://[^\s/@]+(/\S*[^/\s])?",
        "an address that starts with https:// or http://, without a user and without a trailing /",
    ),
    Field(description="Without a trailing slash"),
]


class Archive(Setting):
    """A distribution's apt archive, from which `gpufleet bundle` takes packages for the nodes."""

    url: Address
    suites: Annotated[tuple[str, ...], Field(min_length=1, description="As in sources.list")]
    components: Annotated[tuple[str, ...], Field(description="`[]` if suites end in /")] = ("main",)
    key_file: Annotated[
        str, Field(description="Public keys of its signers: a file on the bundling machine")
    ]

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the components; empty for a flat archive, whose suite ends in a slash."""
        return () if self.suites[0].endswith("/") else self.components

    @model_validator(mode="after")
    def _is_flat_or_not(self) -> Archive:
        flat = {suite.endswith("/") for suite in self.suites}
        if len(flat) > 1:
            raise ValueError(
                "`suites` has names that end in / (a flat archive) and names that do not: write "
                "two archives"
            )
        if flat == {False} and not self.components:
            raise ValueError(
                "`components` is empty: write at least one, as main; only suites that end in / (a "
                "flat archive) have none"
            )
        return self


class Mirror(Setting):
    """
    A mirror to download from, in place of the addresses in other settings.

    `url` is enough for a mirror from `gpufleet bundle`; the other keys are for existing mirrors,
    and override it.
    """

    url: Annotated[Address | None, Field(description="Address of a served bundle")] = None
    vendor: Annotated[
        Address | None, Field(description="Replaces cuda.repository.url; same layout")
    ] = None
    wheels: Annotated[
        Address | None, Field(description="Page of links to wheels, instead of PyPI")
    ] = None
    index_url: Annotated[Address | None, Field(description="Package index, instead of PyPI")] = None
    models: Annotated[
        Address | None, Field(description="Replaces the Hugging Face Hub, with the same API")
    ] = None
    archives: Annotated[
        tuple[Archive, ...],
        Field(description="Source of the distribution's packages for `gpufleet bundle`"),
    ] = ()

    inside: Annotated[
        tuple[Address, ...],
        Field(description="Additional addresses that nodes of an offline network can reach"),
    ] = ()

    @model_validator(mode="after")
    def _says_where(self) -> Mirror:
        if not (self.url or self.addresses):
            raise ValueError(
                "has no address: set `url`, or `vendor`, `wheels` or `index_url`, and `models`"
            )
        if self.wheels and self.index_url:
            raise ValueError("`wheels` and `index_url` exclude each other: remove one")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that nodes download from."""
        named = (self.url, self.vendor, self.wheels, self.index_url, self.models)
        return tuple(address for address in named if address)
