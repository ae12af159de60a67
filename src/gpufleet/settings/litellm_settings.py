"""Settings of LiteLLM: names, defaults and aliases in front of the gateway.

Pure, like `settings/node_settings.py`, which contains these. Durations are in seconds; the names of
sizes contain the unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    IPvAnyNetwork,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from gpufleet.settings.base import PackageIndex, Port, PythonVersion, Seconds, Setting, pattern_rule
from gpufleet.settings.gateway_settings import ClientKey, GatewayTls, access_mistakes

# The name that clients request; the same characters as `served_name` of `serving`.
PublicName = Annotated[
    str, pattern_rule(r"[\w.:/-]+", "letters, digits, `.`, `_`, `:`, `/` and `-`")
]

# Releases on PyPI that were not its publisher's (2026): 1.82.7 and 1.82.8 stole credentials,
# 1.107.0 is listed as compromised. The hashes in a lock do not help: they would match exactly these
# files.
COMPROMISED = ("1.82.7", "1.82.8", "1.107.0")


# A number in YAML; "0.2" in quotes and `true` are mistakes, which LiteLLM would report much later.
Number = Annotated[float, Field(strict=True)]


class Parameters(Setting):
    """Defaults for values that a request does not set; null: the model server's default."""

    temperature: Annotated[Number | None, Field(ge=0, le=2, description="Sampling temperature")] = (
        None
    )
    top_p: Annotated[
        Number | None,
        Field(gt=0, le=1, description="Nucleus sampling: share of the probability mass"),
    ] = None
    top_k: Annotated[StrictInt | None, Field(ge=-1, description="-1 and 0: all")] = None
    min_p: Annotated[
        Number | None,
        Field(ge=0, le=1, description="Minimum probability of a token, relative to the likeliest"),
    ] = None
    max_tokens: Annotated[
        StrictInt | None, Field(ge=1, description="Longest answer, in tokens")
    ] = None
    presence_penalty: Annotated[
        Number | None, Field(ge=-2, le=2, description="Penalty for tokens that occur in the text")
    ] = None
    frequency_penalty: Annotated[
        Number | None,
        Field(ge=-2, le=2, description="Penalty for tokens by their frequency in the text"),
    ] = None
    repetition_penalty: Annotated[
        Number | None, Field(gt=0, le=10, description="Factor against repetition; 1: none")
    ] = None
    seed: Annotated[StrictInt | None, Field(description="Random seed")] = None
    stop: Annotated[tuple[StrictStr, ...] | None, Field(description="Texts that end an answer")] = (
        None
    )
    reasoning_effort: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="How much the model reasons")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, StrictBool | StrictInt | StrictStr] | None,
        Field(description="Variables for the model's chat template, as `enable_thinking: false`"),
    ] = None

    @property
    def set_values(self) -> dict[str, Any]:
        """The values that are set, by name."""
        return self.model_dump(mode="json", exclude_none=True)


class PublicModel(Setting):
    """A client-visible name with its own settings."""

    entries: Annotated[
        tuple[str, ...],
        AfterValidator(lambda given: tuple(dict.fromkeys(given))),
        Field(
            description="Entries of `serving` behind this name; empty: the entry with the same name"
        ),
    ] = ()
    parameters: Parameters = Parameters()
    fallbacks: Annotated[
        tuple[PublicName, ...],
        Field(description="Names to try, in this order, if this one fails"),
    ] = ()


class LitellmClient(ClientKey):
    """A client of LiteLLM."""

    models: Annotated[
        tuple[PublicName, ...], Field(description="Names that it may request; empty: all")
    ] = ()


class Litellm(Setting):
    """The LiteLLM proxy in front of a gateway."""

    version: PythonVersion
    lock: Annotated[
        str, Field(description="Lock file with hashes; relative to the project's root, or absolute")
    ]
    uv_lock: Annotated[str, Field(description="Lock file of uv, which builds the release")] = (
        "locks/uv.txt"
    )
    python: Annotated[
        str,
        pattern_rule(r"/[\w./+-]+", "an absolute path, as /usr/bin/python3"),
        Field(description="Python interpreter on the node; 3.10 or newer"),
    ] = "/usr/bin/python3"
    index_url: Annotated[PackageIndex | None, Field(description="Package index; null: PyPI")] = None
    find_links: Annotated[tuple[str, ...], Field(description="Flat wheel directories")] = ()
    no_index: Annotated[bool, Field(description="Use only find_links, no package index")] = False
    keep_releases: Annotated[
        int, Field(ge=0, description="Additional releases to keep on a node")
    ] = 1

    port: Port = 4000
    listen: Annotated[
        str,
        pattern_rule(r"[\w.:-]+", "an address of the node"),
        Field(description="The address that it binds"),
    ] = "127.0.0.1"
    tls: Annotated[GatewayTls | None, Field(description="null: plain HTTP")] = None
    clients: Annotated[tuple[LitellmClient, ...], Field(description="Clients with access")] = ()
    allow_unauthenticated: Annotated[
        bool, Field(description="Accept that any client that reaches the port can use the models")
    ] = False
    allow_plain_http: Annotated[
        bool, Field(description="Accept that keys and prompts are sent unencrypted")
    ] = False
    networks: Annotated[
        tuple[IPvAnyNetwork, ...],
        Field(
            description="Networks that LiteLLM may connect to, besides its own node; empty: "
            "none if it listens on loopback and the gateway is on the same node, otherwise any"
        ),
    ] = ()

    upstream_url: Annotated[
        str | None,
        pattern_rule(
            r"https?://[^/\s]+", "an address without a path, as https://gw.example.com:8443"
        ),
        Field(
            description="The gateway's address, as in its certificate; null: the gateway of "
            "this node",
        ),
    ] = None
    upstream_ca_file: Annotated[
        str | None,
        Field(description="CA certificates in PEM, on this machine; null: the system's"),
    ] = None
    upstream_key_file: Annotated[
        str | None,
        Field(description="File on this machine with LiteLLM's key for the gateway"),
    ] = None
    request_seconds: Annotated[
        Seconds | None,
        Field(gt=0, description="Timeout for silence within a request; null: the gateway's"),
    ] = None

    models: Annotated[
        dict[PublicName, PublicModel],
        Field(description="Names for several entries at once, and the defaults of a name"),
    ] = {}
    aliases: Annotated[
        dict[PublicName, PublicName],
        Field(description="Aliases: additional names, each for another name"),
    ] = {}
    body_keys: Annotated[
        tuple[Annotated[str, pattern_rule(r"\w+", "a key of letters, digits and `_`")], ...],
        Field(description="Additional keys of a request's body to pass on"),
    ] = ()
    max_body_mib: Annotated[int, Field(ge=1, le=1024, description="Largest request")] = 32
    drain_seconds: Annotated[
        Seconds,
        Field(ge=0, le=3600, description="Time for running requests to finish before a stop"),
    ] = 60

    @model_validator(mode="after")
    def _holds_together(self) -> Litellm:
        if mistakes := [
            *self._release_mistakes(),
            *self._client_mistakes(),
            *self._name_mistakes(),
        ]:
            raise ValueError("; ".join(mistakes))
        return self

    def _release_mistakes(self) -> Iterator[str]:
        if self.version in COMPROMISED:
            yield f"`version` {self.version} was compromised on PyPI: use another version"
        if self.no_index and not self.find_links:
            yield "`no_index` without `find_links` leaves no download source: set `find_links`"
        if self.no_index and self.index_url:
            yield "`no_index` and `index_url` exclude each other: remove one"

    def _client_mistakes(self) -> Iterator[str]:
        yield from access_mistakes(
            self.clients,
            self.listen,
            encrypted=self.tls is not None,
            allow_unauthenticated=self.allow_unauthenticated,
            allow_plain_http=self.allow_plain_http,
        )
        if self.upstream_ca_file and not (self.upstream_url or "").startswith("https://"):
            yield "`upstream_ca_file` is for an `upstream_url` with https: set it, or remove this"

    def _name_mistakes(self) -> Iterator[str]:
        for alias, name in self.aliases.items():
            if alias in self.models:
                yield f"`aliases` and `models` both have {alias}: remove one"
            if name in self.aliases:
                yield f"`aliases.{alias}`: {name} is an alias itself: write {self.aliases[name]}"
        for name, model in self.models.items():
            if name in model.fallbacks:
                yield f"`models.{name}.fallbacks` has itself: remove it"
