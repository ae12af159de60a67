"""The operator's own prompts are sent as they are, and never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.arrivals import ClosedLoop
from gpufleet.load_test.client_process import LoadSpec
from gpufleet.load_test.written_prompts import WrittenPrompts, from_jsonl
from gpufleet.on_node.load.request_draws import WrittenRequests
from tests.support.rows import each_row

SECRET = "patient-4711-has"


def read(folder: Path, *lines: object, **more: Any) -> WrittenPrompts:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return from_jsonl(path, **more)


def test_prompts_travel_in_their_order_with_what_else_they_say(tmp_path: Path) -> None:
    one = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0.5, "model": "old"}
    two = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 9, "stream": False}
    prompts = read(tmp_path, one, "", two, max_tokens=70)
    assert prompts.path == "/v1/chat/completions"
    made = WrittenRequests(prompts.requests("served")(0, 1))
    sent = [json.loads(made.next().body) for _ in range(3)]
    ours = {"model": "served", "stream": True, "stream_options": {"include_usage": True}}
    assert sent == [
        {**one, **ours, "max_tokens": 70},
        {**two, **ours},
        {**one, **ours, "max_tokens": 70},
    ]


def test_clients_divide_prompts_and_have_some_each(tmp_path: Path) -> None:
    prompts = read(tmp_path, *({"prompt": f"{n}"} for n in range(3)))
    assert prompts.path == "/v1/completions"
    parts = [
        [json.loads(text)["prompt"] for text, _ in prompts.requests("m")(n, 2)["bodies"]]
        for n in range(2)
    ]
    assert parts == [["0", "2"], ["1"]]
    alone = read(tmp_path, {"prompt": "x"}).requests("m")
    assert len(alone(4, 5)["bodies"]) == 1


def test_no_repr_and_no_format_has_a_prompt(tmp_path: Path) -> None:
    prompts = read(tmp_path, {"prompt": SECRET})
    spec = LoadSpec("http://h:1", prompts.path, ClosedLoop(1), prompts.requests("m"), 1, 1.0, 1.0)
    assert SECRET in str(spec.parameters(0, 1))
    for text in (repr(prompts), str(prompts), f"{prompts}", repr(spec), repr((prompts, spec))):
        assert SECRET not in text


@each_row(
    "line, why",
    [
        (f'{{"prompt": "{SECRET}"', "is not JSON"),
        (f'"{SECRET}"', "is not a JSON object"),
        ({SECRET: 1}, "must have either `messages` or `prompt`, and not both"),
        ({"prompt": SECRET, "messages": []}, "either `messages` or `prompt`"),
        ({"prompt": [SECRET]}, "`prompt` must be text"),
        ({"prompt": ""}, "`prompt` must be text"),
        ({"prompt": [1, -1]}, "`prompt` must be text"),
        ({"prompt": {"text": SECRET}}, "`prompt` must be text"),
        ({"messages": SECRET}, "`messages` must be a list"),
        ({"messages": [{"content": SECRET}]}, "`messages` must be a list"),
        ({"messages": [SECRET]}, "`messages` must be a list"),
        ({"prompt": SECRET, "max_tokens": 0}, "`max_tokens` must be a number"),
        ({"prompt": SECRET, "max_tokens": SECRET}, "`max_tokens` must be a number"),
        ({"prompt": SECRET, "n": 2}, "several answers"),
        ('{"prompt": "' + SECRET + '", "x": ' + "[" * 100_000, "too many nested levels"),
    ],
)
def test_a_refusal_names_the_line_and_not_its_text(tmp_path: Path, line: object, why: str) -> None:
    with pytest.raises(FleetError) as refusal:
        read(tmp_path, {"prompt": "fine"}, line)
    assert "prompts.jsonl: line 2: " in str(refusal.value)
    assert why in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="1 of 2 requests have `messages`"):
        read(tmp_path, {"prompt": SECRET}, {"messages": [{"role": "user"}]})
    with pytest.raises(FleetError, match="has no prompt"):
        read(tmp_path, "")
    with pytest.raises(FleetError, match="No such file"):
        from_jsonl(tmp_path / "none")
    with pytest.raises(FleetError, match="at most 0 tokens"):
        read(tmp_path, {"prompt": "x"}, max_tokens=0)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((32 << 20) + 1)
    with pytest.raises(FleetError, match="more than 32 MiB"):
        from_jsonl(large)


def test_requests_that_cannot_fit_the_context_are_refused(tmp_path: Path) -> None:
    prompts = read(tmp_path, {"prompt": [1] * 90, "max_tokens": 10}, {"prompt": SECRET})
    prompts.check_context(600)
    with pytest.raises(
        FleetError, match="request 2 has a prompt of at least 1 tokens and requests 512"
    ):
        prompts.check_context(512)
    with pytest.raises(
        FleetError, match="request 1 has a prompt of at least 90 tokens and requests 10"
    ) as found:
        prompts.check_context(99)
    assert SECRET not in str(found.value)
