"""Command lines that no one meant: each is answered in words, at once, and breaks nothing.

Through the real commands: `flags check`, `flags diff`, `flags explain`. What an operator reads must
not have a traceback, nor words of the parts that gpufleet and vLLM are made of, nor an escape code.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from gpufleet.cli.flags_command import flags
from gpufleet.errors import FleetError
from tests.support.hostile import ANSWERED, PAGE
from tests.support.measured import note
from tests.support.rows import each_row

# Hundreds of lines, each judged for every release.
pytestmark = pytest.mark.slow

SECONDS = 10.0
"""The longest answer to one line."""

LONG = 100_000
DEEP = 20_000

# Words of Python and of libraries, which help nobody who typed a flag.
_INTERNALS = re.compile(
    r"Traceback|pydantic|argparse|json\.decoder|JSONDecodeError|RecursionError|set_int_max_str_digits"
    r"|Expecting value|Extra data|char \d+\)"
    r"|ValueError|TypeError|KeyError|object at 0x|<class|NoneType|codec can't",
)
_ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# What commands raise for an operator's mistake; `main` prints it in one line.
_REFUSES = FleetError | click.ClickException

VALUES = {
    "empty": "",
    "blank": " ",
    "newline": "a\nb",
    "tab": "a\tb",
    "NUL": "a\0b",
    "escape code": "\x1b[31mred\x1b[0m",
    "C1 escape code": "\x9b31m",
    "not UTF-8": "caf\udce9",
    "right to left": "\u202egnp.exe",
    "emoji": "\U0001f600",
    "ligature": "\ufb01le",
    "full width": "\uff11\uff12",
    "arabic digits": "\u0663",
    "zero width": "3\u200b2",
    "dash": "-",
    "two dashes": "--",
    "null": "null",
    "None": "None",
    "list": "[]",
    "object": "{}",
    "open brace": "{",
    "close brace": "}",
    "number in JSON": "3",
    "text in JSON": '"text"',
    "NaN in JSON": '{"a": NaN}',
    "Infinity in JSON": '{"a": -Infinity}',
    "key twice": '{"a": 1, "a": 2}',
    "empty key": '{"": 1}',
    "single quotes": "{'a': 1}",
    "nested quotes": "'\"{'a': \\\"b\\\"}\"'",
    "quotes that do not end": '{"a": "b',
    "comma at the end": '{"a": 1,}',
    "comment in JSON": '{"a": 1} // no',
    "bad escape in JSON": '{"a": "\\x"}',
    "lone surrogate in JSON": '{"a": "\\ud800"}',
    "escape code in JSON": '{"\\u001b[31m": "\\u001b[0m"}',
    "huge number in JSON": '{"num_speculative_tokens": ' + "9" * 5000 + "}",
    "huge exponent in JSON": '{"num_speculative_tokens": 1e999}',
    "deep list": "[" * DEEP,
    "deep list that ends": "[" * DEEP + "]" * DEEP,
    "deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "deep Python": "{'a':" * DEEP,
    "deep brackets": "(" * DEEP,
    "many keys": json.dumps({f"key{at}": at for at in range(5000)}),
    "long": "x" * LONG,
    "long number": "9" * LONG,
    "number of 400 digits": "9" * 400,
    "number with a suffix, long": "9" * 5000 + "k",
    "fraction with a suffix": "0." + "9" * 5000 + "k",
    "negative": "-1",
    "negative fraction": "-0.5",
    "hexadecimal": "0x10",
    "underscores": "1_000",
    "plus": "+5",
    "exponent": "1e400",
    "nan": "nan",
    "inf": "-inf",
    "many suffixes": "1kkkkk",
    "shell": "$(touch /tmp/x); `id` && ${HOME}",
    "format": "%s %(a)s {0} {a!r}",
    "markup": "[bold]x[/bold] <b>x</b> [link=x]",
    "equals": "=",
    "key and value": "a=b=c,d",
    "many commas": "," * 1000,
    "path": "../../../../etc/passwd",
    "URL": "http://[::1",
    "option": "--enforce-eager",
}

FLAGS = (
    "--max-model-len",
    "--gpu-memory-utilization",
    "--speculative-config",
    "--limit-mm-per-prompt",
    "--lora-modules",
    "--kv-transfer-config.kv_role",
    "--compilation-config.a.b",
    "--config",
)

LINES = {
    "nothing": [],
    "only dashes": ["-", "--", "---", "----"],
    "option without a name": ["M", "--"],
    "equals without a name": ["M", "--=3"],
    "dot without a name": ["M", "--.", "3"],
    "dots": ["M", "--compilation-config..a", "3"],
    "dot at the end": ["M", "--compilation-config.", "3"],
    "long name": ["M", f"--{'x' * LONG}"],
    "long dotted name": ["M", f"--compilation-config.{'a.' * 5000}b", "1"],
    "many dots": ["M", f"--compilation-config{'.' * 5000}", "1"],
    "name with an escape code": ["M", "--\x1b[2J", "1"],
    "name that is not UTF-8": ["M", "--caf\udce9"],
    "emoji name": ["M", "--\U0001f600=1"],
    "capitals": ["M", "--MAX-MODEL-LEN", "3"],
    "underscores": ["M", "--max_model_len", "3"],
    "mixed dashes": ["M", "\u2014max-model-len", "3"],
    "no value": ["M", "--max-model-len"],
    "no value, then an option": ["M", "--max-model-len", "--enforce-eager"],
    "twice": ["M", "--port", "1", "--port", "2"],
    "a thousand times": ["M", *["--port", "1"] * 1000],
    "a thousand switches": ["M", *["--enforce-eager"] * 1000],
    "a thousand unknown": ["M", *[f"--unknown-{at}" for at in range(1000)]],
    "a thousand strays": ["M", *["x"] * 1000],
    "a thousand dotted parts": [
        "M",
        *[word for at in range(1000) for word in (f"--compilation-config.key{at}", "1")],
    ],
    "two models": ["M", "N"],
    "model with an escape code": ["\x1b]0;title\x07model"],
    "model of NUL": ["\0"],
    "long model": ["m" * LONG],
    "model that is an option": ["--model", "--model"],
    "the words before": ["vllm", "serve", "vllm", "serve", "M"],
    "another program": ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"],
    "a file of arguments": ["@args.txt"],
    "help": ["M", "--help"],
    "help in several forms": ["-h", "--help=all", "--help=x"],
    "version": ["--version"],
    "one word for all": ["M --port 8000 --max-model-len 32k"],
    "line ends of another system": ["M\r", "--port\r", "8000\r"],
    "a backslash that stayed": ["M", "\\", "--port", "8000"],
}


def _lines() -> Iterator[tuple[str, list[str]]]:
    yield from LINES.items()
    for flag in FLAGS:
        for name, value in VALUES.items():
            yield f"{flag} {name}", ["M", flag, value]
    for name, value in VALUES.items():
        yield f"=: {name}", ["M", f"--speculative-config={value}", f"--max-num-seqs={value}"]
        yield f"model: {name}", [value]


def answered(*words: str) -> str:
    """Return what the command prints, or the sentence with which it refuses."""
    start = time.process_time()
    result = CliRunner().invoke(flags, words, standalone_mode=False)
    spent = time.process_time() - start
    assert isinstance(result.exception, _REFUSES | None), repr(result.exception)[:300]
    assert spent < SECONDS, f"{spent:.1f} s"
    told = str(result.exception or result.output)
    for word in words:  # what was typed may have any word in it
        told = told.replace(word, "") if len(word) > 3 else told
    assert not _INTERNALS.search(told), _INTERNALS.search(told)
    return told


@each_row(("name", "line"), _lines())
def test_check_answers_each_line_in_words(name: str, line: list[str]) -> None:
    told = answered("check", "--vllm", "0.33.0", "--", *line)
    assert not _ESCAPES.search(told), _ESCAPES.search(told)


@each_row(("name", "line"), LINES.items())
def test_check_prints_json_of_each_line(name: str, line: list[str]) -> None:
    told = answered("check", "--vllm", "0.33.0", "--json", "--", *line)
    assert not _ESCAPES.search(told), _ESCAPES.search(told)


@each_row(("name", "line"), LINES.items())
def test_releases_that_read_no_dotted_options_answer_each_line(name: str, line: list[str]) -> None:
    told = answered("check", "--vllm", "0.8.5", "--", *line)
    assert not _ESCAPES.search(told), _ESCAPES.search(told)


@each_row(("name", "value"), VALUES.items())
def test_check_answers_each_value_of_a_variable_in_words(name: str, value: str) -> None:
    variables = ("--env", f"VLLM_PORT={value}", "--env", f"VLLM_{value}=1")
    told = answered("check", "--vllm", "0.33.0", *variables, "--", "M")
    assert not _ESCAPES.search(told), _ESCAPES.search(told)


@each_row(("name", "value"), VALUES.items())
def test_a_release_that_no_one_published_is_refused_in_words(name: str, value: str) -> None:
    answered("check", "--vllm", value, "--", "M")


@each_row(("name", "line"), LINES.items())
def test_diff_answers_each_line_in_words(name: str, line: list[str]) -> None:
    told = answered("diff", "0.11.0", "0.33.0", "--", *line)
    assert not _ESCAPES.search(told), _ESCAPES.search(told)


@each_row(("name", "value"), VALUES.items())
def test_diff_answers_each_value_in_words(name: str, value: str) -> None:
    told = answered("diff", "0.11.0", "0.33.0", "--", "M", "--speculative-config", value)
    assert not _ESCAPES.search(told), _ESCAPES.search(told)


@each_row(("name", "value"), VALUES.items())
def test_explain_answers_each_name_in_words(name: str, value: str) -> None:
    answered("explain", "--vllm", "0.33.0", "--", value)


def test_the_number_of_lines_is_written(request: pytest.FixtureRequest) -> None:
    """The last test of the file: where none has failed, all above are answered."""
    lines = len(list(_lines())) + 3 * len(LINES) + 4 * len(VALUES)
    assert lines > 630
    if not request.session.testsfailed:
        what = "vLLM command lines for `gpufleet flags`"
        note(PAGE, what, "`unit/flags/test_hostile_lines.py`", str(lines), ANSWERED)
