"""
Merge the layers that set a model's flags, and record the layer of each flag. Pure.

The layers are, from weakest to strongest: the presets in their order, the settings that set a flag
(`context`), and the operator's `flags`. No layer is allowed to set a flag that the plan itself
decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpufleet.catalog import presets
from gpufleet.errors import FleetError
from gpufleet.node.topology import Gpu, Node
from gpufleet.planning import adapter_flags, gpu_shares
from gpufleet.settings import engine_flags
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Argument, Served
from gpufleet.versions import numbers

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description

KIND = "kind"
"""The layer of flags for the model's kind: `planning/kind_flags.py`."""
YOURS = "yours"
"""The layer of the operator's own `flags`."""


@dataclass(frozen=True)
class LayeredFlag:
    """
    A flag of `vllm serve`, with the layer that sets it and the reason. `name` has no dashes in
    front.
    """

    name: str
    value: Argument
    layer: str
    """`preset NAME`, `context`, `kind`, `adapters`, `gpu_share` or `yours`."""
    because: str = ""


def requested_context(served: Served) -> Argument | None:
    """
    Return an entry's requested context length, or None for the release's default.

    The length is set with `context` or with the equivalent flag. The settings refuse an entry that
    sets both.
    """
    if served.context is not None:
        return served.context
    own = {name.lstrip("-").replace("_", "-"): value for name, value in served.flags.items()}
    return own.get(engine_flags.of(served.engine).length)


def objective(served: Served) -> str:
    """Return the objective that the operator sets, or else the objective of the last preset."""
    if "objective" in served.model_fields_set or not served.presets:
        return served.objective
    return presets.load(served.presets[-1]).objective


def resolve_flags(served: Served, subject: presets.Subject) -> tuple[LayeredFlag, ...]:
    """
    Return every flag that a layer sets, sorted by name, with the value from the strongest layer.

    Raises `FleetError` with every preset that cannot be applied. Such a preset has no suitable
    value of a flag for this model, or it needs a flag that the operator has not set.
    """
    found: dict[str, LayeredFlag] = {}
    problems: list[str] = []
    own = {name.lstrip("-").replace("_", "-") for name in served.flags}
    derived = adapter_flags.DERIVED if served.adapters else frozenset()
    for name in served.presets:
        preset = presets.load(name)
        for flag, choices in preset.flags.items():
            if flag in own or (flag == gpu_shares.UTILIZATION and served.gpu_share is not None):
                continue
            try:
                choice = presets.choose(name, choices, subject)
            except FleetError as error:
                problems += error.problems
                continue
            if choice is not None:
                found[flag] = LayeredFlag(flag, choice[0], f"preset {name}", choice[1])
        problems += [
            f"preset {name} needs `flags.{need.flag}`: {need.what}"
            for need in preset.needs
            if need.flag not in own | derived
        ]
    if problems:
        raise FleetError(*problems)
    flag = engine_flags.of(served.engine).length
    if flag not in own and (length := requested_context(served)) is not None:
        found[flag] = LayeredFlag(flag, length, "context")
    found |= {name: LayeredFlag(name, value, YOURS) for name, value in served.flags.items()}
    return tuple(sorted(found.values(), key=lambda each: each.name))


def resolve_layers(
    settings: Mapping[str, NodeSettings],
    models: Mapping[str, Description | str | None],
    nodes: Mapping[str, Node],
) -> dict[tuple[str, str], tuple[LayeredFlag, ...]]:
    """
    Return the flags from all layers, for each pair of a model and the name of its release.

    Raises `FleetError` with every flag that cannot be set.
    """
    declared: dict[tuple[str, str], tuple[Served, list[Node]]] = {}
    for name, wanted in sorted(settings.items()):
        for model, served in wanted.serving.items():
            entry = declared.setdefault((model, release_name(wanted, model)), (served, []))
            entry[1].extend([nodes[name]] if name in nodes else [])
    found: dict[tuple[str, str], tuple[LayeredFlag, ...]] = {}
    problems: list[str] = []
    for (model, release), (served, on) in declared.items():
        version = numbers(release.rpartition(" ")[2])
        description = models.get(model)
        about = presets.Subject(served.model, version)
        if description is not None and not isinstance(description, str):
            every = description.architecture.layers
            about = replace(
                about,
                architecture=description.architecture.name,
                caches=presets.cache_kinds(cache for layer in every for cache in layer.caches),
            )
        gpus = [gpu.compute_capability for node in on for gpu in node.gpus]
        try:
            found[model, release] = resolve_flags(
                served, replace(about, capability=min(gpus, default=None))
            )
        except FleetError as error:
            problems += (f"serving.{model}.presets: {problem}" for problem in error.problems)
            continue
        try:
            found[model, release] = _with_adapters(found[model, release], served, description)
            found[model, release] = _with_share(
                found[model, release],
                served,
                [
                    gpu
                    for node in on
                    for gpu in node.gpus
                    if gpu.index not in settings[node.name].gpus.reserved
                ],
                version,
            )
        except FleetError as error:
            problems += (f"serving.{model}.{problem}" for problem in error.problems)
    if problems:
        raise FleetError(*problems)
    return found


def _with_adapters(
    flags: tuple[LayeredFlag, ...], served: Served, description: Description | str | None
) -> tuple[LayeredFlag, ...]:
    """
    Return `flags` and the flags that the entry's `adapters` need.

    Raises `FleetError` with messages that begin with a key.
    """
    if not served.adapters:
        return flags
    added = adapter_flags.derive(served, {each.name: each.value for each in flags}, description)
    return tuple(
        sorted(
            (
                *(each for each in flags if each.name not in added),
                *(
                    LayeredFlag(name, value, adapter_flags.LAYER, because)
                    for name, (value, because) in added.items()
                ),
            ),
            key=lambda each: each.name,
        )
    )


def _with_share(
    flags: tuple[LayeredFlag, ...], served: Served, gpus: Iterable[Gpu], vllm: tuple[int, ...]
) -> tuple[LayeredFlag, ...]:
    """
    Return `flags` and the flag that the entry's `gpu_share` needs.

    Raises `FleetError` with messages that begin with a key.
    """
    derived = gpu_shares.derive(served, {each.name: each.value for each in flags}, gpus, vllm)
    if derived is None:
        return flags
    value, because = derived
    added = LayeredFlag(gpu_shares.UTILIZATION, value, gpu_shares.LAYER, because)
    return tuple(sorted((*flags, added), key=lambda each: each.name))


def apply_layers(
    settings: Mapping[str, NodeSettings],
    layers: Mapping[tuple[str, str], tuple[LayeredFlag, ...]],
) -> dict[str, NodeSettings]:
    """
    Return the settings for the plan, with the flags of all layers and the presets' objectives.
    """

    def layered(wanted: NodeSettings) -> NodeSettings:
        def with_flags(model: str, served: Served) -> Served:
            flags = {each.name: each.value for each in layers[model, release_name(wanted, model)]}
            return served.model_copy(update={"flags": flags, "objective": objective(served)})

        return wanted.with_serving(with_flags)

    return {
        name: layered(wanted)
        if any(
            served.presets
            or served.adapters
            or served.gpu_share is not None
            or any(each.layer == KIND for each in layers[model, release_name(wanted, model)])
            for model, served in wanted.serving.items()
        )
        else wanted
        for name, wanted in settings.items()
    }


def preset_flags(flags: Iterable[LayeredFlag]) -> tuple[LayeredFlag, ...]:
    """Return the flags from all layers except the operator's `flags`."""
    return tuple(each for each in flags if each.layer != YOURS)


def release_name(settings: NodeSettings, model: str) -> str:
    """
    Return the name of an entry's release.

    The name is the version of vLLM, or the engine and its version if the engine is not vLLM.
    """
    engine = settings.engine_of(model)
    return engine.version if engine.engine == DEFAULT else f"{engine.engine} {engine.version}"
