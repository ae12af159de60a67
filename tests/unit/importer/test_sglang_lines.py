"""Command lines of SGLang become entries with `engine: sglang`, and no option is lost silently."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpufleet.cli.import_command import import_
from gpufleet.flags.schema import Flag
from gpufleet.importer.convert import Imported
from gpufleet.importer.flag_rules import sglang_rules
from gpufleet.settings import engine_flags
from tests.support.rows import each_row
from tests.unit.importer.test_import import KEY, TOKEN, accepted, imported, told

RULES = sglang_rules()
LINE = "python3 -m sglang.launch_server --model-path /m --port 8000 "


def entry(found: Imported) -> dict[str, Any]:
    """Return the settings of the one server."""
    (served,) = found.settings["serving"].values()
    return dict(served)


def open_ones(found: Imported) -> list[str]:
    """Return the decisions that are left to a person."""
    return [note.text for note in found.notes if note.decide]


KEPT: dict[str, dict[str, Any]] = {
    LINE: {},
    "sglang serve /m --port 8000": {},
    "sglang serve --model=/m --port=9000": {"port": 9000},
    "sglang serve --model-path /m": {"port": 30000},
    LINE + "--tp 8 --pp-size 2": {"tensor_parallel": 8, "pipeline_parallel": 2},
    LINE + "--context-length 64Ki": {"context": 65536},
    LINE + "--served-model-name chat": {"served_name": "chat"},
    LINE + "--host 0.0.0.0 --enable-metrics --device cuda --model-type llm": {},
    LINE + "--dp-size 1 --ep-size 1 --disaggregation-mode null": {},
    LINE + "--mem-fraction-static 0.85 --trust-remote-code --cuda-graph-bs-decode 1 2": {
        "flags": {
            "cuda-graph-bs-decode": [1, 2],
            "mem-fraction-static": 0.85,
            "trust-remote-code": True,
        }
    },
    # argparse takes abbreviations.
    LINE + "--max-running 64 --chunked-prefill-size=-1": {
        "flags": {"chunked-prefill-size": -1, "max-running-requests": 64}
    },
    LINE + "--chat-template llama-2": {"flags": {"chat-template": "llama-2"}},
    f"SGLANG_X=1 VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 {LINE}": {"environment": {"SGLANG_X": "1"}},
    "docker run -p 9000:30000 -v /srv:/models lmsysorg/sglang:v0.5.23 "
    "python3 -m sglang.launch_server --model-path /models/m --host 0.0.0.0": {
        "model": "/srv/m",
        "served_name": "/models/m",
        "port": 9000,
    },
    "docker run -p 9000:30000 lmsysorg/sglang sh -c 'sglang serve --model-path /m'": {"port": 9000},
}


@each_row("line, wanted", KEPT.items())
def test_an_option_becomes_a_setting_or_stays_a_flag(line: str, wanted: dict[str, Any]) -> None:
    found = imported(line, "-")
    base = {"model": "/m", "engine": "sglang", "served_name": "/m", "tensor_parallel": 1}

    assert entry(found) == base | wanted
    assert accepted(found.settings).serving
    assert found.decided


DECISIONS = {
    "--dp-size 2": "set `replicas`",
    "--enable-dp-attention": "data-parallel attention",
    "--ep-size 8": "expert parallelism",
    "--is-embedding": "`engine: vllm`",
    "--enable-lora": "`adapters`",
    "--lora-paths a=/a b=/b": "`adapters`",
    "--disaggregation-mode prefill": "`prefill`",
    "--encoder-only": "`prefill`",
    "--grpc-mode": "HTTP",
    "--use-ray": "own processes",
    "--config /c.yaml": "was not read",
    "--max-model-len 4096": "no option `--max-model-len`",
    "--cuda-graph-max-bs 8": "`--cuda-graph-max-bs` ",
    "--tp-size x": "`x`",
}


@each_row("options, why", DECISIONS.items())
def test_what_gpufleet_lacks_for_sglang_is_left_to_a_person(options: str, why: str) -> None:
    found = imported(LINE + options, "-")

    assert [text for text in open_ones(found) if options in text and why in text], told(found)
    assert "flags" not in entry(found)
    assert accepted(found.settings).serving


def test_ranks_of_several_nodes_are_one_entry_that_may_span_nodes() -> None:
    found = imported(LINE + "--tp 16 --nnodes 2 --node-rank 0 --dist-init-addr h:5000", "-")

    assert (entry(found)["span_nodes"], entry(found)["tensor_parallel"]) == (True, 16)
    assert "`sglang.allow_unguarded_ports: true`" in told(found)
    assert found.decided
    (again,) = open_ones(imported(LINE + "--nnodes 2 --node-rank 1", "-"))
    assert "a further node of a replica:" in again


@pytest.mark.parametrize(
    "line",
    [
        LINE + f"--api-key {KEY}",
        LINE + f"--api-key={KEY}",
        LINE + f"--admin-api-key {KEY}",
        LINE + f"--ssl-keyfile-password {KEY}",
        LINE + f"--no-such-option {KEY}",
        LINE + f"--log-level {TOKEN}",
        LINE + f'--json-model-override-args \'{{"token": "{TOKEN}"}}\'',
        f"SGLANG_SECRET={KEY} {LINE}",
        f"docker run -e HF_TOKEN={TOKEN} lmsysorg/sglang sglang serve --model-path /m",
    ],
)
def test_no_key_is_printed(line: str, tmp_path: Path) -> None:
    source = tmp_path / "start.sh"
    source.write_text(line)
    run = CliRunner().invoke(import_, [str(source)])

    assert "sglang" in run.output
    assert KEY not in run.output + run.stderr
    assert TOKEN not in run.output + run.stderr


def test_a_key_becomes_a_file_of_the_engines_section() -> None:
    found = imported(LINE + f"--api-key {KEY} --admin-api-key mellon", "-")

    assert found.settings["sglang"] == {"api_key_file": "secrets/sglang-api-key"}
    assert "vllm" not in found.settings
    assert "`--admin-api-key` is dropped, and its value is not shown" in told(found)
    assert "mellon" not in told(found)


def test_engines_beside_each_other_share_the_section_of_vllm() -> None:
    """SGLang's section takes over what `vllm` has."""
    found = imported(f"vllm serve /m --api-key {KEY}\n{LINE} --port 8001 --api-key {KEY}", "-")

    assert found.settings["vllm"] == {"api_key_file": "secrets/vllm-api-key"}
    assert "sglang" not in found.settings
    engines = [served.get("engine") for served in found.settings["serving"].values()]
    assert engines == [None, "sglang"]
    assert accepted(found.settings).serving


def test_no_flag_that_settings_refuse_is_imported() -> None:
    rules = engine_flags.of("sglang")
    refused = {f"--{name}" for name in rules.planned | set(rules.refused)}
    taken = {*RULES.renamed, *RULES.dropped, *RULES.unsupported, *RULES.secrets}
    # `--tp` and others are abbreviations.
    names = {RULES.schema.by_option[each].name for each in refused & {*RULES.schema.by_option}}

    assert names - taken == set()
    assert taken - {flag.name for flag in RULES.schema.flags} == set()


def test_no_variable_that_settings_refuse_is_imported() -> None:
    for name, why in engine_flags.of("sglang").refused_variables.items():
        found = imported(f"{name}=1 SGLANG_X=1 {LINE}", "-")
        assert entry(found)["environment"] == {"SGLANG_X": "1"}
        assert f"{name}=1 is dropped: {why}" in told(found)


def test_every_option_of_the_release_is_a_setting_or_in_a_note() -> None:
    """All of them in one line; the settings are valid."""
    elsewhere = {"--model-path", "--port", "--served-model-name"}
    options = [flag for flag in RULES.schema.flags if flag.name not in elsewhere]
    found = imported(LINE + " ".join(f"{flag.name} {_value(flag)}" for flag in options), "-")
    said = {*re.findall(r"--[\w-]+", told(found)), *(f"--{name}" for name in entry(found)["flags"])}

    assert len(options) > 500
    assert {flag.name for flag in options} - said == set()
    assert [text for text in open_ones(found) if "is not" in text.replace("is not shown", "")] == []
    assert accepted(found.settings).serving


def _value(flag: Flag) -> str:
    """Return a value that the parser accepts."""
    if not flag.takes_value:
        return ""
    base = flag.type.base if flag.type else ""
    if flag.choices:
        return str(flag.choices[-1])
    return {"json": "'{}'", "str": "/x", "nullable_str": "/x"}.get(base, "7")


FORMS = {
    "c.yml": """
services:
  chat:
    image: lmsysorg/sglang:latest
    entrypoint: python3 -m sglang.launch_server
    command: --model-path /m --tp 2 --port 30000
    ports: ["8001:30000"]
  db: {image: postgres}
""",
    "d.yml": """
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  replicas: 2
  template:
    spec:
      containers:
        - name: server
          image: lmsysorg/sglang:v0.5.23
          command: [sh, -c, "exec sglang serve --model-path /m --tp-size 2 --port 8001"]
""",
    "m.yml": """
models:
  - {name: chat, command: sglang serve --tp-size 2, model: /m, port: 8001}
""",
    "chat.service": """
[Service]
ExecStart=/opt/bin/sglang serve --model-path /m --tp-size 2 --port 8001
""",
}


@each_row("file", FORMS)
def test_every_form_of_file_keeps_the_engine(file: str) -> None:
    found = imported(FORMS[file], file)
    (served,) = accepted(found.settings).serving.values()

    assert (served.engine, served.model, served.tensor_parallel) == ("sglang", "/m", 2)
    assert served.port == 8001


def test_the_command_names_the_release_of_each_engine(tmp_path: Path) -> None:
    source = tmp_path / "start.sh"
    source.write_text(f"vllm serve /m\n{LINE}--port 8001")
    run = CliRunner().invoke(import_, [str(source), "--vllm", "0.33.0"])
    moved = CliRunner().invoke(import_, [str(source), "--vllm", "0.33.0", "--engine", "vllm"])

    assert "flags are written for vLLM 0.33.0\nflags are written for SGLang 0.5.23\n" in run.stderr
    assert "engine: sglang" in run.stdout
    assert "SGLang 0.5.23" not in moved.stderr
    assert "engine:" not in moved.stdout
