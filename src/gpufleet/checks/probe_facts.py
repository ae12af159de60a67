"""
Give checks access to the facts in a probe's document.

Reading a missing fact never returns a plain None. It raises an exception, and the type of the
exception tells the check why the fact is missing. So if a check does not handle missing facts, its
result is "unknown", never "ok".
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
    """The hardware does not have this fact. `str()` returns the reason."""


class CannotTell(Exception):  # noqa: N818
    """The driver is too old to report this fact."""


class Unread(Exception):  # noqa: N818
    """The fact should be readable, but could not be read."""


# The reasons in a probe (docs/reference/probe.md) that mean `DoesNotApply` and `CannotTell`. Every
# other reason means `Unread`.
_NO_SUCH_THING = {"not_supported"}
_TOO_OLD = {"function_not_found", "version", "invalid_argument"}


# Facts that a GPU may lack while other GPUs report them, because its checks can use other facts:
# different limits of the temperature, or different lists of processes. The state of the InfoROM is
# among them, because its problems are only warnings.
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


# The setting that declares the value of a fact. ECC is not here, because its check handles the
# declaration itself.
_DECLARED = {"pcie_width": "pcie_width", "power_limit_milliwatts": "power_limit_watts"}


def is_missing(value: Any) -> bool:
    """Return whether a value is the probe's placeholder for a fact that it could not read."""
    return isinstance(value, dict) and "missing" in value


def reason(value: Mapping[str, Any]) -> str:
    """Return why a fact is missing, with the details that the probe has: "lost, code 15"."""
    more = [f"{key} {value[key]}" for key in ("code", "signal", "detail") if value.get(key)]
    return ", ".join([str(value["missing"]).replace("_", " "), *more])


def lookup(tree: Any, path: tuple[Any, ...], default: Any, absent: Any) -> Any:
    """
    Return the value at `path`. If it is missing, return a default or raise an exception.

    `default` is returned for any missing value, and `absent` for a missing file or device.
    """
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
    """
    What the declared software requires. A field is None if the software does not declare it.

    `cuda` is the CUDA release of the engine's wheels, and `source` is the file or setting that
    contains it. `engine` is the name of the engine's section in the settings.
    """

    cuda: tuple[int, int] | None = None
    source: str = ""
    engine: EngineName = DEFAULT

    @property
    def title(self) -> str:
        """Return the name of the engine for messages."""
        return engine_flags.of(self.engine).title


@dataclass(frozen=True)
class Expectation:
    """
    An expected value, and where it comes from.

    `certain` is False if too few siblings agree, so a different value is not certainly wrong.
    """

    value: Any
    source: str
    certain: bool = True


@dataclass(frozen=True)
class Reading:
    """One node: its probe's document, its settings, and its siblings, which should be like it."""

    name: str
    document: Mapping[str, Any] = field(repr=False)
    settings: NodeSettings = field(default_factory=NodeSettings)
    needs: Needs = Needs()
    siblings: tuple[Reading, ...] = field(default=(), repr=False)
    today: dt.date = dt.date.min
    claimed: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """A dict that maps the UUID of a GPU to the other nodes that also report the GPU as theirs."""

    def get(self, *path: Any, absent: Any = _RAISE) -> Any:
        """
        Return the fact at `path`, for example ("system", "clock", "synchronized").

        Raises `DoesNotApply`, `CannotTell` or `Unread` if the fact is missing. If `absent` is
        given, it is returned for a missing file or device.
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
        """Return every GPU that answered, in the order of NVML."""
        listed = enumerate(self.document["gpus"])
        return tuple(GpuReading(self, at) for at, facts in listed if not is_missing(facts))

    @cached_property
    def silent_gpus(self) -> tuple[GpuId, ...]:
        """Return every GPU that is in NVML's list but did not answer."""
        return tuple(GpuId(at["index"]) for at in self.document["gpus"] if is_missing(at))

    @cached_property
    def product(self) -> str | None:
        """Return the name that most of the node's GPUs have, or None."""
        names = Counter(name for gpu in self.gpus if isinstance(name := gpu.known("name"), str))
        return names.most_common(1)[0][0] if names else None

    @cached_property
    def twins(self) -> tuple[Reading, ...]:
        """Return the siblings with the same kind of GPU. Only these are compared with the node."""
        return tuple(other for other in self.siblings if other.product == self.product)

    def id_of(self, index: int | str) -> GpuId:
        """
        Return the identifiers of a GPU that is given by its NVML index or, if it is missing, by its
        PCI address.
        """
        if isinstance(index, str):
            return GpuId(None, bus_id=index or None)
        return next((gpu.id for gpu in self.gpus if gpu.index == index), GpuId(index))


@dataclass(frozen=True)
class GpuReading:
    """One GPU that answered."""

    node: Reading
    at: int  # the position of the GPU in the lists of the probe's document

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
        Return one of the GPU's facts, for example ("ecc_mode", "current"). Raises as `Reading.get`.

        The answer "not supported" is believed (`DoesNotApply`) only if no other GPU of the node
        with the same name reports the fact, and no setting declares its value. Otherwise `Unread`
        is raised.
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
        Return whether the GPU should report a fact, because other GPUs of the node with the same
        name report it, and neither MIG nor a disabled ECC hides it.
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
        """
        Return the GPU's entry in another list of the document: "nvlink", "numa" or "fabric". Raises
        as `get`.
        """
        return lookup(self.node.document[name][self.at], path, _RAISE, _RAISE)


def expectation(
    declared: Any, key: str, of_siblings: Iterable[Any], own: Any = None, own_source: str = ""
) -> Expectation | None:
    """
    Return the expected value: the declared value, or else the siblings' value, or else `own`.

    `key` is the name of the setting, for the text about the source. `of_siblings` has the values of
    the siblings, or None for unknown values. More than half of the known values must agree. If
    there is only one, the expectation is uncertain, because either of two different values may be
    wrong. The result is None if no value is expected.

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


# The exceptions that may be raised if a sibling's facts are missing or invalid.
_NO_ANSWER = (CannotTell, DoesNotApply, Unread, ArithmeticError, AttributeError, LookupError,
              TypeError, ValueError)  # fmt: skip


Answer = TypeVar("Answer")


Asked = TypeVar("Asked", Reading, GpuReading)


def cached_answer(ask: Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """
    Return a function that stores its result in the node or GPU, like `cached_property`.

    Every node is compared with its siblings. Without the cache, the links of the same node would be
    counted once for each node that is compared with it.
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
    Yield the result of `ask` for each sibling with the same kind of GPU, or None if it has no
    result.

    A faulty sibling has its own findings, so it does not make the state of this node unknown.
    """
    for twin in node.twins:
        try:
            yield ask(twin)
        except _NO_ANSWER:
            yield None
