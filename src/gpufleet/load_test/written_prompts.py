"""Read the operator's own prompts from a file as a workload. Prompts are never printed.

An error contains the number and the problem of a line, but never the line's content. No repr
contains the content either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError, file_fault, json_fault
from gpufleet.load_test.workloads import COMPLETIONS
from gpufleet.on_node.serving import questions
from gpufleet.settings.serving_settings import ModelKind

CHAT = "/v1/chat/completions"
MOST_BYTES = 32 << 20
"""The maximum size of the file in bytes. Each client gets the file and keeps it in memory."""
_NAMED = 5
"""The maximum number of problems that an error lists."""
_OURS = ("model", "stream", "stream_options")
_TEXT = '{"messages": [...]} or {"prompt": "..."}'
_INPUT = '{"input": "..."}'
_FORMS: Mapping[str, str] = {
    "embed": _INPUT,
    "classify": _INPUT,
    "reward": _INPUT,
    "rerank": '{"query": "...", "documents": ["...", ...]}',
}


@dataclass(frozen=True)
class WrittenPrompts:
    """
    The operator's own request bodies, which all go to one path.

    After the last request, the first request is sent again.
    """

    name: str
    path: str
    _bodies: tuple[Mapping[str, Any], ...] = field(repr=False)
    _max_tokens: int
    kind: ModelKind = "generate"
    """The kind of the target model."""

    def __len__(self) -> int:
        return len(self._bodies)

    def check_context(self, max_model_len: int) -> None:
        """
        Raise `FleetError` for requests that certainly exceed the model's context.

        Only the server can count the tokens of a text. The server answers 400 to a text that is too
        long.
        """
        if self.kind != "generate":
            return
        problems = []
        for number, body in enumerate(self._bodies, 1):
            prompt = body.get("prompt")
            known = len(prompt) if isinstance(prompt, list) else 1
            asked = body.get("max_tokens", self._max_tokens)
            if known + asked > max_model_len:
                problems.append(
                    f"{self.name}: request {number} has a prompt of at least {known} tokens and "
                    f"requests {asked} more, but the model's context has {max_model_len} "
                    "(`max_model_len`): write a smaller `max_tokens`, or remove it"
                )
        if problems:
            raise FleetError(*problems[:_NAMED])

    def requests(self, model: str) -> Callable[[int, int], dict[str, Any]]:
        """
        Return a function that returns the requests of one client process.

        The function takes the number of the client and the number of clients.
        """
        own: dict[str, Any] = {"model": model}
        asked: dict[str, Any] = {}
        if self.kind == "generate":
            own |= {"stream": True, "stream_options": {"include_usage": True}}
            asked = {"max_tokens": self._max_tokens}
        texts = [
            # 0: no length is expected, because the model ends its answers by itself. So no answer
            # counts as too short.
            (json.dumps({**asked, **body, **own}), 0)
            for body in self._bodies
        ]

        def part(process: int, processes: int) -> dict[str, Any]:
            bodies = texts[process::processes] or texts
            return {"kind": "written", "asked": self.kind, "bodies": bodies}

        return part


def from_jsonl(
    path: Path, kind: ModelKind = "generate", *, max_tokens: int = 512
) -> WrittenPrompts:
    """
    Read prompts from a file with one JSON object per line.

    Each object is a request body for vLLM's OpenAI server. All lines have `messages`, or all have
    `prompt` (a text, or token ids). A reranker's lines have `query` and `documents`, and lines for
    other pooling models have `input`. Other fields are kept; the model's name and streaming are set
    by the load test. `max_tokens` applies to lines without their own. Raises `FleetError` with the
    first invalid lines.
    """
    if max_tokens < 1:
        raise FleetError(f"answers of at most {max_tokens} tokens are invalid: write 1 or more")
    bodies: list[Mapping[str, Any]] = []
    problems: list[str] = []
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FleetError(
                f"{path} has more than {MOST_BYTES >> 20} MiB, and each client would keep all of "
                "it in memory: write fewer prompts"
            )
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found, why = _read_body(line, kind)
                    bodies.append(found)
                    problems += [f"{path}: line {number}: {why}"] if why else []
    except (OSError, ValueError) as error:
        raise FleetError(f"{path}: {file_fault(error)}") from None
    if problems:
        raise FleetError(*problems[:_NAMED])
    if not bodies:
        raise FleetError(f"{path} has no prompt: write one JSON object per line")
    if kind != "generate":
        where = questions.question(kind, "").path
        return WrittenPrompts(path.name, where, tuple(bodies), max_tokens, kind)
    chats = sum("messages" in body for body in bodies)
    if 0 < chats < len(bodies):
        raise FleetError(
            f"{path}: {chats} of {len(bodies)} requests have `messages`, and the others have "
            "`prompt`. The two go to different paths of the API: write two files"
        )
    return WrittenPrompts(path.name, CHAT if chats else COMPLETIONS, tuple(bodies), max_tokens)


def _read_body(line: str, kind: ModelKind) -> tuple[Mapping[str, Any], str]:
    """Return the request in a line, and the problem of the line or ""."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        return {}, f"the line is not JSON: {json_fault(error)}"
    except (ValueError, RecursionError):
        return {}, "the line has a number with too many digits, or too many nested levels"
    if not isinstance(found, dict):
        return {}, f"the line is not a JSON object: write {_FORMS.get(kind, _TEXT)}"
    why = _problem(found) if kind == "generate" else _pooled_problem(found, kind)
    return {name: value for name, value in found.items() if name not in _OURS}, why


def _problem(body: Mapping[str, Any]) -> str:
    messages, prompt = body.get("messages"), body.get("prompt")
    if (messages is None) == (prompt is None):
        return "the line must have either `messages` or `prompt`, and not both"
    if messages is not None:
        if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
            return "`messages` must be a list of objects with a `role`"
    elif not (isinstance(prompt, str) and prompt) and not _is_token_list(prompt):
        return "`prompt` must be text or a list of token ids"
    asked = body.get("max_tokens", 1)
    if type(asked) is not int or asked < 1:
        return "`max_tokens` must be a number of 1 or more"
    if body.get("n", 1) != 1 or body.get("best_of", 1) != 1:
        return (
            "`n` or `best_of` requests several answers, whose times cannot be measured "
            "separately: remove it"
        )
    return ""


def _pooled_problem(body: Mapping[str, Any], kind: ModelKind) -> str:
    """Return why a line is not a request to a model of this kind, or "" if it is one."""
    texts = [body.get("input")]
    if kind == "rerank":
        documents = body.get("documents")
        texts = [body.get("query"), *(documents if isinstance(documents, list) else [])]
    one = texts[0]
    fine = all(isinstance(each, str) and each for each in texts) or (
        kind != "rerank" and _is_token_list(one)
    )
    if fine and len(texts) > (kind == "rerank"):
        return ""
    return f"the line is not a request to a model of `kind: {kind}`: write {_FORMS[kind]}"


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_token_list(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and each >= 0 for each in value)
    )
