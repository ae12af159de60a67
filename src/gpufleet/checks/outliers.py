"""
Find GPUs and nodes that differ from others which should be equal. Pure.

`checks/outlier_facts.py` has the table of comparisons and tolerances. A value is an outlier if more
than half of the other values agree with each other and it differs from them. If there are only two
values, either of them may be wrong. Then the worse value is reported, but never as `block`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

from gpufleet.catalog.gpu_models import product_card
from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.outlier_facts import (
    GIB,
    JUDGED_OF_GPU,
    JUDGED_OF_NODE,
    Fact,
    Reference,
)
from gpufleet.checks.outlier_facts import Step as Tolerance
from gpufleet.checks.probe_facts import DoesNotApply, GpuReading, Reading, cached_answer

CERTAIN = 2
"""If at least this number of other values agree, a different value is certainly wrong."""

# On GDDR, ECC takes 1/16 of the memory, and the catalogue does not state whether ECC was on.
WITH_ECC = 15 / 16

_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Outlier:
    """
    One value that differs: its severity, its text, the usual value, and what it was compared with.
    """

    severity: Severity
    found: str
    usual: str
    source: str


def gpu_outlier(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the GPU's numbers are like those of the same model on its node and on the siblings.

    One problem lists all outliers of the GPU. If a node has no siblings, a GPU that is the only one
    of its model is not compared.
    """
    found: list[Outlier] = []
    compared = False
    for fact in JUDGED_OF_GPU:
        for against in fact.against:
            others = _others_of(fact, gpu, against)
            outlier, done = _compared(fact, "", _gpu_value(fact, gpu), others, against)
            compared = compared or (done and against is not Reference.CATALOGUE)
            if outlier:
                found.append(outlier)
                break
    if found:
        yield _problem(found, _GPU_LADDER, gpu.index)
    elif not compared:
        raise DoesNotApply("no other GPU of the same model on this node or its sibling nodes")


def node_outlier(node: Reading) -> Iterator[Problem]:
    """
    Check that the node's numbers are like those of siblings with the same hardware, and that the
    possible error of its clock is small.

    One problem lists all outliers of the node. Siblings with a different number of GPUs are not
    compared.
    """
    found: list[Outlier] = []
    compared = False
    for fact in JUDGED_OF_NODE:
        here = _node_values(node)[fact.path]
        limited = Reference.LIMIT in fact.against
        there = [] if limited else [_node_values(twin)[fact.path] for twin in _same_machines(node)]
        for key in here if limited else _usual_keys(there):
            others = [0] if limited else [values.get(key) for values in there]
            value = here.get(key)
            if key and key not in here:  # a missing or renamed device: its own check reports that
                continue
            outlier, done = _compared(fact, key, value, others, fact.against[0])
            compared = compared or (done and not limited)
            if outlier:
                found.append(outlier)
    if found:
        yield _problem(found, _NODE_LADDER, None)
    elif not compared:
        raise DoesNotApply("no sibling node with the same hardware")


def _problem(found: Sequence[Outlier], ladder: tuple[Step, ...], gpu: int | None) -> Problem:
    worst_first = sorted(found, key=lambda one: -one.severity)
    sources = Counter(one.source for one in worst_first)
    return Problem(
        worst_first[0].severity,
        "; ".join(one.found for one in worst_first),
        "; ".join(one.usual for one in worst_first),
        ", ".join(sources),
        ladder if worst_first[0].severity > Severity.INFO else (),
        gpu,
    )


_GPU_LADDER = (
    Step(
        Action.LOOK,
        "compare `nvidia-smi -q -i INDEX` of this GPU and of a different GPU, to "
        "see which one is unusual",
    ),
    Step(
        Action.LOOK,
        "`dmesg | grep -E 'NVRM|AER' | tail -30`; if memory, lanes or speed are too low: power "
        "the node off and on over the BMC, then check again",
    ),
    Step(
        Action.SERVICE,
        "if the difference persists: have the GPU reseated and its fans and slot inspected, then "
        "have the GPU replaced",
    ),
    Step(
        Action.CONFIGURE,
        "if the difference is intended: put the node into a group of identical nodes, or accept "
        "the finding (checks.accept)",
    ),
)
_NODE_LADDER = (
    Step(
        Action.LOOK,
        "compare with a sibling node: `lscpu`, `dmidecode -t memory | grep Size`, `nvidia-smi "
        "topo -m`, `ip -d link`",
    ),
    Step(
        Action.SERVICE,
        "if there are fewer CPUs or less memory: have DIMMs and CPUs inspected, and check the "
        "BIOS settings",
    ),
    Step(
        Action.CONFIGURE,
        "if the node was built this way: put it into a group of identical nodes in the "
        "inventory, or accept the finding (checks.accept)",
    ),
)


# --- values


def _number(value: Any) -> Any:
    """Return the value if it can be compared as a number, or else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _name(value: Any) -> Any:
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _kept(fact: Fact, value: Any) -> Any:
    return _name(value) if fact.names else _number(value)


@cached_answer
def _gpu_values(gpu: GpuReading) -> dict[str, tuple[Any, Any]]:
    """
    Return for each fact the GPU's value, or None, and the group of GPUs with which it is compared.
    """
    found = {}
    for fact in JUDGED_OF_GPU:
        try:
            among = (gpu.known("name"), told) if (told := fact.among(gpu)) is not None else None
        except _NONSENSE:
            among = None
        try:
            value = _kept(fact, fact.read(gpu))
        except _NONSENSE:
            value = None
        found[fact.path] = (value, among)
    return found


def _gpu_value(fact: Fact, gpu: GpuReading) -> Any:
    return _gpu_values(gpu)[fact.path][0]


def _others_of(fact: Fact, gpu: GpuReading, against: Reference) -> list[Any]:
    """
    Return the values of the GPUs with which this GPU is compared. A GPU without a value counts as
    None.
    """
    among = _gpu_values(gpu)[fact.path][1]
    if among is None:
        return []
    if against is Reference.MATES:
        return [
            value
            for other in gpu.node.gpus
            if other.at != gpu.at
            for value, its in [_gpu_values(other)[fact.path]]
            if its == among
        ]
    if against is Reference.CATALOGUE:
        card = product_card(str(gpu.known("name")))
        return [] if card is None else [card.memory_gib * GIB * WITH_ECC]
    if against is Reference.SLOT:
        place = gpu.known("pci", "bus_id")
        found = (_by_slot(twin).get(str(place)) for twin in gpu.node.twins)
        pairs = [_gpu_values(other)[fact.path] for other in found if other is not None]
        return [value for value, its in pairs if its == among]
    told = (_usual_of_twin(twin).get((fact.path, among)) for twin in gpu.node.twins)
    return [value for value in told if value is not None]


@cached_answer
def _by_slot(node: Reading) -> dict[str, GpuReading]:
    return {str(gpu.known("pci", "bus_id")): gpu for gpu in node.gpus}


@cached_answer
def _usual_of_twin(node: Reading) -> dict[tuple[str, Any], Any]:
    """
    Return, for each fact and group of GPUs, the value that most of the node's GPUs in the group
    have.
    """
    votes: dict[tuple[str, Any], Counter[Any]] = {}
    for gpu in node.gpus:
        for path, (value, among) in _gpu_values(gpu).items():
            if value is not None and among is not None:
                votes.setdefault((path, among), Counter())[value] += 1
    return {key: counted.most_common(1)[0][0] for key, counted in votes.items()}


@cached_answer
def _node_values(node: Reading) -> dict[str, Mapping[str, Any]]:
    """Return the node's values as {path of the fact: {device: value}}. An invalid value is None."""
    found: dict[str, Mapping[str, Any]] = {}
    for fact in JUDGED_OF_NODE:
        try:
            told = fact.read(node)
            found[fact.path] = {str(key): _kept(fact, value) for key, value in told.items()}
        except _NONSENSE:
            found[fact.path] = {"": None}
    return found


def _same_machines(node: Reading) -> list[Reading]:
    count = len(node.document["gpus"])
    return [twin for twin in node.twins if len(twin.document["gpus"]) == count]


def _usual_keys(there: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the devices that more than half of the siblings have."""
    votes = Counter(key for values in there for key in values)
    return [key for key, count in votes.items() if 2 * count > len(there)]


# --- the comparison


def _compared(
    fact: Fact, key: str, value: Any, others: Sequence[Any], against: Reference
) -> tuple[Outlier | None, bool]:
    """
    Return the outlier, or None if the value is usual, and whether the value could be compared.
    """
    told = [other for other in others if other is not None]
    if value is None:
        if fact.asked_by or 2 * len(told) <= len(others) or len(told) < CERTAIN:
            return None, False
        return Outlier(
            Severity.WARN,
            f"{_words(fact, key)} is not reported",
            _said(fact, key, _usual(fact, told)),
            against.value,
        ), True
    if not told:
        return None, False
    found = _named(fact, value, told) if fact.names else _measured(fact, value, told)
    if found is None:
        return None, True
    severity, usual = found
    source = fact.source if against is Reference.LIMIT else _counted(against, told, usual, fact)
    expected = _said(fact, key, usual)
    if against is Reference.LIMIT:
        expected = f"at most {fact.show(fact.high[0].least)}"
    return Outlier(severity, _said(fact, key, value), expected, source), True


def _usual(fact: Fact, told: Sequence[Any]) -> Any:
    return Counter(told).most_common(1)[0][0] if fact.names else median_low(told)


def _words(fact: Fact, key: str) -> str:
    return f"{key}: {fact.path}" if key else fact.path


def _said(fact: Fact, key: str, value: Any) -> str:
    said = fact.words.format(fact.show(value))
    return f"{key}: {said}" if key else said


def _counted(against: Reference, told: Sequence[Any], usual: Any, fact: Fact) -> str:
    with_whom: str = against.value
    if against in {Reference.MATES, Reference.CATALOGUE}:
        return with_whom
    alike = sum(1 for other in told if fact.names or other == usual)
    return f"{alike or len(told)} {with_whom}"


def _named(fact: Fact, value: Any, told: Sequence[Any]) -> tuple[Severity, Any] | None:
    usual, votes = Counter(told).most_common(1)[0]
    if value == usual or 2 * votes <= len(told):
        return None
    severity = fact.low[0].severity
    return (severity if votes >= CERTAIN else min(severity, Severity.INFO)), usual


def _measured(fact: Fact, value: float, told: Sequence[float]) -> tuple[Severity, float] | None:
    usual = median_high(told) if value < median_low(told) else median_low(told)
    steps = fact.low if value < usual else fact.high
    if not steps:
        return None
    near = [other for other in told if abs(other - usual) <= steps[0].allowed(usual)]
    if not fact.spread and 2 * len(near) <= len(told):
        return None
    nearest = usual
    if fact.spread:
        nearest = min(told) if value < usual else max(told)
    severity = _reached(steps, value, usual, nearest)
    if severity is None:
        return None
    if len(near) < CERTAIN and len(told) < CERTAIN and Reference.LIMIT not in fact.against:
        other_side = fact.high if value < usual else fact.low
        if other_side and other_side[0].severity > steps[0].severity:
            return None  # the other GPU or node is worse, and has its own finding
        severity = min(severity, Severity.WARN)
    return severity, usual


def _reached(
    steps: Sequence[Tolerance], value: float, usual: float, nearest: float
) -> Severity | None:
    """
    Return the severity of the last step that applies to the value, or None if no step applies.
    """
    reached = None
    for number, step in enumerate(steps):
        start = nearest if number == 0 else usual
        if abs(value - start) > step.allowed(usual) and (
            number > 0 or (value < start) == (value < usual)
        ):
            reached = step.severity
        elif number == 0:
            return None
    return reached


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {"node-outlier": node_outlier}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {"gpu-outlier": gpu_outlier}
