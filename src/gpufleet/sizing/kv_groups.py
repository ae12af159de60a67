"""
Group the layers of a model that share a block table, in the same way as a vLLM release. Pure.

Source: vllm/v1/core/kv_cache_utils.py (0.33: kv_cache_planning.py) of 0.8.5 to 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from gpufleet.sizing.kv_bytes import (
    COMPRESSED,
    Kind,
    Layout,
    Page,
    pad_page,
    pages,
    widen_page,
)

Layers = list[tuple[int, Page]]
"""(number of the stage, page) of each layer."""


@dataclass(frozen=True)
class Group:
    """Layers with a common block table."""

    pages: tuple[tuple[int, Page], ...]
    """(number of the stage, page) of each layer in the group."""
    uniform: bool = False
    """
    Whether layers of one kind have pages of different sizes, so that each layer has its own memory.
    """
    packed: bool = False
    """Whether this is one of several groups with pages of several sizes (DeepSeek V4)."""

    @cached_property
    def counts(self) -> Counter[Page]:
        """Return the number of layers with each page."""
        return Counter(page for _, page in self.pages)

    @cached_property
    def by_stage(self) -> dict[int, Counter[Page]]:
        """Return `counts` for each stage."""
        found: dict[int, Counter[Page]] = {}
        for number, page in self.pages:
            found.setdefault(number, Counter())[page] += 1
        return found

    @cached_property
    def page(self) -> Page:
        """Return the first layer's page, which all layers have unless the group is uniform."""
        return self.pages[0][1]

    def on(self, stage: int) -> Counter[Page]:
        """Return the number of layers with each page on one stage."""
        return self.by_stage.get(stage, _NONE)


_NONE: Counter[Page] = Counter()


class GroupingError(Exception):
    """The release cannot serve these layers together. The message is a sentence with the reason."""


def group_layers(layout: Layout, layers: Layers) -> tuple[Group, ...]:
    """
    Return the groups that the release forms of these layers.

    Raises `GroupingError` if the release cannot serve them together.
    """
    vllm = layout.vllm
    if not _keeps_windows(layout):
        layers = _promote(vllm, layers)
    distinct = {page for _, page in layers}
    if len(distinct) == 1:
        return (Group(tuple(layers)),)
    if vllm < (0, 9, 1):
        raise GroupingError("this release serves only layers with one kind of KV cache")
    if vllm >= (0, 11) and _is_one_kind(layers):
        return (Group(tuple(layers), uniform=True),)
    if _is_compressed(layers):
        return tuple(
            Group(tuple(members), uniform=True, packed=True) for members in _pack(vllm, layers)
        )
    layers = _equalize(vllm, layers)
    return _split_evenly(vllm, layers)


def _keeps_windows(layout: Layout) -> bool:
    """
    Return whether layers with windows or chunks store only these, and not the whole context.

    They store the whole context before 0.9.1, with --disable-hybrid-kv-cache-manager, and on the
    CPU before 0.10.2 (support_hybrid_kv_cache in platforms/cpu.py). Since 0.10.1, layers with
    chunks (Llama 4) store the whole context by default, because of latency.
    """
    if not layout.hybrid_manager or layout.vllm < (0, 9, 1):
        return False
    chunks = any(
        page.kind is Kind.CHUNK for stage in layout.stages for page in pages(layout, stage)
    )
    return not (chunks and layout.vllm >= (0, 10, 1))


def _promote(vllm: tuple[int, ...], layers: Layers) -> Layers:
    """Return the layers, with windows and chunks changed to full attention unless all are equal."""
    full = [page for _, page in layers if page.kind is Kind.FULL]
    if _is_one_kind(layers):
        return layers
    spans = {page.span for _, page in layers if page.span}
    if vllm >= (0, 9) and (not full or len(spans) > 1):
        raise GroupingError(
            "without the hybrid KV cache manager, vLLM does not support layers with several "
            "sizes of sliding windows: remove --disable-hybrid-kv-cache-manager"
        )
    raised = []
    for number, page in layers:
        if page.kind not in (Kind.WINDOW, Kind.CHUNK):
            raised.append((number, page))
            continue
        # If a changed page is as large as a page of full attention, it becomes that page.
        alike = next((other for other in full if other.bytes == page.bytes), None)
        grows = page.bytes // page.block
        raised.append((number, alike or replace(page, kind=Kind.FULL, span=0, grows=grows)))
    if any(page.kind is Kind.STATE for _, page in raised):
        raise GroupingError(
            "states (Mamba, linear attention) need the hybrid KV cache manager: remove "
            "--disable-hybrid-kv-cache-manager"
        )
    return raised


def _is_one_kind(layers: Layers) -> bool:
    """
    Return whether all layers need the same number of blocks for a request.

    If so, they form one group and their pages are not changed.
    """
    return (
        len({page.kind for _, page in layers}) == 1
        and len({page.block for _, page in layers}) == 1
        and len({page.span for _, page in layers}) == 1
    )


def _equalize(vllm: tuple[int, ...], layers: Layers) -> Layers:
    """
    Return the layers with pages of one size.

    Since 0.12, a smaller page gets a block that is larger by a whole factor. Before 0.12, all pages
    must have the same size. If no whole factor fits, the page is padded. This is possible for
    attention since 0.24 and for states since 0.26, but not for MLA.
    """
    largest = max(page.bytes for _, page in layers)
    return [(number, _resize(vllm, page, largest)) for number, page in layers]


def _resize(vllm: tuple[int, ...], page: Page, size: int) -> Page:
    if page.bytes == size:
        return page
    if page.kind is Kind.STATE:
        if vllm >= (0, 26):
            return pad_page(page, size)
    elif vllm >= (0, 12) and size % page.bytes == 0:
        return widen_page(page, size // page.bytes)
    elif vllm >= (0, 24) and page.shape[0] != "latent":
        return pad_page(page, size)
    raise GroupingError(
        f"the layers have KV pages of {page.bytes} and {size} bytes, and this release cannot "
        "make their sizes equal"
    )


def _split_evenly(vllm: tuple[int, ...], layers: Layers) -> tuple[Group, ...]:
    """
    Return groups with about the same number of layers, each with one kind of page.

    The maximum size of a group is the number of layers of the rarest kind. If the most frequent
    kind has less than 1.25 times as many layers (since 0.12; 1.5 times since 0.18), its number of
    layers is used instead. The layers of a stage are distributed over all groups of a kind.
    """
    kinds: dict[Page, Layers] = {}
    for number, page in layers:
        kinds.setdefault(page, []).append((number, page))
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    limit = 1.5 if vllm >= (0, 18) else 1.25
    size = most if vllm >= (0, 12) and most < fewest * limit else fewest
    found: list[Group] = []
    for members in kinds.values():
        count = -(-len(members) // size)
        found.extend(Group(tuple(members[index::count])) for index in range(count))
    return tuple(found)


def _is_compressed(layers: Layers) -> bool:
    """Return whether these are DeepSeek V4's layers."""
    return any(page.shape[0] == COMPRESSED for _, page in layers)


def _pack(vllm: tuple[int, ...], layers: Layers) -> list[Layers]:
    """
    Return the layers of each group of DeepSeek V4, whose layers have pages of several sizes.

    The first group has the layers that store the whole context. In a group, layers form tuples with
    one page of each size. The groups have about the same number of tuples. Source:
    _get_kv_cache_groups_uniform_groups in v1/core/kv_cache_utils.py of 0.20 to 0.28, and
    _get_packed_kv_cache_groups there (0.33: kv_cache_planning.py) since 0.29.
    """
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
        tuples = _least_padding(list(map(_tuple_count, (full, *windows))), _tuple_count(full))
        if vllm < (0, 27):
            windows = [
                [(number, pad_page(page, _next_size(sizes, page.bytes))) for number, page in window]
                for window in windows
            ]
        return [full, *chain.from_iterable(_split_tuples(window, tuples) for window in windows)]
    even = [group for group in (full, *windows) if _has_even_sizes(group)]
    mixed = [_tuple_count(group) for group in even if len(_by_size(group)) > 1]
    if not mixed:
        return [full, *windows]
    tuples = _least_padding(list(map(_tuple_count, even)), max(mixed))
    return [
        part
        for group in (full, *windows)
        for part in (_split_tuples(group, tuples) if _has_even_sizes(group) else [group])
    ]


def page_slots(groups: Sequence[Counter[Page]]) -> Counter[int]:
    """
    Return the number of pages of each size that a block of the pool has.

    It is the highest number of pages of this size that any of these groups has.
    """
    found: Counter[int] = Counter()
    for group in groups:
        sizes: Counter[int] = Counter()
        for page, count in group.items():
            sizes[page.bytes] += count
        found |= sizes
    return found


def _next_size(sizes: list[int], size: int) -> int:
    return next((larger for larger in sizes if larger >= size), size)


def _by_size(group: Layers) -> dict[int, Layers]:
    found: dict[int, Layers] = {}
    for number, page in group:
        found.setdefault(page.bytes, []).append((number, page))
    return found


def _tuple_count(group: Layers) -> int:
    return max(map(len, _by_size(group).values()))


def _has_even_sizes(group: Layers) -> bool:
    return len({len(members) for members in _by_size(group).values()}) == 1


def _split_tuples(group: Layers, tuples: int) -> list[Layers]:
    """Distribute the tuples of a group over the fewest groups with at most `tuples` each."""
    rows = list(zip(*_by_size(group).values(), strict=False))
    count = -(-len(rows) // tuples)
    return [list(chain.from_iterable(rows[part::count])) for part in range(count)]


def _least_padding(counts: list[int], least: int) -> int:
    """
    Return the group size, at least `least`, with which the counts need the least padding.

    The counts are padded to multiples of the group size.
    """
    best = least
    fewest = None
    for number in range(least, max(counts) + 1):
        added = sum(-count % number for count in counts)
        if fewest is None or added <= fewest:
            best, fewest = number, added
    return best
