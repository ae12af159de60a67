"""The extractor on a real node: the release that serves there, asked in three ways."""

from __future__ import annotations

import json
import re

import pytest

from gpufleet.flags import extract, schema
from tests.lab.conftest import Fleet

NODE = "gpu-01"

pytestmark = pytest.mark.long

# What imports vLLM for real, torch and all, and prints what its parser accepts.
REAL_PARSER = """
import json, sys
sys.argv = ["vllm", "serve"]
from vllm.entrypoints.cli.serve import FlexibleArgumentParser, ServeSubcommand
parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
print(json.dumps(sorted(set(parser._option_string_actions) - {"-h", "--help"})))
"""


@pytest.fixture(scope="module")
def release(deployed: Fleet) -> str:
    """The folder of the release that the node's units run."""
    return deployed.ssh(NODE, "ls -d /opt/vllm/releases/*/bin | head -n 1").strip()


@pytest.fixture(scope="module")
def extracted(deployed: Fleet, release: str) -> schema.Schema:
    program = extract.program().encode().decode()
    answer = deployed.ssh(NODE, f"{release}/python -I -", seconds=180, stdin=program)
    return schema.from_document(extract.answer(answer))


def test_the_schema_read_on_the_node_is_the_packaged_one(extracted: schema.Schema) -> None:
    assert extracted == schema.load(extracted.version)


def test_the_option_strings_are_those_of_the_parser_that_is_really_imported(
    deployed: Fleet, release: str, extracted: schema.Schema
) -> None:
    real = deployed.ssh(NODE, f"{release}/python -I -", seconds=600, stdin=REAL_PARSER)

    assert sorted(extracted.by_option) == json.loads(real.splitlines()[-1])


def test_the_option_strings_are_those_that_help_prints(
    deployed: Fleet, release: str, extracted: schema.Schema
) -> None:
    """Of the release's own command; what is hidden from help is marked so in the schema."""
    printed = deployed.ssh(NODE, f"{release}/vllm serve --help=all 2>/dev/null", seconds=600)

    shown = {
        option
        for line in re.findall(r"^  (-.*)$", printed, re.MULTILINE)
        for option in re.findall(r"(?:^|, )(-[^ ,=]+)", line)
    }
    hidden = {
        option
        for flag in extracted.flags
        for option in (flag.options if flag.help_hidden else flag.hidden)
    }
    assert shown - {"-h", "--help"} == set(extracted.by_option) - hidden


def test_reading_changes_nothing_on_the_node(deployed: Fleet, release: str) -> None:
    files = f"find {release}/.. -type f -printf '%p %T@\\n' | sort | sha256sum"
    before = deployed.ssh(NODE, files)
    program = extract.program().encode().decode()
    deployed.ssh(NODE, f"{release}/python -I -", seconds=180, stdin=program)

    assert deployed.ssh(NODE, files) == before
