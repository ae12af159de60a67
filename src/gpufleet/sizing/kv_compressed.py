"""
How a release groups DeepSeek V4's caches, whose pages are of several sizes in each layer.  Pure.

Layers stand in tuples with one page of each size; groups have about as many tuples. Source:
_get_kv_cache_groups_uniform_groups in v1/core/kv_cache_utils.py of 0.20 to 0.28, and
_get_packed_kv_cache_groups there (0.33: kv_cache_planning.py) since 0.29.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from gpufleet.sizing.kv_bytes import COMPRESSED, Kind, Page, padded

Layers = list[tuple[int, Page]]
"""(number of the stage, page)"""


def is_compressed(layers: Layers) -> bool:
    """Return whether these are DeepSeek V4's."""
    return any(page.shape[0] == COMPRESSED for _, page in layers)


def packed(vllm: tuple[int, ...], layers: Layers) -> list[Layers]:
    """Return the layers of each group; the first has the whole context."""
    full = [(number, page) for number, page in layers if page.kind is Kind.FULL]
    kinds: dict[tuple[int, int], Layers] = {}
    for number, page in layers:
        if page.kind is Kind.WINDOW:
            kinds.setdefault((page.block, page.span), []).append((number, page))
    windows = list(kinds.values())
    if not full:
        return windows
    if vllm < (0, 29):
        sizes = sorted({page.bytes for _, page in full})
        tuples = _least_padding(list(map(_tuples, (full, *windows))), _tuples(full))
        if vllm < (0, 27):
            windows = [
                [(number, padded(page, _next(sizes, page.bytes))) for number, page in window]
                for window in windows
            ]
        return [full, *chain.from_iterable(_split(window, tuples) for window in windows)]
    even = [group for group in (full, *windows) if _is_even(group)]
    mixed = [_tuples(group) for group in even if len(_by_size(group)) > 1]
    if not mixed:
        return [full, *windows]
    tuples = _least_padding(list(map(_tuples, even)), max(mixed))
    return [
        part
        for group in (full, *windows)
        for part in (_split(group, tuples) if _is_even(group) else [group])
    ]


def slots(groups: Sequence[Counter[Page]]) -> Counter[int]:
    """Return how many pages of each size a block of the pool has: the most that a group wants."""
    found: Counter[int] = Counter()
    for group in groups:
        sizes: Counter[int] = Counter()
        for page, count in group.items():
            sizes[page.bytes] += count
        found |= sizes
    return found


def _next(sizes: list[int], size: int) -> int:
    return next((larger for larger in sizes if larger >= size), size)


def _by_size(group: Layers) -> dict[int, Layers]:
    found: dict[int, Layers] = {}
    for number, page in group:
        found.setdefault(page.bytes, []).append((number, page))
    return found


def _tuples(group: Layers) -> int:
    return max(map(len, _by_size(group).values()))


def _is_even(group: Layers) -> bool:
    return len({len(members) for members in _by_size(group).values()}) == 1


def _split(group: Layers, tuples: int) -> list[Layers]:
    """Deal out the tuples of a group over as few groups as have at most `tuples`."""
    rows = list(zip(*_by_size(group).values(), strict=False))
    count = -(-len(rows) // tuples)
    return [list(chain.from_iterable(rows[part::count])) for part in range(count)]


def _least_padding(counts: list[int], least: int) -> int:
    """Return the number, of at least `least`, to whose multiples the counts round up best."""
    best = least
    fewest = None
    for number in range(least, max(counts) + 1):
        added = sum(-count % number for count in counts)
        if fewest is None or added <= fewest:
            best, fewest = number, added
    return best
