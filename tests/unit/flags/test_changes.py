"""The hand-written table of changes agrees with the schemas that were read from the releases."""

from __future__ import annotations

from itertools import pairwise

from gpufleet.flags import changes, schema
from gpufleet.flags.changes import ABSENT, Change, ChangeKind
from gpufleet.flags.schema import sort_key
from tests.support.rows import each_row

VERSIONS = schema.versions()


def _named(change: Change) -> str:
    return f"{change.name} {change.kind} {change.since}"


def _has(name: str, version: str) -> bool:
    release = schema.load(version)
    if not name.startswith("-"):
        return name in release.environment
    return release.flag(name) is not None


def _at_and_before(since: str) -> tuple[str, str | None]:
    """The first release read that has a change of `since`, and the one before it."""
    at = next(i for i, version in enumerate(VERSIONS) if sort_key(version) >= sort_key(since))
    return VERSIONS[at], VERSIONS[at - 1] if at else None


GONE = [change for change in changes.changes() if change.kind in ABSENT]


@each_row("change", [c for c in GONE if c.since], ids=_named)
def test_a_name_was_there_until_the_release_that_lost_it(change: Change) -> None:
    assert change.since
    lost, before = _at_and_before(change.since)
    assert before
    assert not _has(change.name, lost)
    # The second of two entries for one name starts where the first one ends.
    assert _has(change.name, before) or any(
        other.until == change.since for other in changes.changes_of(change.name)
    )
    for version in VERSIONS:
        if change.is_in_force(version):
            assert not _has(change.name, version), version


@each_row("change", [c for c in GONE if not c.since], ids=_named)
def test_what_never_existed_is_in_no_release(change: Change) -> None:
    assert not any(_has(change.name, version) for version in VERSIONS)


def test_every_flag_that_a_release_lost_is_explained() -> None:
    """Whoever upgrades between any two releases that we know is told where a flag went."""
    unexplained = set()
    for old, new in pairwise(VERSIONS):
        now = schema.load(new)
        for flag in schema.load(old).flags:
            name = flag.name.replace("_", "-")
            if (
                not flag.positional
                and now.flag(name) is None
                and not changes.removal_reason(name, new)
            ):
                unexplained.add((name, new))
    assert unexplained == {("--model", "0.9.0")}  # it came back with 0.9.1, as a positional's alias


@each_row(
    "change",
    [c for c in changes.changes() if c.kind is ChangeKind.VALUE],
    ids=_named,
)
def test_a_value_that_is_gone_is_in_no_list_of_the_releases_it_is_gone_from(change: Change) -> None:
    key = change.name[2:].replace("-", "_")
    for version in VERSIONS:
        release = schema.load(version)
        flag = release.flag(change.name)
        if not change.is_in_force(version) or flag is None:
            continue
        listed = {*(flag.choices or ()), *flag.suggested, *release.values.get(key, ())}
        assert not listed & set(change.values), version


@each_row(
    "change",
    [c for c in changes.changes() if c.kind is ChangeKind.VALUE and c.since],
    ids=_named,
)
def test_a_value_that_is_gone_was_accepted_before(change: Change) -> None:
    assert change.since
    _, before = _at_and_before(change.since)
    assert before
    release = schema.load(before)
    flag = release.flag(change.name)
    assert flag
    key = change.name[2:].replace("-", "_")
    listed = {*(flag.choices or ()), *flag.suggested, *release.values.get(key, ())}
    assert set(change.values) <= listed


# Defaults that the parser does not show: `None` stands for what the engine decides later.
DECIDED_LATER = {
    "--enable-chunked-prefill",
    "--enable-prefix-caching",
    "--max-num-batched-tokens",
    "--enable-log-requests",
}


@each_row(
    "change",
    [c for c in changes.changes() if c.kind is ChangeKind.DEFAULT and c.name not in DECIDED_LATER],
    ids=_named,
)
def test_a_new_default_is_new_in_the_schemas(change: Change) -> None:
    assert change.since
    now, before = _at_and_before(change.since)
    assert before
    assert _default(change.name, now) != _default(change.name, before)


def _default(name: str, version: str) -> object:
    release = schema.load(version)
    if not name.startswith("-"):
        return release.environment[name].default
    flag = release.flag(name)
    assert flag, version
    return flag.default


@each_row("change", changes.changes(), ids=_named)
def test_what_is_advised_exists_where_it_is_advised(change: Change) -> None:
    """Rewritten arguments name flags that the last release of the change's own span takes."""
    last = next(v for v in reversed(VERSIONS) if change.is_in_force(v))
    release = schema.load(last)
    rows = [*(change.rewrite or {}).values(), *([change.keep] if change.keep else [])]
    for row in rows:
        for token in row:
            if token.startswith("--"):
                flag = release.flag(token.split(".")[0])
                if change.keep == row and flag is None:
                    assert last == VERSIONS[-1]
                    continue  # an old default of a flag that has gone since
                assert flag, token
                field = token.partition(".")[2].partition(".")[0]
                json_class = flag.type.json_class if flag.type else None
                fields = release.classes.get(json_class or "")
                assert not (field and fields) or field in fields, token


@each_row(
    ("name", "values", "rewritten"),
    [
        ("--worker-use-ray", (), ("--distributed-executor-backend", "ray")),
        ("--num-speculative-tokens", ("5",), ("--speculative-config.num_speculative_tokens", "5")),
        ("--speculative-model", ("[ngram]",), ("--speculative-config.method", "ngram")),
        ("--speculative-model", ("a/b",), ("--speculative-config.model", "a/b")),
        ("--task", ("embed",), ("--runner", "pooling", "--convert", "embed")),
        ("--task", ("auto",), ()),
        ("--task", ("mystery",), None),
        ("--cuda-graph-sizes", ("256",), ("--max-cudagraph-capture-size", "256")),
        ("--cuda-graph-sizes", ("1", "2"), ("--cudagraph-capture-sizes", "1", "2")),
        ("--limit-mm-per-prompt", ("image=4,video=1",), None),
        ("--swap-space", ("4",), ()),
        ("--speculative-model", (), None),
        ("--max-concurrency", ("4",), None),
    ],
)
def test_a_gone_argument_is_rewritten(
    name: str, values: tuple[str, ...], rewritten: tuple[str, ...] | None
) -> None:
    if name == "--limit-mm-per-prompt":
        rewritten = (name, '{"image": 4, "video": 1}')
    known = changes.changes_of(name)[-1]
    assert known.rewritten_arguments(values) == rewritten


def test_a_form_that_cannot_be_read_is_not_rewritten() -> None:
    form = changes.changes_of("--limit-mm-per-prompt")[0]
    assert form.rewritten_arguments(("image=many",)) is None


def test_a_flag_that_came_back_is_gone_only_in_between() -> None:
    assert changes.removal_reason("--disable-log-requests", "0.16.0") is None
    assert changes.removal_reason("--disable-log-requests", "0.32.0")
    assert changes.removal_reason("--disable-log-requests", "0.33.0") is None


def test_underscores_name_the_same_flag() -> None:
    assert changes.changes_of("--swap_space") == changes.changes_of("--swap-space")


def test_only_what_is_new_between_two_releases_is_between_them() -> None:
    names = {(c.name, c.kind) for c in changes.changes_between("0.17.0", "0.18.0")}
    assert ("--swap-space", ChangeKind.REMOVED) in names
    assert not any(
        c.since and c.since < "0.17" for c in changes.changes_between("0.17.0", "0.18.0")
    )
    assert ("--task", ChangeKind.RENAMED) not in names
