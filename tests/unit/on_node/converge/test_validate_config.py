"""The proof of a configuration, as it runs on a node: with the server's own program."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpufleet.monitoring import alertmanager
from gpufleet.remote import payload
from gpufleet.settings.monitoring_settings import Alertmanager
from tests.unit.monitoring.programs import program

SECRET = "https://hook.example.net/very-secret\x07"  # no URL: a control character is in it


def proven(files: dict[str, str], *argv: str | Path, hidden: tuple[str, ...] = ()) -> Any:
    """Return what on_node/converge/validate_config.py finds."""
    text = payload.program(
        "converge/validate_config",
        files={path: packed(content) for path, content in files.items()},
        argv=list(map(str, argv)),
        hidden=[packed(each) for each in hidden],
        seconds=30,
    )
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=text.encode(),
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)["error"]


def packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def left() -> set[Path]:
    return set(Path("/run").glob("gpufleet-*"))


def test_files_are_judged_together_and_nothing_is_left_of_them() -> None:
    promtool = program("prometheus", "usr/bin/promtool")
    rule = "groups: [{name: a, rules: [{record: a:b, expr: '%s'}]}]"
    before = left()
    for expr, good in (("up", True), ("up(", False)):
        files = {"prometheus.yml": "rule_files: [rules/*.yml]", "rules/a.yml": rule % expr}
        error = proven(files, promtool, "check", "config", "prometheus.yml")
        assert (error is None) is good, error
        assert good or "rules/a.yml" in error
    assert left() == before


def test_what_is_refused_is_said_without_the_secret_in_it() -> None:
    amtool = program("prometheus-alertmanager", "usr/bin/amtool")
    wanted = Alertmanager.model_validate({"page": {"webhook_url_file": "x"}})
    text = alertmanager.alertmanager_yml(wanted, {"credentials/page-webhook": SECRET})
    error = proven(
        {"alertmanager.yml": text}, amtool, "check-config", "alertmanager.yml", hidden=(SECRET,)
    )
    assert "invalid control character" in error
    assert "very-secret" not in error


def test_a_program_that_is_not_there_proves_nothing() -> None:
    assert "cannot be run" in proven({}, "/usr/bin/no-such-promtool")
