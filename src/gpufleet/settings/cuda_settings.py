"""Settings of NVIDIA's repository, and of its packages CUDA and DCGM.

Pure. `settings/node_settings.py` contains these settings.
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
            "a file name that ends in .deb, .pub, .asc or .gpg, for example "
            "cuda-keyring_1.1-1_all.deb",
        ),
        Field(
            description="File in the repository with the repository's public key. For apt "
            "this is the keyring package; for dnf it is the key itself, for example "
            "D42D0685.pub",
        ),
    ] = "cuda-keyring_1.1-1_all.deb"
    keyring_sha256: Annotated[
        Sha256, Field(description="SHA-256 digest of the file that `keyring` names")
    ]


class Cuda(Setting):
    """
    The CUDA toolkit. vLLM's wheels contain the CUDA runtime. vLLM needs the toolkit's compilers
    only for kernels that it compiles at run time (JIT).
    """

    repository: Repository
    toolkit: Annotated[
        str | None,
        pattern_rule(r"\d+-\d+", "two numbers with `-` between them, for example 13-0"),
        Field(
            description="Branch of the toolkit: 13-0 stands for the package "
            "cuda-toolkit-13-0. Set it together with `version`. null: no toolkit",
        ),
    ] = None
    version: Annotated[
        str | None,
        Field(
            description="Exact package version, for example 13.0.3-1. Set it together with "
            "`toolkit`"
        ),
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
                "`version` is missing: set the exact package version; `apt-cache madison "
                f"cuda-toolkit-{self.toolkit}` lists the versions"
            )
        return self


class Dcgm(Setting):
    """NVIDIA's GPU monitoring: the host engine and its Prometheus exporter."""

    version: Annotated[str, Field(description="Version of the datacenter-gpu-manager-4 packages")]
    cuda_major: Annotated[PositiveInt, Field(description="CUDA major version of the driver")] = 13
    exporter_version: Annotated[
        str | None, Field(description="Version of the exporter. null: no exporter is installed")
    ]
    port: Annotated[Port, Field(description="The exporter's port")] = 9400
    profiling: Annotated[
        bool | None,
        Field(
            description="Whether the exporter reads profiling counters. GPUs older than "
            "Hopper allow this only with an extra permission; if it is missing, `true` "
            "leaves no series at all. null: only if every GPU is Hopper or newer"
        ),
    ] = None
