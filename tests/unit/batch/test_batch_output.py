"""An answer that was written is never asked for again, whatever moment the process ends at."""

from __future__ import annotations

import json
import resource
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpufleet.batch.batch_input import CheckedInput, Line, id_hash
from gpufleet.batch.batch_output import BatchOutput, state_file
from gpufleet.batch.replies import Reply, judge, output_line
from gpufleet.errors import FleetError

OF = CheckedInput(9, "0" * 64, ("/v1/completions",))
GOOD = Reply(200, b'{"id": "x", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}')


def opened(path: Path, of: CheckedInput = OF, *, retry_failed: bool = False) -> BatchOutput:
    return BatchOutput(path, of, "llama", retry_failed=retry_failed)


def answer(custom_id: str, reply: Reply = GOOD) -> dict[str, Any]:
    return output_line(Line(custom_id, "/v1/completions", b"{}"), judge(reply))


def write(path: Path, *custom_ids: str, reply: Reply = GOOD) -> None:
    with closing(opened(path)) as output:
        for each in custom_ids:
            output.add(answer(each, reply))


def ids(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


def test_an_output_goes_on_where_it_was_ended_at_each_byte(tmp_path: Path) -> None:
    """Every length that a killed process can leave: whole lines stay, a torn one is cut off."""
    path = tmp_path / "out.jsonl"
    write(path, "a", "b")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        with closing(opened(path)) as output:
            assert output.done == {id_hash("a")}
            output.add(answer("c"))
        assert ids(path) == ["a", "c"]


def test_an_output_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, "a")
    state = f'{{"schema": 1, "input_sha256": "{"0" * 64}", "model": "llama"}}\n'
    state_file(path).write_text(state)

    with closing(opened(path)) as output:
        assert output.done == {id_hash("a")}


def test_totals_are_those_of_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, "a", "b")
    write(path, "c", reply=Reply(400, b'{"error": {"message": "too long"}}'))

    with closing(opened(path)) as output:
        assert (output.totals.answered, output.totals.failed) == (2, Counter({"400": 1}))
        assert (output.totals.prompt_tokens, output.totals.completion_tokens) == (10, 4)


def test_only_its_owner_may_read_answers(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", "a")

    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert modes == {"out.jsonl": 0o600, "out.jsonl.state": 0o600}


@pytest.mark.parametrize(("of", "model"), [(CheckedInput(9, "1" * 64, ()), "llama"), (OF, "qwen")])
def test_an_output_of_another_input_or_model_is_refused_and_left_alone(
    tmp_path: Path, of: CheckedInput, model: str
) -> None:
    path = tmp_path / "out.jsonl"
    write(path, "a")
    before = path.read_bytes(), state_file(path).read_bytes()

    with pytest.raises(FleetError, match="a different input, or answers of a different model"):
        BatchOutput(path, of, model, retry_failed=True)
    assert (path.read_bytes(), state_file(path).read_bytes()) == before


@pytest.mark.parametrize("state", [None, b"", b'{"schema": 1'])
def test_a_file_that_is_no_output_is_not_written_to(tmp_path: Path, state: bytes | None) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    if state is not None:
        state_file(path).write_bytes(state)

    with pytest.raises(FleetError, match="does not state which input"):
        opened(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{}\n", "line 2: this line was not written by `gpufleet batch`"),
        (b"[]\n", "line 2: this line was not written by"),
        (
            b'{"custom_id": "b", "error": null, "response": null}\n',
            "line 2: this line was not written by",
        ),
        (None, "line 2: an earlier line already has an answer for this `custom_id`"),
    ],
)
def test_an_output_that_was_changed_by_hand_is_refused(
    tmp_path: Path, text: bytes | None, words: str
) -> None:
    path = tmp_path / "out.jsonl"
    write(path, "a")
    one = path.read_bytes()
    path.write_bytes(one + (one if text is None else text) + one.replace(b'"a"', b'"c"'))

    with pytest.raises(FleetError) as refused:
        opened(path)
    assert words in str(refused.value)


def test_one_process_writes_an_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(opened(path)), pytest.raises(FleetError, match="in use by another process"):
        opened(path)
    opened(path).close()


def test_lines_that_failed_are_left_out_to_be_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, "a")
    write(path, "b", reply=Reply(422, b"{}"))
    write(path, "c")

    with closing(opened(path, retry_failed=True)) as output:
        assert output.done == {id_hash("a"), id_hash("c")}
    assert ids(path) == ["a", "c"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit of the file's size is a disk that is full in the middle of a line."""
    path = tmp_path / "out.jsonl"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with closing(opened(path)) as output:
        output.add(answer("a"))
        size = path.stat().st_size
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        try:
            with pytest.raises(
                FleetError,
                match=r"File too large\. The answers in this file are kept: free some space",
            ):
                output.add(answer("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ids(path) == ["a"]
