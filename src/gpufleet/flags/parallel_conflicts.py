"""Define rules for contradictory flags that divide a model over processes.  Pure."""

from __future__ import annotations

import re
from typing import Any

from gpufleet.flags.conflict_rule import Conflict, Settings

_TP = "--tensor-parallel-size"
_PP = "--pipeline-parallel-size"
_DP = "--data-parallel-size"
_DCP = "--decode-context-parallel-size"
_PCP = "--prefill-context-parallel-size"
_RANK = "--data-parallel-rank"
_LOCAL = "--data-parallel-size-local"
_EXTERNAL = "--data-parallel-external-lb"
_HYBRID = "--data-parallel-hybrid-lb"
_PORTS = "--data-parallel-multi-port-external-lb"
_START = "--data-parallel-start-rank"
_NNODES = "--nnodes"
_NODE = "--node-rank"
_HEADLESS = "--headless"
_SERVERS = "--api-server-count"
_BACKEND = "--data-parallel-backend"
_EP = "--enable-expert-parallel"
_EPLB = "--enable-eplb"
_ELASTIC = "--enable-elastic-ep"
_EXECUTOR = "--distributed-executor-backend"


def _external(s: Settings) -> bool:
    return s.on(_EXTERNAL) or s.value(_RANK) is not None


def _balancers(s: Settings) -> int:
    hybrid = s.on(_HYBRID) or (not s.on(_PORTS) and s.value(_START) is not None)
    return sum((s.on(_PORTS), _external(s), hybrid))


def _world(s: Settings) -> int:
    return s.number(_TP) * s.number(_PP) * s.number(_PCP) * s.number(_DP)


def _several_nodes(s: Settings) -> bool:
    return s.number(_NNODES) > 1


def _rank_is_inferred(s: Settings) -> bool:
    return _several_nodes(s) and s.number(_DP) > 1


def _is_no_cpu_list(cpus: str) -> bool:
    """
    Return whether a text is not a list of processors that numactl can parse.

    >>> [_is_no_cpu_list(each) for each in ("0-3,8", "3-0", "a")]
    [False, True, True]
    """
    if not re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", cpus):
        return True
    spans = [part.split("-") for part in cpus.split(",") if "-" in part]
    return any(int(first) > int(last) for first, last in spans)


def _listed(s: Settings, name: str) -> list[Any]:
    given = s.value(name)
    return list(given) if isinstance(given, list | tuple) else []


PARALLEL: tuple[Conflict, ...] = (
    Conflict(
        (_HEADLESS, _SERVERS),
        "0.15.0",
        lambda s: s.on(_HEADLESS) and s.number(_SERVERS, 0) > 0,
        "`--headless` starts no API server: `--api-server-count` cannot be more than 0",
        "entrypoints/cli/serve.py ServeSubcommand.cmd",
        leave_out=_SERVERS,
    ),
    Conflict(
        (_HEADLESS, _SERVERS),
        "0.9.1",
        lambda s: s.on(_HEADLESS) and s.number(_SERVERS, 0) > 1,
        "`--headless` starts no API server: `--api-server-count` cannot be more than 1",
        "entrypoints/cli/serve.py run_headless",
        until="0.15.0",
        leave_out=_SERVERS,
    ),
    Conflict(
        (_HEADLESS, _HYBRID),
        "0.10.0",
        lambda s: s.on(_HEADLESS) and s.on(_HYBRID),
        "`--headless` has no load balancer: it conflicts with `--data-parallel-hybrid-lb`",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_PORTS, _EXTERNAL, _RANK, _HYBRID, _START),
        "0.22.0",
        lambda s: _balancers(s) > 1,
        "the flags select more than one way of balancing over data-parallel ranks: choose only "
        "one of multi-port (`--data-parallel-multi-port-external-lb`), external "
        "(`--data-parallel-external-lb` or `--data-parallel-rank`) or hybrid "
        "(`--data-parallel-hybrid-lb` or `--data-parallel-start-rank`)",
        "entrypoints/cli/serve.py ServeSubcommand.cmd",
    ),
    Conflict(
        (_EXTERNAL, _HYBRID),
        "0.11.1",
        lambda s: s.on(_EXTERNAL) and s.on(_HYBRID),
        "`--data-parallel-external-lb` and `--data-parallel-hybrid-lb` cannot be set together: "
        "remove one of them",
        "engine/arg_utils.py create_engine_config",
        until="0.22.0",
    ),
    Conflict(
        (_PORTS, _DP),
        "0.22.0",
        lambda s: s.on(_PORTS) and s.number(_DP) < 2,
        "`--data-parallel-multi-port-external-lb` needs `--data-parallel-size` of 2 or more",
        "entrypoints/launchers/dp_supervisor.py validate_multi_port_external_lb_args",
    ),
    Conflict(
        (_PORTS, _LOCAL),
        "0.22.0",
        lambda s: s.on(_PORTS) and s.number(_DP) > 1 and s.number(_LOCAL, 0) < 2,
        "`--data-parallel-multi-port-external-lb` needs `--data-parallel-size-local` of 2 or more",
        "entrypoints/launchers/dp_supervisor.py validate_multi_port_external_lb_args",
    ),
    Conflict(
        (_PORTS, _SERVERS),
        "0.22.0",
        lambda s: s.on(_PORTS) and s.value(_SERVERS) not in {None, 1},
        "`--data-parallel-multi-port-external-lb` needs `--api-server-count` 1",
        "entrypoints/launchers/dp_supervisor.py validate_multi_port_external_lb_args",
        leave_out=_SERVERS,
    ),
    Conflict(
        (_PORTS, "--uds", "--grpc"),
        "0.22.0",
        lambda s: s.on(_PORTS) and (s.value("--uds") is not None or s.on("--grpc")),
        "`--data-parallel-multi-port-external-lb` supports neither a socket file nor gRPC",
        "entrypoints/launchers/dp_supervisor.py validate_multi_port_external_lb_args",
    ),
    Conflict(
        (_NNODES, _BACKEND),
        "0.11.1",
        lambda s: _several_nodes(s) and s.value(_BACKEND) not in {None, "mp"},
        "`--nnodes` needs `--data-parallel-backend` mp",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_NNODES, _TP, _PP, _DP, _PCP),
        "0.11.1",
        lambda s: _several_nodes(s) and _world(s) % s.number(_NNODES) != 0,
        "the number of GPUs must be a multiple of `--nnodes`. The number of GPUs is the "
        "tensor-parallel size x pipeline-parallel size x data-parallel size (x "
        "prefill-context-parallel size)",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_NNODES, _NODE),
        "0.11.1",
        lambda s: _several_nodes(s) and not 0 <= s.number(_NODE, 0) < s.number(_NNODES),
        "`--node-rank` counts the nodes from 0 and must be less than `--nnodes`",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_NNODES, _EXECUTOR),
        "0.11.1",
        lambda s: (
            _several_nodes(s) and s.value(_EXECUTOR) not in {None, "mp", "uni", "external_launcher"}
        ),
        "`--nnodes` above 1 needs `--distributed-executor-backend` mp, because Ray chooses the "
        "nodes of the ranks itself",
        "config/parallel.py ParallelConfig.__post_init__",
    ),
    Conflict(
        (_HYBRID, _LOCAL),
        "0.10.0",
        lambda s: (
            s.on(_HYBRID) and s.value(_LOCAL) is None and not _several_nodes(s) and not _external(s)
        ),
        "`--data-parallel-hybrid-lb` needs `--data-parallel-size-local`, which is the number of "
        "ranks on this node",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_EXTERNAL, _RANK),
        "0.11.1",
        lambda s: s.on(_EXTERNAL) and s.value(_RANK) is None and not _rank_is_inferred(s),
        "`--data-parallel-external-lb` needs `--data-parallel-rank`, or `--nnodes` with "
        "`--node-rank`",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_EXTERNAL, _RANK, _LOCAL),
        "0.9.2",
        lambda s: _external(s) and s.has(_LOCAL) and s.value(_LOCAL) not in {None, 1},
        "with external balancing, each rank is a server process of its own, so "
        "`--data-parallel-size-local` must be 1",
        "engine/arg_utils.py create_engine_config",
        leave_out=_LOCAL,
    ),
    Conflict(
        (_EXTERNAL, _RANK, _DP),
        "0.9.2",
        lambda s: _external(s) and s.number(_DP) <= 1,
        "external balancing (`--data-parallel-rank`) needs `--data-parallel-size` above 1",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        (_RANK, _DP),
        "0.9.2",
        lambda s: s.number(_DP) > 1 and not 0 <= s.number(_RANK, 0) < s.number(_DP),
        "`--data-parallel-rank` counts from 0 and must be less than `--data-parallel-size`",
        "config/parallel.py ParallelConfig.__post_init__",
    ),
    Conflict(
        (_LOCAL, _DP),
        "0.9.0",
        lambda s: s.has(_LOCAL) and s.number(_LOCAL, 0) > s.number(_DP),
        "`--data-parallel-size-local` cannot be more than `--data-parallel-size`",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        ("--enable-fault-tolerance",),
        "0.27.0",
        lambda s: s.on("--enable-fault-tolerance") and not _external(s),
        "`--enable-fault-tolerance` needs externally balanced ranks: "
        "`--data-parallel-external-lb` or `--data-parallel-rank`",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        ("--enable-fault-tolerance", _SERVERS),
        "0.27.0",
        lambda s: s.on("--enable-fault-tolerance") and s.number(_SERVERS) > 1,
        "`--enable-fault-tolerance` needs one API server: remove `--api-server-count`",
        "config/parallel.py ParallelConfig",
        leave_out=_SERVERS,
    ),
    Conflict(
        (_EPLB, _EP),
        "0.10.0",
        lambda s: s.on(_EPLB) and not s.on(_EP),
        "`--enable-eplb` balances experts over GPUs, so it needs `--enable-expert-parallel`",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        (_EPLB, _TP, _DP, _PCP),
        "0.10.0",
        lambda s: s.on(_EPLB) and s.on(_EP) and s.number(_TP) * s.number(_DP) * s.number(_PCP) <= 1,
        "`--enable-eplb` needs more than one GPU to balance experts over: set tensor or data "
        "parallelism above 1",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        (_EPLB, "--eplb-config"),
        "0.10.2",
        lambda s: (
            not s.on(_EPLB) and s.key("--eplb-config", "num_redundant_experts") not in {None, 0}
        ),
        "`num_redundant_experts` needs `--enable-eplb`",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        (_ELASTIC, _EPLB),
        "0.17.0",
        lambda s: s.on(_ELASTIC) and not s.on(_EPLB),
        "`--enable-elastic-ep` needs `--enable-eplb`",
        "config/parallel.py ParallelConfig.__post_init__",
    ),
    Conflict(
        (_ELASTIC, _PP),
        "0.17.0",
        lambda s: s.on(_ELASTIC) and s.number(_PP) > 1,
        "`--enable-elastic-ep` does not work with pipeline parallelism",
        "config/parallel.py ParallelConfig.__post_init__",
    ),
    Conflict(
        (_ELASTIC, _EXTERNAL, _RANK, _HYBRID),
        "0.17.0",
        lambda s: s.on(_ELASTIC) and (_external(s) or s.on(_HYBRID)),
        "`--enable-elastic-ep` needs vLLM's internal load balancer: remove the flags of hybrid "
        "and external balancing",
        "config/parallel.py ParallelConfig.__post_init__",
        until="0.33.0",
    ),
    Conflict(
        (_ELASTIC, _HYBRID),
        "0.33.0",
        lambda s: s.on(_ELASTIC) and s.on(_HYBRID),
        "`--enable-elastic-ep` does not work with `--data-parallel-hybrid-lb`",
        "config/parallel.py ParallelConfig.__post_init__",
    ),
    Conflict(
        ("--elastic-ep-max-dp-size", _DP),
        "0.30.0",
        lambda s: (
            s.on(_ELASTIC)
            and s.has("--elastic-ep-max-dp-size")
            and s.number("--elastic-ep-max-dp-size") < s.number(_DP)
        ),
        "`--elastic-ep-max-dp-size` cannot be less than `--data-parallel-size`",
        "config/parallel.py ParallelConfig.__post_init__",
    ),
    Conflict(
        (_DCP, _TP),
        "0.10.2",
        lambda s: (
            s.number(_PCP) == 1 and s.number(_DCP) > 0 and s.number(_TP) % s.number(_DCP) != 0
        ),
        "`--decode-context-parallel-size` must divide `--tensor-parallel-size`, because it uses "
        "the same GPUs",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        ("--dcp-comm-backend", _DCP),
        "0.18.0",
        lambda s: s.value("--dcp-comm-backend") == "a2a" and s.number(_DCP) <= 1,
        "`--dcp-comm-backend` a2a needs `--decode-context-parallel-size` above 1",
        "config/parallel.py ParallelConfig",
        until="0.29.0",
    ),
    Conflict(
        ("--numa-bind-nodes", "--numa-bind-cpus"),
        "0.20.0",
        lambda s: not s.on("--numa-bind"),
        "`--numa-bind-nodes` and `--numa-bind-cpus` need `--numa-bind`",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        ("--ray-workers-use-nsight",),
        "0.4.2",
        lambda s: (
            s.on("--ray-workers-use-nsight")
            and s.value(_EXECUTOR) in {"mp", "uni", "external_launcher"}
        ),
        "`--ray-workers-use-nsight` needs `--distributed-executor-backend` ray",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        (_PP, _EXECUTOR),
        "0.8.3",
        lambda s: s.number(_PP) > 1 and s.value(_EXECUTOR) == "uni",
        "pipeline parallelism needs `--distributed-executor-backend` mp or ray",
        "engine/arg_utils.py EngineArgs._check_feature_supported",
    ),
    Conflict(
        ("--enable-dbo", "--all2all-backend"),
        "0.14.0",
        lambda s: (
            s.on("--enable-dbo")
            and s.value("--all2all-backend")
            not in {None, "deepep_low_latency", "deepep_high_throughput", "nixl_ep"}
        ),
        "`--enable-dbo` needs `--all2all-backend` deepep_low_latency or deepep_high_throughput",
        "config/vllm.py VllmConfig",
    ),
    Conflict(
        (_SERVERS,),
        "0.9.1",
        lambda s: (
            s.number(_SERVERS, 0) > 1
            and s.environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower()
            in {"1", "true"}
        ),
        "`--api-server-count` above 1 cannot be combined with VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "entrypoints/cli/serve.py run_multi_api_server",
    ),
    Conflict(
        (_HEADLESS,),
        "0.9.0",
        lambda s: s.has(_LOCAL) and s.number(_LOCAL) < 1,
        "`--headless` starts only ranks, without an API server, so `--data-parallel-size-local` "
        "must be at least 1",
        "entrypoints/cli/serve.py run_headless",
    ),
    Conflict(
        ("--numa-bind-cpus",),
        "0.20.0",
        lambda s: any(_is_no_cpu_list(str(each)) for each in _listed(s, "--numa-bind-cpus")),
        "`--numa-bind-cpus` must be lists in numactl's form, with the lower number of each range "
        "first, for example 0-3 or 0,2,4-7",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        ("--numa-bind-nodes",),
        "0.20.0",
        lambda s: any(
            isinstance(each, int) and each < 0 for each in _listed(s, "--numa-bind-nodes")
        ),
        "the values of `--numa-bind-nodes` must be whole numbers of 0 or more",
        "config/parallel.py ParallelConfig",
    ),
    Conflict(
        (_EXECUTOR,),
        "0.12.0",
        lambda s: (
            isinstance(s.value(_EXECUTOR), str)
            and s.value(_EXECUTOR) not in {"mp", "ray", "uni", "external_launcher"}
            and "." not in s.value(_EXECUTOR)
        ),
        "`--distributed-executor-backend` must be mp, ray, uni, external_launcher, or a class of "
        "your own, written as module.Class",
        "v1/executor/abstract.py Executor.get_class",
    ),
)
