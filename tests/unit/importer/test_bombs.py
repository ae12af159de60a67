"""A text that is made to grow ends in a sentence, at once; what people have is read as before."""

from __future__ import annotations

import shlex
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.importer.detect import read
from gpufleet.importer.script_lines import open_quote

SERVE = "vllm serve org/model --port 8001"


def aliases(more: str = "[{0},{0},{0},{0},{0},{0},{0},{0},{0}]") -> str:
    """Return ten levels of nine aliases each: 3,486,784,401 values."""
    lines = [f"a{n}: &a{n} " + more.format(f"*a{n - 1}") for n in range(1, 11)]
    web = "services: {web: {image: vllm/vllm-openai, x: *a10}}"
    return "\n".join(["a0: &a0 [x]", *lines, web, ""])


MERGED = "\n".join(
    [
        "m0: &m0 {a: 1, b: 2}",
        *(
            f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}, *m{n - 1}, *m{n - 1}]}}"
            for n in range(1, 12)
        ),
        "services: {web: *m11}",
    ]
)
DOUBLED = "A=xxxxxxxx\n" + "A=$A$A\n" * 40 + SERVE
COPIED = f"A={'x' * 60_000}\n" + "".join(f"B{n}=$A\n" for n in range(15_000)) + SERVE
CONTINUED = "vllm serve org/model \\\n" * 150_000
SHORTER = "vllm serve org/model \\\n" * 11_000
QUOTED = "echo '" + "x\n" * 60_000
COMMENTS = "echo 'a" + " #" * 130_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (aliases(), "aliases"),
        (MERGED, "aliases"),
        ("services: &s {web: {image: vllm/vllm-openai, environment: *s}}", "aliases"),
        (DOUBLED, "the variables of the script expand to more than"),
        (COPIED, "the variables of the script expand to more than"),
        (CONTINUED, "has 3,450,000 characters"),
        (SHORTER, "the command that begins in line 1 has more than"),
        (QUOTED, "the quote that is opened in line 1"),
        (COMMENTS, "the quote that is opened in line 1"),
    ],
    ids=["aliases", "merged", "itself", "doubled", "copied", "continued", "shorter", "quoted",
         "comments"],
)  # fmt: skip
def test_a_text_that_grows_ends_in_a_sentence_within_a_second(text: str, said: str) -> None:
    began = time.process_time()

    with pytest.raises(FleetError, match=said) as refused:
        read(text, "given.yml" if "services" in text else "start.sh", "model")

    assert time.process_time() - began < 1
    assert len(str(refused.value)) < 400


def test_anchors_as_compose_files_have_them_are_read() -> None:
    text = (
        "x-common: &common\n"
        "  image: vllm/vllm-openai:v0.11.0\n"
        "services:\n"
        "  one: {<<: *common, command: --model org/one}\n"
        "  two: {<<: *common, command: --model org/two}\n"
    )
    launches = read(text, "compose.yml", "model").launches
    assert [launch.name for launch in launches] == ["one", "two"]


def test_a_date_that_is_none_is_no_traceback() -> None:
    with pytest.raises(FleetError, match="is not valid YAML"):
        read("models: [{name: a, command: 2024-99-99}]", "models.yml", "model")


@given(st.lists(st.text(alphabet="a '\"\\\n#", max_size=12), max_size=5))
def test_a_quote_is_open_where_a_shell_would_wait_for_more(parts: list[str]) -> None:
    """By shlex, which reads the whole text; ours goes on from the part before."""
    quote = ""
    for part in parts:
        quote = open_quote(part, quote)
    try:
        shlex.split("".join(parts))
    except ValueError:
        assert quote
    else:
        assert not quote
