"""Settings of LiteLLM: names, defaults and aliases in front of the gateway.

Pure. `settings/node_settings.py` contains these settings. Durations are in seconds. The name of a
size contains its unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from gpufleet.settings.base import (
    Network,
    PackageIndex,
    Port,
    PythonVersion,
    Seconds,
    Setting,
    pattern_rule,
)
from gpufleet.settings.gateway_settings import ClientKey, GatewayTls, access_mistakes

# The name that clients request. It has the same characters as `served_name` in `serving`.
PublicName = Annotated[
    str, pattern_rule(r"[\w.:/-]+", "letters, digits, `.`, `_`, `:`, `/` and `-`")
]

# Releases on PyPI that were not its publisher's (2026): 1.82.7 and 1.82.8 stole credentials,
# 1.107.0 is listed as compromised. The hashes in a lock do not help: they would match exactly these
# files.
COMPROMISED = ("1.82.7", "1.82.8", "1.107.0")


# A number in YAML. "0.2" in quotes and `true` are refused here, because LiteLLM would report these
# mistakes much later.
Number = Annotated[float, Field(strict=True)]


class Parameters(Setting):
    """
    Defaults for parameters that a request does not set. null: the default of the model server
    applies.
    """

    temperature: Annotated[Number | None, Field(ge=0, le=2, description="Sampling temperature")] = (
        None
    )
    top_p: Annotated[
        Number | None,
        Field(
            gt=0,
            le=1,
            description="Nucleus sampling: sample from the most likely tokens that together "
            "have this probability",
        ),
    ] = None
    top_k: Annotated[
        StrictInt | None,
        Field(
            ge=-1,
            description="Sample from this number of most likely tokens. -1 and 0: from all tokens",
        ),
    ] = None
    min_p: Annotated[
        Number | None,
        Field(
            ge=0,
            le=1,
            description="Minimum probability of a token, relative to the probability of the "
            "most likely token",
        ),
    ] = None
    max_tokens: Annotated[
        StrictInt | None, Field(ge=1, description="Maximum length of an answer, in tokens")
    ] = None
    presence_penalty: Annotated[
        Number | None,
        Field(ge=-2, le=2, description="Penalty for tokens that already occur in the text"),
    ] = None
    frequency_penalty: Annotated[
        Number | None,
        Field(
            ge=-2,
            le=2,
            description="Penalty for tokens in proportion to their frequency in the text",
        ),
    ] = None
    repetition_penalty: Annotated[
        Number | None,
        Field(
            gt=0, le=10, description="Factor that makes repeated tokens less likely. 1: no effect"
        ),
    ] = None
    seed: Annotated[StrictInt | None, Field(description="Seed of the random numbers")] = None
    stop: Annotated[tuple[StrictStr, ...] | None, Field(description="Texts that end an answer")] = (
        None
    )
    reasoning_effort: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="How much the model reasons")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, StrictBool | StrictInt | StrictStr] | None,
        Field(
            description="Variables for the model's chat template, for example "
            "`enable_thinking: false`"
        ),
    ] = None

    @property
    def set_values(self) -> dict[str, Any]:
        """The values that are set, by name."""
        return self.model_dump(mode="json", exclude_none=True)


class PublicModel(Setting):
    """A model name that clients use, with its own settings."""

    entries: Annotated[
        tuple[str, ...],
        AfterValidator(lambda given: tuple(dict.fromkeys(given))),
        Field(
            description="Entries of `serving` that answer requests for this name. Empty: "
            "the entry with the same name"
        ),
    ] = ()
    parameters: Parameters = Parameters()
    fallbacks: Annotated[
        tuple[PublicName, ...],
        Field(
            description="Names of models that LiteLLM tries, in this order, if a request to "
            "this name fails"
        ),
    ] = ()


class LitellmClient(ClientKey):
    """A client of LiteLLM."""

    models: Annotated[
        tuple[PublicName, ...],
        Field(description="Names of models that the client may request. Empty: all names"),
    ] = ()


class Litellm(Setting):
    """A LiteLLM proxy in front of a gateway."""

    version: PythonVersion
    lock: Annotated[
        str,
        Field(
            description="Lock file of package versions with hashes. The path is absolute, or "
            "relative to the project's root"
        ),
    ]
    uv_lock: Annotated[
        str, Field(description="Lock file of uv, the program that builds the release on the node")
    ] = "locks/uv.txt"
    python: Annotated[
        str,
        pattern_rule(r"/[\w./+-]+", "an absolute path, for example /usr/bin/python3"),
        Field(description="Path of the node's Python interpreter, version 3.10 or newer"),
    ] = "/usr/bin/python3"
    index_url: Annotated[
        PackageIndex | None, Field(description="Address of the package index. null: PyPI")
    ] = None
    find_links: Annotated[
        tuple[str, ...],
        Field(
            description="Addresses of pages with links to wheels, or directories on the node with "
            "wheels"
        ),
    ] = ()
    no_index: Annotated[bool, Field(description="Use no package index, only `find_links`")] = False
    keep_releases: Annotated[
        int, Field(ge=0, description="Number of additional releases to keep on a node")
    ] = 1

    port: Port = 4000
    listen: Annotated[
        str,
        pattern_rule(r"[\w.:-]+", "an address of the node"),
        Field(description="IP address that LiteLLM listens on"),
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
        tuple[Network, ...],
        Field(
            description="Networks that LiteLLM may connect to, besides its own node. "
            "Empty: if LiteLLM listens on loopback and the gateway is on the same node, no "
            "network; otherwise any network"
        ),
    ] = ()

    upstream_url: Annotated[
        str | None,
        pattern_rule(
            r"https?://[^/\s]+",
            "an address without a path, for example https://gw.example.com:8443",
        ),
        Field(
            description="Address of the gateway, with the host name in the gateway's "
            "certificate. null: the gateway on this node",
        ),
    ] = None
    upstream_ca_file: Annotated[
        str | None,
        Field(
            description="PEM file of CA certificates for the gateway's address, on the machine "
            "that runs gpufleet. null: the CA certificates of the node's system"
        ),
    ] = None
    upstream_key_file: Annotated[
        str | None,
        Field(
            description="File with LiteLLM's key for the gateway, on the machine that runs gpufleet"
        ),
    ] = None
    request_seconds: Annotated[
        Seconds | None,
        Field(
            gt=0,
            description="If the gateway sends nothing for this time within a request, LiteLLM "
            "ends the request. null: `gateway.request_seconds` applies",
        ),
    ] = None

    models: Annotated[
        dict[PublicName, PublicModel],
        Field(
            description="Model names for clients. A name can stand for several entries of "
            "`serving` and can have its own defaults"
        ),
    ] = {}
    aliases: Annotated[
        dict[PublicName, PublicName],
        Field(
            description="Additional names. Each alias stands for the model name that is its value"
        ),
    ] = {}
    body_keys: Annotated[
        tuple[Annotated[str, pattern_rule(r"\w+", "a key of letters, digits and `_`")], ...],
        Field(
            description="Additional keys of a request's body that LiteLLM passes on to the gateway"
        ),
    ] = ()
    max_body_mib: Annotated[
        int, Field(ge=1, le=1024, description="Size of the largest request that is accepted")
    ] = 32
    drain_seconds: Annotated[
        Seconds,
        Field(
            ge=0,
            le=3600,
            description="Maximum time that running requests have to finish before LiteLLM stops",
        ),
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
            yield (
                f"`version` is {self.version}, a release that was compromised on PyPI: write a "
                "different version"
            )
        if self.no_index and not self.find_links:
            yield (
                "`no_index` is true and `find_links` is empty, so there is no source for "
                "packages: set `find_links`"
            )
        if self.no_index and self.index_url:
            yield "`no_index` and `index_url` exclude each other: remove one of the two"

    def _client_mistakes(self) -> Iterator[str]:
        yield from access_mistakes(
            self.clients,
            self.listen,
            encrypted=self.tls is not None,
            allow_unauthenticated=self.allow_unauthenticated,
            allow_plain_http=self.allow_plain_http,
        )
        if self.upstream_ca_file and not (self.upstream_url or "").startswith("https://"):
            yield (
                "`upstream_ca_file` has no effect without an `upstream_url` that starts with "
                "https://: set `upstream_url`, or remove `upstream_ca_file`"
            )

    def _name_mistakes(self) -> Iterator[str]:
        for alias, name in self.aliases.items():
            if alias in self.models:
                yield f"`aliases` and `models` both have the name {alias}: remove one of the two"
            if name in self.aliases:
                yield (
                    f"`aliases.{alias}` stands for {name}, which is an alias, too: write "
                    f"{self.aliases[name]}"
                )
        for name, model in self.models.items():
            if name in model.fallbacks:
                yield (
                    f"`models.{name}.fallbacks` contains {name} itself: remove {name} from the list"
                )
