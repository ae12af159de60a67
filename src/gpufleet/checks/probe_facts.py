"""Accessors of a probe's document for checks.

A missing fact is never a plain None: reading it raises an exception whose type tells the check what
it means. So a check that does not handle missing facts results in "unknown", never "ok".
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

from gpufleet.checks.finding import GpuId
from gpufleet.settings import engine_flags
from gpufleet.settings.engine_flags import DEFAULT, EngineName
from gpufleet.settings.node_settings import NodeSettings

_RAISE = object()


class DoesNotApply(Exception):  # noqa: N818  # an answer, not an error
    """The hardware does not have the fact; `str()` is the reason."""


class CannotTell(Exception):  # noqa: N818
    """The driver is too old to be queried."""


class Unread(Exception):  # noqa: N818
    """The fact should be readable, but could not be read."""


# What the probe's reasons mean (docs/reference/probe.md). Every other reason is `Unread`.
_NO_SUCH_THING = {"not_supported"}
_TOO_OLD = {"function_not_found", "version", "invalid_argument"}


# Facts of a GPU without which its checks still know enough: another limit of its temperature, its
# other processes. InfoROM is only asked after; what is wrong with it is a warning.
_DISPENSABLE = {
    "graphics_processes",
    "inforom_valid",
    "margin_celsius",
    "mps_processes",
    "temperature_gpu_max_celsius",
    "temperature_limits",
    "temperature_memory_celsius",
    "temperature_memory_max_celsius",
    "temperature_slowdown_celsius",
}


# Settings that say what a fact should be, by the fact. Of ECC its check knows more.
_DECLARED = {"pcie_width": "pcie_width", "power_limit_milliwatts": "power_limit_watts"}


def is_missing(value: Any) -> bool:
    """Return whether a value is the placeholder for one that the probe could not read."""
    return isinstance(value, dict) and "missing" in value


def reason(value: Mapping[str, Any]) -> str:
    """Return why a value is missing, with the probe's details: "lost, code 15"."""
    more = [f"{key} {value[key]}" for key in ("code", "signal", "detail") if value.get(key)]
    return ", ".join([str(value["missing"]).replace("_", " "), *more])


def lookup(tree: Any, path: tuple[Any, ...], default: Any, absent: Any) -> Any:
    """Return the value at `path`; if it is missing, raise or return a default."""
    # Judging 64 nodes calls this 300,000 times, so `is_missing` is inlined.
    value = tree
    for part in path:
        if isinstance(value, dict) and "missing" in value:
            break
        value = value[part]
    if not (isinstance(value, dict) and "missing" in value):
        return value
    if default is not _RAISE:
        return default
    if absent is not _RAISE and value["missing"] == "absent":
        return absent
    name = ".".join(map(str, path))
    if value["missing"] in _NO_SUCH_THING:
        raise DoesNotApply(f"this hardware has no {name}")
    if value["missing"] in _TOO_OLD:
        raise CannotTell(f"the driver is too old to report {name}")
    raise Unread(f"{name} could not be read ({reason(value)})")


@dataclass(frozen=True)
class Needs:
    """Requirements of the declared software; a field is None if not declared.

    `cuda` is the CUDA release of an engine's wheels, and `source` the file or setting that states
    it. `engine` is the engine, as its section in the settings is named.
    """

    cuda: tuple[int, int] | None = None
    source: str = ""
    engine: EngineName = DEFAULT

    @property
    def title(self) -> str:
        """Return the engine's name in messages."""
        return engine_flags.of(self.engine).title


@dataclass(frozen=True)
class Expectation:
    """An expected value, and its source.

    `certain` is False if too few siblings agree to regard the differing one as broken.
    """

    value: Any
    source: str
    certain: bool = True


@dataclass(frozen=True)
class Reading:
    """
    One node, with its probe's document, its settings, and its siblings, which should be alike.
    """

    name: str
    document: Mapping[str, Any] = field(repr=False)
    settings: NodeSettings = field(default_factory=NodeSettings)
    needs: Needs = Needs()
    siblings: tuple[Reading, ...] = field(default=(), repr=False)
    today: dt.date = dt.date.min
    claimed: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Other nodes that report each GPU, by the GPU's UUID."""

    def get(self, *path: Any, absent: Any = _RAISE) -> Any:
        """
        Return the fact at `path`, for example ("system", "clock", "synchronized").

        Raises `DoesNotApply`, `CannotTell` or `Unread` if it is missing. For a missing file or
        device it returns `absent`, if given.
        """
        return lookup(self.document, path, _RAISE, absent)

    def known(self, *path: Any, default: Any = None) -> Any:
        """Return the fact at `path`, or the default if it is missing for any reason."""
        return lookup(self.document, path, default, _RAISE)

    @property
    def driver_answers(self) -> bool:
        """Return whether NVML could be initialised."""
        return bool(self.document["driver"]["init"] == "ok")

    @cached_property
    def gpus(self) -> tuple[GpuReading, ...]:
        """Return every GPU that answered, in NVML's order."""
        listed = enumerate(self.document["gpus"])
        return tuple(GpuReading(self, at) for at, facts in listed if not is_missing(facts))

    @cached_property
    def silent_gpus(self) -> tuple[GpuId, ...]:
        """Return every GPU that NVML lists and that did not answer."""
        return tuple(GpuId(at["index"]) for at in self.document["gpus"] if is_missing(at))

    @cached_property
    def product(self) -> str | None:
        """Return the name of most of the node's GPUs, or None."""
        names = Counter(name for gpu in self.gpus if isinstance(name := gpu.known("name"), str))
        return names.most_common(1)[0][0] if names else None

    @cached_property
    def twins(self) -> tuple[Reading, ...]:
        """Return the siblings with the same kind of GPU, which are the only ones compared."""
        return tuple(other for other in self.siblings if other.product == self.product)

    def id_of(self, index: int | str) -> GpuId:
        """Return a GPU's identifiers, by NVML's index or, if it is lost, by its PCI address."""
        if isinstance(index, str):
            return GpuId(None, bus_id=index or None)
        return next((gpu.id for gpu in self.gpus if gpu.index == index), GpuId(index))


@dataclass(frozen=True)
class GpuReading:
    """One GPU that answered."""

    node: Reading
    at: int  # its place in the document's lists

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts that the GPU reported."""
        found: Mapping[str, Any] = self.node.document["gpus"][self.at]
        return found

    @cached_property
    def index(self) -> int:
        """Return NVML's index of the GPU."""
        return int(self.facts["index"])

    @cached_property
    def id(self) -> GpuId:
        """Return the GPU's identifiers."""
        paths = {"uuid": ("uuid",), "bus_id": ("pci", "bus_id"), "serial": ("serial",)}
        texts = {}
        for key, path in paths.items():
            try:
                texts[key] = self.known(*path)
            except (LookupError, TypeError):  # an invalid answer identifies nothing
                texts[key] = None
        return GpuId(self.index, **{key: value and str(value) for key, value in texts.items()})

    def get(self, *path: Any, absent: Any = _RAISE) -> Any:
        """
        Return one of the GPU's facts, like ("ecc_mode", "current"). Raises as `Reading.get`.

        An answer "not supported" counts (`DoesNotApply`) only if none of the node's GPUs of the
        same name supports it, and its value is not declared.
        """
        try:
            return lookup(self.facts, path, _RAISE, absent)
        except DoesNotApply:
            name = ".".join(map(str, path))
            if self._is_declared(path):
                why = f"although gpus.{_DECLARED[path[0]]} declares it"
            elif self._should_tell(path):
                why = "although the node's other GPUs report it"
            else:
                raise
            raise Unread(f"GPU {self.index} does not report {name}, {why}") from None

    def _is_declared(self, path: tuple[Any, ...]) -> bool:
        setting = _DECLARED.get(path[0])
        return setting is not None and getattr(self.node.settings.gpus, setting) is not None

    def _should_tell(self, path: tuple[Any, ...]) -> bool:
        """
        Return whether this GPU should have a fact, because siblings have it and it is not disabled.
        """
        fact = str(path[0])
        if fact in _DISPENSABLE or self.known("mig_mode", "current", default=0):
            return False
        if fact.startswith("ecc_") and fact != "ecc_mode":
            with_ecc = self.known("ecc_mode", "current", default=1)
        else:
            with_ecc = 1
        return bool(with_ecc) and any(
            other.tells(path)
            for other in self.node.gpus
            if other.at != self.at and other.known("name") == self.known("name")
        )

    def tells(self, path: tuple[Any, ...]) -> bool:
        """Return whether the GPU reports the fact at `path`."""
        try:
            return self.known(*path) is not None
        except (LookupError, TypeError):
            return False  # an invalid answer is a finding of that GPU only

    def known(self, *path: Any, default: Any = None) -> Any:
        """Return one of the GPU's facts, or the default if it is missing for any reason."""
        return lookup(self.facts, path, default, _RAISE)

    def section(self, name: str, *path: Any) -> Any:
        """Return the GPU's entry in another list: "nvlink", "numa", "fabric". Raises as `get`."""
        return lookup(self.node.document[name][self.at], path, _RAISE, _RAISE)


def expectation(
    declared: Any, key: str, of_siblings: Iterable[Any], own: Any = None, own_source: str = ""
) -> Expectation | None:
    """
    Return the expected value: as declared, or else the siblings', or else `own`.

    `key` is the setting's name for the source. `of_siblings` has their values, or None where
    unknown; more than half of the known ones must agree. A single sibling makes the expectation
    uncertain, because either of two different values may be wrong. The result is None if no value
    is expected.

    >>> expectation(None, "gpus.count", [8, 8, 7]).value
    8
    """
    if declared is not None:
        return Expectation(declared, f"{key} in group_vars")
    values = [value for value in of_siblings if value is not None]
    if values:
        value, votes = Counter(values).most_common(1)[0]
        if 2 * votes > len(values):
            noun = "sibling" if votes == 1 else "siblings"
            return Expectation(value, f"{votes} {noun} of the same kind", certain=votes > 1)
    return None if own is None else Expectation(own, own_source)


def gpu_facts(gpus: Iterable[GpuReading], *path: Any) -> Iterator[tuple[GpuReading, Any]]:
    """Yield each GPU that reports the fact at `path`, with its value."""
    for gpu in gpus:
        if (value := gpu.known(*path)) is not None:
            yield gpu, value


# Exceptions if a sibling's facts are missing or invalid.
_NO_ANSWER = (CannotTell, DoesNotApply, Unread, ArithmeticError, AttributeError, LookupError,
              TypeError, ValueError)  # fmt: skip


Answer = TypeVar("Answer")


Asked = TypeVar("Asked", Reading, GpuReading)


def cached_answer(ask: Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """
    Return a function that caches its result with the node or GPU, like `cached_property`.

    Every node of a fleet is compared with every other. Without the cache 500 nodes would count each
    other's links 250 000 times.
    """
    key = f"{ask.__module__}.{ask.__name__}"

    @wraps(ask)
    def once(asked: Asked) -> Answer:
        known = vars(asked)
        if key not in known:
            known[key] = ask(asked)
        answer: Answer = known[key]
        return answer

    return once


def twin_answers(node: Reading, ask: Callable[[Reading], Answer]) -> Iterator[Answer | None]:
    """
    Yield the answer of each sibling with the same kind of GPU, or None if it has none.

    A broken sibling has its own findings, and does not make this node's state unknown.
    """
    for twin in node.twins:
        try:
            yield ask(twin)
        except _NO_ANSWER:
            yield None
