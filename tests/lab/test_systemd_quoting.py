"""Every value reaches the process as it was written, through the real systemd of a node."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.converge.quoting import systemd_quote
from tests.lab.conftest import Fleet

UNIT = "gpufleet-quoting.service"
RESULT = "/run/gpufleet-quoting.json"
PROGRAM = (
    "import json, os, sys; "
    f"json.dump([sys.argv[1:], [v for k, v in sorted(os.environ.items()) if k[:2] == 'V_']], "
    f"open('{RESULT}', 'w'))"
)

# Any text that a process can be given. systemd refuses unit files with lone surrogates and drops
# variables with code points that are no characters; units.py refuses both. NUL ends an argument.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs", "Cn")), max_size=30)
AWKWARD = st.sampled_from(
    [
        "",
        " ",
        "a b",
        "a  b ",
        "%n %h %%",
        "$HOME ${HOME} $$",
        "'single' \"double\"",
        "back\\slash \\x41 \\n",
        "line\nline",
        "tab\tcr\r",
        '{"mode": 2, "backend": "eager"}',
        "größe 模型 🦙",
        ";",
        "; rm -rf /",
        "# not a comment",
        "-leading",
        "@leading",
        "a=b",
        "\x01\x1f\x7f",
        "\u2028",
        "trailing\\",
    ]
)


def through_systemd(fleet: Fleet, arguments: list[str], variables: list[str]) -> list[list[str]]:
    """Return what a process sees that the node's systemd starts with these words."""
    lines = [
        "[Service]",
        "Type=oneshot",
        *(
            "Environment=" + systemd_quote(f"V_{i:03}={value}", command=False)
            for i, value in enumerate(variables)
        ),
        "ExecStart=/usr/bin/python3 -c " + systemd_quote(PROGRAM) + " \\",
        *(f"    {systemd_quote(word)} \\" for word in arguments),
        "",
    ]
    unit = "\n".join(lines).rstrip("\\\n ") + "\n"
    encoded = base64.b64encode(unit.encode()).decode()
    script = (
        f"rm -f {RESULT}; echo {encoded} | base64 -d > /run/systemd/system/{UNIT} && "
        f"systemctl daemon-reload && systemctl start {UNIT} && cat {RESULT}"
    )
    done = subprocess.run(
        [
            "ssh",
            *("-F", str(fleet.state.ssh_config)),
            *("-o", "ControlMaster=auto", "-o", "ControlPersist=60"),
            *("-o", f"ControlPath={fleet.state.dir}/quoting-%h"),
            "gpu-01",
            f"sh -c {shlex.quote(script)}",
        ],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr.decode()}\n{unit}"
    seen: list[list[str]] = json.loads(done.stdout)
    return seen


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(TEXT | AWKWARD, max_size=60), st.lists(TEXT | AWKWARD, max_size=30))
def test_any_text_survives_the_trip_through_systemd(
    nodes: Fleet, arguments: list[str], variables: list[str]
) -> None:
    assert through_systemd(nodes, arguments, variables) == [arguments, variables]


@pytest.mark.parametrize("where", ["argument", "variable"])
def test_every_awkward_text_survives(nodes: Fleet, where: str) -> None:
    """The list above in whole, so that no draw of luck leaves one out."""
    words = list(AWKWARD.elements)  # type: ignore[attr-defined]
    asked = (words, []) if where == "argument" else ([], words)
    assert through_systemd(nodes, *asked) == [asked[0], asked[1]]
