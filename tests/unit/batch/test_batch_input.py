"""All lines are checked before one is asked, and a refusal shows what to write and no prompt."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpufleet.batch.batch_input import URLS, BatchInput, CheckedInput, InputRules, Line, id_hash
from gpufleet.errors import FleetError
from gpufleet.network.haproxy import PATHS

SECRET = "the-prompt-of-a-user"
RULES = InputRules("llama", 1 << 20)


def line(custom_id: Any = "a", **changes: Any) -> str:
    body = {"model": "llama", "prompt": SECRET, **changes.pop("body", {})}
    found = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps({**found, **changes})


def check(tmp_path: Path, *lines: str | bytes) -> CheckedInput:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(e if isinstance(e, bytes) else e.encode() for e in lines))
    source = BatchInput(file, RULES)
    try:
        return source.check()
    finally:
        source.close()


def test_a_sound_input_is_counted_and_has_the_hash_that_sha256sum_gives(tmp_path: Path) -> None:
    found = check(tmp_path, line("a"), "", line("b", url="/score"), line("c", url="/v1/score"))

    whole = (tmp_path / "in.jsonl").read_bytes()
    paths = ("/v1/completions", "/v1/score")
    assert found == CheckedInput(3, hashlib.sha256(whole).hexdigest(), paths)


def test_a_line_is_asked_where_a_gateway_and_a_server_have_its_route(tmp_path: Path) -> None:
    """By a model's entry a gateway takes all below /v1, and what `haproxy.PATHS` names."""
    found = check(tmp_path, *(line(url, url=url) for url in URLS))
    assert {path for path in found.paths if not path.startswith("/v1/")} < {*PATHS}
    assert {"/classify", "/pooling", "/v1/responses"} < {*found.paths}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ('{"custom_id": ', "is not JSON"),
        ("[1]", "is not an object: write"),
        (b'{"custom_id": "\xff"}', "its byte 16 is not valid UTF-8"),
        ('{"a": NaN}', "has NaN, which is not valid JSON"),
        ("[" * 100_000, "the line is nested too deeply"),
        (line(None), "the line has no `custom_id`"),
        (line(7), "the line has no `custom_id`"),
        (line(""), "the line has no `custom_id`"),
        (line("first"), 'an earlier line has the same `custom_id` "first"'),
        (line(method="GET"), 'write "method": "POST"'),
        (
            line(url="/v1/audio/speech"),
            "`url` has a value that is not served: write one of /v1/chat",
        ),
        (line(url=["/v1/completions"]), "`url` has a value that is not served"),
        (line(priority=1), 'the key "priority" is unknown'),
        (line(body={"model": "qwen"}), '`model` is "qwen": write "llama"'),
        (line(body={"model": None}), '`model` is null: write "llama"'),
        ('{"custom_id": "a", "url": "/score", "body": 1}', "`body` is not an object"),
        (line(body={"stream": True}), "asks for a stream"),
        (line(body={"background": True}), "remove `background`"),
        (line(body={"prompt": "x" * (1 << 20)}), "`body` is larger than 1 MiB"),
        (line(body={"prompt": "x" * (9 << 20)}), "is larger than 1 MiB"),
        (line().replace(SECRET, "\\ud800"), "unpaired surrogate"),
        (line(body={"top_p": 7}).replace("7", "1e999"), "a number is too large"),
        (line(body={"top_p": 7}).replace("7", "7" * 5000), "a number has too many digits"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_what_to_write(
    tmp_path: Path, wrong: str | bytes, words: str
) -> None:
    with pytest.raises(FleetError) as refused:
        check(tmp_path, line("first"), wrong, line("last"))

    (problem,) = refused.value.problems
    assert problem.startswith(f"{tmp_path}/in.jsonl: line 2: ")
    assert words in problem
    assert SECRET not in problem


def test_all_wrong_lines_are_named_at_once_but_not_without_end(tmp_path: Path) -> None:
    with pytest.raises(FleetError) as refused:
        check(tmp_path, *["{}"] * 30)

    assert len(refused.value.problems) == 21
    assert refused.value.problems[-1].endswith("10 more lines are not valid")


def test_an_input_without_lines_and_one_that_is_no_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FleetError, match="has no line"):
        check(tmp_path, "")
    with pytest.raises(FleetError, match="is not a regular file"):
        BatchInput(tmp_path / "pipe", RULES)
    with pytest.raises(FleetError, match="cannot be read: No such file"):
        BatchInput(tmp_path / "none", RULES)


def test_what_is_answered_is_left_out_and_the_route_is_that_of_the_gateway(tmp_path: Path) -> None:
    check(tmp_path, line("a"), line("b", url="/rerank", body={"prompt": "é"}), line("c"))
    source = BatchInput(tmp_path / "in.jsonl", RULES)

    found = list(source.requests({id_hash("a"), id_hash("c")}))

    source.close()
    assert found == [Line("b", "/v1/rerank", '{"model":"llama","prompt":"é"}'.encode())]


def test_an_input_that_is_changed_meanwhile_is_asked_no_further(tmp_path: Path) -> None:
    check(tmp_path, *[line(str(number)) for number in range(3)])
    file = tmp_path / "in.jsonl"
    source = BatchInput(file, RULES)
    lines = source.requests(())
    next(lines)
    file.write_text(line("other"))

    with pytest.raises(FleetError, match="was changed while gpufleet read it"):
        next(lines)
    source.close()
