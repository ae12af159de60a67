"""Settings for networks without internet access: `mirror`, and the archives that fill a mirror.

Pure. `settings/mirror_rewrite.py` applies the settings, and `bundle/` fills a mirror.
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
    Field(description="The address, without a trailing slash"),
]


class Archive(Setting):
    """
    An apt archive of the distribution. `gpufleet bundle` downloads packages for the nodes from it.
    """

    url: Address
    suites: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="Suites of the archive, written as in sources.list"),
    ]
    components: Annotated[
        tuple[str, ...],
        Field(
            description="Components of the archive, written as in sources.list. `[]` if the suites "
            "end in /"
        ),
    ] = ("main",)
    key_file: Annotated[
        str,
        Field(
            description="File with the public keys that the archive is signed with, on the "
            "machine that runs `gpufleet bundle`"
        ),
    ]

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the components. A flat archive, whose suite ends in a slash, has none."""
        return () if self.suites[0].endswith("/") else self.components

    @model_validator(mode="after")
    def _is_flat_or_not(self) -> Archive:
        flat = {suite.endswith("/") for suite in self.suites}
        if len(flat) > 1:
            raise ValueError(
                "some names in `suites` end in / (a flat archive) and some do not: write "
                "them as two archives"
            )
        if flat == {False} and not self.components:
            raise ValueError(
                "`components` is empty, but only a flat archive, whose suites end in /, "
                "has no components: write at least one component, for example main"
            )
        return self


class Mirror(Setting):
    """
    A mirror. Nodes download from the mirror instead of the addresses in other settings.

    For a mirror from `gpufleet bundle`, `url` is enough. The other keys are for mirrors that you
    already have. They override `url`.
    """

    url: Annotated[
        Address | None, Field(description="Address where a bundle of `gpufleet bundle` is served")
    ] = None
    vendor: Annotated[
        Address | None,
        Field(
            description="Address of a mirror of NVIDIA's repository with the same layout. It "
            "replaces `cuda.repository.url`"
        ),
    ] = None
    wheels: Annotated[
        Address | None,
        Field(description="Address of a page with links to wheels. It replaces PyPI"),
    ] = None
    index_url: Annotated[
        Address | None, Field(description="Address of a package index. It replaces PyPI")
    ] = None
    models: Annotated[
        Address | None,
        Field(
            description="Address of a server with the API of the Hugging Face Hub. It replaces "
            "the Hub"
        ),
    ] = None
    archives: Annotated[
        tuple[Archive, ...],
        Field(
            description="apt archives from which `gpufleet bundle` downloads the "
            "distribution's packages"
        ),
    ] = ()

    inside: Annotated[
        tuple[Address, ...],
        Field(description="Further addresses that nodes without internet access can reach"),
    ] = ()

    @model_validator(mode="after")
    def _says_where(self) -> Mirror:
        if not (self.url or self.addresses):
            raise ValueError(
                "has no address: set `url`, or set one or more of `vendor`, `wheels`, "
                "`index_url` and `models`"
            )
        if self.wheels and self.index_url:
            raise ValueError("`wheels` and `index_url` exclude each other: remove one of the two")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that nodes download from."""
        named = (self.url, self.vendor, self.wheels, self.index_url, self.models)
        return tuple(address for address in named if address)
