"""Find environment variables that harm the node or the server.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from gpufleet.formatting import join_names, ranges
from gpufleet.node.topology import Node, value_or
from gpufleet.planning.stage import Stage
from gpufleet.settings.node_settings import NodeSettings

_HIDDEN = ("/root/", "/home/", "/run/user/")
_OTHER_CODE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")


def variable_remarks(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    nodes: Mapping[str, Node],
    documents: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """
    Yield a sentence for each harmful variable of a stage, with its key, its effect and the remedy.
    """
    yield from _nvlink_unused(stage, settings, nodes)
    yield from _unknown_adapters(stage, settings, documents)
    yield from _unknown_interfaces(stage, settings, documents)
    model = settings[stage.node].serving[stage.model].model
    for at, variables in _places(stage, settings[stage.node]):
        if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}:
            yield (
                f"{at}.CUDA_LAUNCH_BLOCKING: with this variable, the host waits for every "
                "kernel, which makes each token slower: remove the variable, unless you are "
                "debugging"
            )
        if variables.get("VLLM_PORT") == str(stage.port):
            yield (
                f"{at}.VLLM_PORT: this variable sets where vLLM looks for ports of its internal "
                f"processes, and not the port of the server: write `serving.{stage.model}.port`, "
                "and remove the variable"
            )
        if (path := variables.get("PATH")) and "/usr/bin" not in path.split(":"):
            yield (
                f"{at}.PATH: this variable replaces the whole path of the server, and {path!r} "
                "does not contain /usr/bin. vLLM compiles its kernels with the gcc in /usr/bin: "
                "add this directory, or remove the variable"
            )
        for name, value in variables.items():
            if value.startswith(_HIDDEN) and not model.startswith("/home/"):
                yield (
                    f"{at}.{name}: servers cannot see {value}, because their unit sets "
                    "ProtectHome=: write a directory outside /root and /home that the servers' "
                    "user can write to"
                )
        for name in _OTHER_CODE:
            if variables.get(name):
                yield (
                    f"{at}.{name}: the server loads code from there before the code of its "
                    "release. No lock file records this code, and no rollback restores it. "
                    "Remove the variable, or keep it if you have tested it"
                )


def _places(stage: Stage, here: NodeSettings) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the two groups of a stage's variables, each with its key.

    The variables of the first group override the variables of the second group.
    """
    yield f"serving.{stage.model}.environment", here.serving[stage.model].environment
    engine = here.engine_of(stage.model)
    yield f"{engine.engine}.environment", engine.environment


def _nvlink_unused(
    stage: Stage, settings: Mapping[str, NodeSettings], nodes: Mapping[str, Node]
) -> Iterator[str]:
    """
    Yield a remark if a variable disables NVLink between a stage's GPUs.

    NCCL_P2P_DISABLE and NCCL_P2P_LEVEL=LOC disable NVLink and PCIe's P2P (NCCL's manual).
    """
    here, node = settings[stage.node], nodes.get(stage.node)
    if stage.tensor_parallel < 2 or node is None:
        return
    key = next(
        (f"{at}.{name}" for at, each in _places(stage, here) for name in _p2p_off(each)), None
    )
    linked = [pair for pair in combinations(sorted(stage.gpus), 2) if node.nvlink.get(pair)]
    if key and linked:
        gpus = sorted({gpu for pair in linked for gpu in pair})
        yield (
            f"{key}: NVLink connects GPUs {ranges(gpus)} of {stage.node}, but this setting "
            "prevents NCCL from using NVLink, so the traffic of every layer goes through host "
            "memory: remove the setting, unless you are debugging"
        )


def _p2p_off(variables: Mapping[str, str]) -> Iterator[str]:
    """
    Yield the variables that forbid direct transfers between GPUs. The older value 0 means LOC.
    """
    if variables.get("NCCL_P2P_DISABLE", "0") != "0":
        yield "NCCL_P2P_DISABLE"
    if variables.get("NCCL_P2P_LEVEL", "").strip().upper() in {"LOC", "0"}:
        yield "NCCL_P2P_LEVEL"


def _unknown_adapters(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    documents: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """
    Yield a remark on each NCCL_IB_HCA with adapters that the node does not have.

    The value is a list of names or prefixes of names. If the value begins with `=`, the names are
    whole names. If it begins with `^`, the names are excluded (NCCL's manual).
    """
    here = settings[stage.node]
    nics = value_or(documents.get(stage.node, {}).get("nics"))
    if not isinstance(nics, Mapping):
        return
    there = [str(each["name"]) for each in value_or(nics.get("infiniband")) or ()]
    for at, variables in _places(stage, here):
        text = variables.get("NCCL_IB_HCA", "")
        if not text or text.startswith("^"):
            continue
        exact = text.startswith("=")
        names = [name.partition(":")[0].strip() for name in text.lstrip("=").split(",")]
        if gone := [
            name
            for name in names
            if not any(each == name if exact else each.startswith(name) for each in there)
        ]:
            has = f"has {join_names(there)}" if there else "has no RDMA adapter"
            yield (
                f"{at}.NCCL_IB_HCA: {stage.node} has no adapter {join_names(gone)}, but {has}. "
                "NCCL uses any adapters that it finds, or TCP if it finds none. Write names that "
                "`ibdev2netdev` prints on the node, or remove the variable"
            )


def _unknown_interfaces(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    documents: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """
    Yield a remark on each interface variable whose interfaces the node does not have.

    NCCL_SOCKET_IFNAME has the syntax of NCCL_IB_HCA. GLOO_SOCKET_IFNAME is one whole name.
    """
    nics = value_or(documents.get(stage.node, {}).get("nics"))
    net = value_or(nics.get("net")) if isinstance(nics, Mapping) else None
    if not net:
        return
    there = [*(str(each["name"]) for each in net), "lo"]
    for at, variables in _places(stage, settings[stage.node]):
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            text = variables.get(variable, "")
            if not text or text.startswith("^"):
                continue
            exact = text.startswith("=") or variable.startswith("GLOO")
            names = [name.strip() for name in text.lstrip("=").split(",")]
            if not any(
                each == name if exact else each.startswith(name) for name in names for each in there
            ):
                yield (
                    f"{at}.{variable}: {stage.node} has no interface {join_names(names)}, but "
                    f"has {join_names(there)}. Ranks that communicate over the network do not "
                    "start. Write a name that `ip link` prints on the node, or remove the "
                    "variable"
                )
