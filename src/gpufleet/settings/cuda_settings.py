"""Settings of NVIDIA's repository, and of its packages CUDA and DCGM.

Pure, like `settings/node_settings.py`, which contains these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt, model_validator

from gpufleet.settings import lock_defaults
from gpufleet.settings.base import Port, Setting, Sha256, Url, pattern_rule


class Repository(Setting):
    """NVIDIA's repository for the nodes' system, or a mirror of it with the same layout."""

    url: Url
    keyring: Annotated[
        str,
        pattern_rule(
            r"[\w.+~-]+\.(deb|pub|asc|gpg)",
            "a file's name that ends in .deb, .pub, .asc or .gpg, as cuda-keyring_1.1-1_all.deb",
        ),
        Field(
            description="File in the repository that holds its public key: the keyring package "
            "or, for dnf, the key itself, as D42D0685.pub",
        ),
    ] = "cuda-keyring_1.1-1_all.deb"
    keyring_sha256: Annotated[Sha256, Field(description="SHA-256 of the file `keyring`")]


class Cuda(Setting):
    """The CUDA toolkit. vLLM's wheels carry the runtime; compilers are for its JIT kernels."""

    repository: Repository
    toolkit: Annotated[
        str | None,
        pattern_rule(r"\d+-\d+", "two numbers with `-` between them, as 13-0"),
        Field(
            description="Toolkit, as in cuda-toolkit-<13-0>; required with `version`; null: none",
        ),
    ] = None
    version: Annotated[
        str | None,
        Field(description="Exact package version, as 13.0.3-1; required with `toolkit`"),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _a_version_is_a_toolkits(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("version") and "toolkit" not in data:
            return {**data, "toolkit": lock_defaults.TOOLKIT}
        return data

    @model_validator(mode="after")
    def _toolkit_has_a_version(self) -> Cuda:
        if self.toolkit and not self.version:
            raise ValueError(
                "`version` is missing: name the exact package version, as "
                f"`apt-cache madison cuda-toolkit-{self.toolkit}` lists it"
            )
        return self


class Dcgm(Setting):
    """NVIDIA's GPU monitoring: the host engine and its Prometheus exporter."""

    version: Annotated[str, Field(description="Version of the datacenter-gpu-manager-4 packages")]
    cuda_major: Annotated[PositiveInt, Field(description="The driver's CUDA major version")] = 13
    exporter_version: Annotated[str | None, Field(description="null: no exporter")]
    port: Annotated[Port, Field(description="The exporter's port")] = 9400
    profiling: Annotated[
        bool | None,
        Field(
            description="Read profiling counters; null: only if every GPU is Hopper or "
            "newer, which needs no extra permission. true without that permission leaves "
            "no series at all"
        ),
    ] = None
