"""Every word of a command line is in the settings or in a note, in the line's order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.importer.test_import import imported

QUOTES = st.sampled_from(["shlex", "double", "single"])


@dataclass(frozen=True)
class Piece:
    """Words of a command line, and the words that have to be found again, in this order."""

    words: tuple[str, ...]
    marks: tuple[str, ...]


def piece(*words: str, marks: Sequence[str] | None = None) -> Piece:
    return Piece(words, words if marks is None else tuple(marks))


def numbered(template: str, number: int) -> Piece:
    """Return a flag whose value has a number that no other word has."""
    words = [word.replace("#", str(number)) for word in template.split()]
    return piece(*words, marks=[str(number)] if "#" in template else words)


TEMPLATES = [
    "--seed #", "--seed=#", "--max-num-seqs #", "--max_num_seqs=#", "--max-model-len #",
    "--block-size 9#", "-O.cudagraph_mode=x#", "--served-model-name n#", "--tokenizer org/t#",
    "--revision r#", "--port #", "--swap-space #", "--nnodes #", "--master-addr h#", "-tp #",
    "-pp #", "--host h#", "--lora-modules a=/l#", "--no-such-flag x#", "--no-such-flag=x#",
    "--num-scheduler-steps #", "--chat-template <|#|>", "--chat-template a;b#", "stray#",
    "--enable-prefix-caching=#", "--hf-overrides {\"a\":#}", "--rope-scaling {\"a\":#}",
    "--distributed-executor-backend p.q#", "--download-dir /d#", "--middleware a.b#",
    "--quantization q#", "--tool-call-parser t#", "--data-parallel-size-local #", "--uds /u#",
    "--config /c#.yaml", "--guided-decoding-backend g#", "--shutdown-timeout #", "-dcp #",
    "--max-model-len #k", "--load-format l#", "-#", "--seed -#",
]  # fmt: skip
SWITCHES = [
    "--enable-eplb", "--enable-expert-parallel", "--trust-remote-code", "--enforce-eager",
    "--no-enable-prefix-caching", "--disable-log-requests", "--headless", "--enable-lora",
    "--disable-log-stats", "--data-parallel-hybrid-lb", "--enable-reasoning", "-O3",
]  # fmt: skip
PREFIXES = st.lists(
    st.sampled_from(
        ["A_PREFIX=b{}", "VLLM_LOGGING_LEVEL=x{}", "HF_HOME=/h{}", "VLLM_NO_SUCH=y{}", "CC='c {}'"]
    ),
    unique=True,
    max_size=3,
)
WRAPPERS = ["{}", "nohup {} > log77001 2>&1 &", "sudo -u user {}", "( {} ) &", "{} | tee x"]
RUN = (
    "docker run -d --gpus '\"device=77003\"' --name c77004 -p 77005:8000 -v /src77006:/in77007 "
    "--ipc=host -e C_VARIABLE=d77008 --shm-size 77009g vllm/vllm-openai:v0.10.2{}"
)


def quoted(word: str, how: str) -> str:
    if how == "double" and "'" not in word:
        return '"' + re.sub(r'(["\\$`])', r"\\\1", word) + '"'
    return "'" + word + "'" if how == "single" and "'" not in word else shlex.quote(word)


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """Return a script with one server, and what has to be found of it."""
    templates = draw(st.lists(st.sampled_from(TEMPLATES + SWITCHES), max_size=8))
    pieces = [numbered(each, 100_000 + at) for at, each in enumerate(templates)]
    model = draw(st.sampled_from([piece("org/m"), piece("--model", "org/m", marks=["org/m"])]))
    if draw(st.booleans()):
        pieces = [model, *pieces]
        model = piece()
    ends = st.sampled_from([" ", " ", " \\\n  ", "   ", " \\ # why\n ", " \\  \n "])
    text = ""
    for word in (word for each in (*pieces, model) for word in each.words):
        text += draw(ends) + quoted(word, draw(QUOTES))
    marks = [mark for each in (*pieces, model) for mark in each.marks]
    if draw(st.booleans()):
        variables = draw(PREFIXES)
        wrapper = draw(st.sampled_from(WRAPPERS))
        front = "env " if wrapper.startswith("sudo") and variables else ""
        named = [each.format(88_000 + at) for at, each in enumerate(variables)]
        started = " ".join([*named, "vllm", "serve"]) + text
        script = wrapper.format(front + started)
        outside = re.findall(r"77\d{3}", wrapper) + [f"{88_000 + at}" for at in range(len(named))]
    else:
        script = RUN.format(text)
        outside = re.findall(r"77\d{3}", RUN)
    return script + draw(st.sampled_from(["\n", "  # a comment\n", ""])), (*outside, *marks)


def values(value: Any) -> str:
    """Return the keys and values of settings as text."""
    return str(value)


@settings(max_examples=400, deadline=None)
@given(lines())
def test_every_word_is_in_the_settings_or_in_a_note(given_: tuple[str, tuple[str, ...]]) -> None:
    script, marks = given_
    found = imported(script, "-")
    said = values(found.settings) + " ".join(note.text for note in found.notes)
    plain = said.replace("_", "-")

    lost = [mark for mark in marks if not _is_in(mark, plain)]
    assert not lost, (lost, script, said)


def _is_in(mark: str, said: str) -> bool:
    number = mark.lstrip("-").removeprefix("no-")
    thousands = f"{int(number) * 1000}" if number.isdigit() else number
    return number in said or thousands in said or NAMES.get(mark, "\0") in said


NAMES = {
    "-O3": "optimization-level",
    "--enable-expert-parallel": "expert-parallel",
    "--disable-log-requests": "enable-log-requests",
}
"""What stands for a word in the settings where it is called otherwise."""


@settings(max_examples=100, deadline=None)
@given(lines())
def test_notes_about_a_line_come_in_its_order(given_: tuple[str, tuple[str, ...]]) -> None:
    """By numbers that are in one word of the line each."""
    script, _ = given_
    found = imported(script, "-")
    quoted_words = [
        match[1]
        for note in found.notes
        if (match := re.match(r"`[^`]*?(?<!\d)([1-6]\d{5}|[89]\d{5})(?!\d)[^`]*`", note.text))
        and not re.match("`model:|.*several nodes|.*one more node", note.text)
    ]  # fmt: skip
    places = [script.index(number) for number in quoted_words]

    assert places == sorted(places), (quoted_words, script)


@pytest.mark.parametrize("word", ["<|im_end|>", ">", "2>&1", "a;b", "&", "(x)", "a>b"])
def test_a_quoted_word_is_no_operator(word: str) -> None:
    found = imported(f"vllm serve /m --chat-template {shlex.quote(word)} --seed 7")

    assert found.settings["serving"]["model"]["flags"] == {"chat-template": word, "seed": 7}
