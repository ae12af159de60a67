"""Check an operator's own flags and variables, for runs without a plan. Pure.

`flag_check.check_plan` checks the whole command line of each stage, and reports the same problems
in the same words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from gpufleet.engines.engine import engine
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.flags.problem import Kind
from gpufleet.flags.schema import Schema
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.stage import Stage
from gpufleet.serving.flag_check import Origins, launch_command, problem_keys, problem_sentence
from gpufleet.settings import engine_flags
from gpufleet.settings.base import KeyPath
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import EngineSettings, Served

_Refusal: TypeAlias = tuple[str, str, tuple[KeyPath, ...]]
"""The model, the message, and the settings concerned."""

# Tensor and pipeline parallelism to try if an entry leaves them to the plan. If a flag is refused
# with all of these values, it is refused with any value.
_SHAPES = ((1, 1), (8, 1), (1, 8))


def declared_problems(
    settings: Mapping[str, NodeSettings], origins: Mapping[str, Origins]
) -> tuple[str, ...]:
    """
    Return a sentence for each flag and variable that the server's release refuses in any plan.
    """
    return tuple(dict.fromkeys(sentence for _, sentence, _ in _refusals(settings, origins)))


def refused_flags(
    settings: Mapping[str, NodeSettings], origins: Mapping[str, Origins]
) -> dict[str, frozenset[str]]:
    """Return the flags of each model that the server's release refuses in any plan."""
    found: dict[str, frozenset[str]] = {}
    for model, _, keys in _refusals(settings, origins):
        names = {str(key[3]) for key in keys if key[:3] == ("serving", model, "flags")}
        found[model] = found.get(model, frozenset()) | names
    return {model: names for model, names in found.items() if names}


def _refusals(
    settings: Mapping[str, NodeSettings], origins: Mapping[str, Origins]
) -> Iterator[_Refusal]:
    for node, wanted in sorted(settings.items()):
        for name, served in wanted.serving.items():
            server = wanted.engine_of(name)
            rules = engine(server.engine).flags
            if schema.release_name(server.version) not in rules.versions():
                continue
            release = rules.load(server.version)
            shapes = [
                tuple(_refused(release, stage, served, server, origins.get(node, {})))
                for stage in _stages(node, name, served)
            ]
            first, *others = shapes
            yield from (each for each in first if all(each in one for one in others))


def _stages(node: str, name: str, served: Served) -> Iterator[Stage]:
    length, flag = served.context, engine_flags.of(served.engine).length
    flags = () if length is None else (LayeredFlag(flag, length, "context"),)
    for tensor, pipeline in _SHAPES:
        yield Stage(
            name,
            0,
            node,
            gpus=(),
            gpu_uuids=(),
            port=served.port,
            tensor_parallel=served.tensor_parallel or tensor,
            pipeline_parallel=served.pipeline_parallel or pipeline,
            data_parallel=served.data_parallel or 1,
            expert_parallel=bool(served.expert_parallel),
            flags=flags,
        )


def _refused(
    release: Schema, stage: Stage, served: Served, server: EngineSettings, origins: Origins
) -> Iterator[_Refusal]:
    try:
        begun = launch_command(stage, served, server, release=server.version)
    except FleetError as error:
        yield from ((stage.model, problem, ()) for problem in error.problems)
        return
    # Presets, `prefill` and `adapters` may add a flag that another flag requires.
    open_ended = bool(served.presets or served.prefill or served.adapters)
    for problem in engine(server.engine).flags.check(release, begun.argv, begun.environment):
        if problem.refuses and not (open_ended and problem.kind is Kind.CONFLICT):
            sentence = problem_sentence(release, begun, problem, origins)
            yield stage.model, sentence, problem_keys(begun, problem)
