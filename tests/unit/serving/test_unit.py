"""
What a unit says. That systemd reads words back as we wrote them is proven on lab nodes; here are
the rules that need no systemd, and systemd's own linter where it is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet import node_paths
from gpufleet.converge.quoting import systemd_quote
from gpufleet.engines.vllm import launch_environment
from gpufleet.engines.vllm.launch_arguments import MIDDLEWARE
from gpufleet.errors import FleetError
from gpufleet.on_node.common import stages
from gpufleet.on_node.serving import unit_command
from gpufleet.planning.stage import Stage
from gpufleet.serving import unit
from gpufleet.serving.unit import (
    LAUNCHER,
    VARIABLES,
    drop_in,
    render_unit,
    stop_seconds,
)
from gpufleet.settings.serving_settings import Served, Vllm
from gpufleet.templates import TEMPLATES
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.support.serve_words import vllm_arguments

GOLDEN = ROOT / "tests/data/vllm.service"
STAGE = Stage(
    model="llama",
    replica=0,
    node="gpu-01",
    gpus=(2, 3),
    gpu_uuids=("GPU-5f1c", "GPU-9a2e"),
    port=8000,
    tensor_parallel=2,
)
KEY = {"api-key": "7d" * 32}
OPEN = Vllm(version="0.32.0", lock="locks/vllm.txt", listen="127.0.0.1")


def vllm(**changes):
    settings = {"version": "0.32.0", "lock": "locks/vllm.txt", "api_key_file": "secrets/api-key"}
    return Vllm.model_validate(settings | changes)


def model(**changes):
    settings = {
        "model": "meta-llama/Llama-3.1-8B",
        "revision": "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
    }
    return Served.model_validate(settings | changes)


def render(changed_model=None, changed_vllm=None, **changes):
    wanted = {"release": "0.32.0-1a2b3c4d5e", "toolkit": "13-0", "credentials": KEY}
    return render_unit(
        STAGE, changed_model or model(), changed_vllm or vllm(), **(wanted | changes)
    )


def flags(arguments):
    """The operator's flags as words: those between the last of the plan's and the guard."""
    words = vllm_arguments(STAGE, model(flags=arguments), vllm())
    assert words[-2:] == ("--middleware", MIDDLEWARE)
    return words[words.index("--shutdown-timeout") + 2 : -2]


# The unit as a whole


def test_the_unit_file_is_the_reviewed_one():
    """
    Every change of the unit is read by somebody: it restarts every stage of every fleet.

    Write the new one with `UPDATE_GOLDEN=1 pytest tests/unit/serving/test_unit.py`, and review its
    diff.
    """
    rendered = render(
        model(
            tensor_parallel=2,
            flags={
                "max-model-len": 8192,
                "enable-prefix-caching": True,
                "async-scheduling": False,
                "limit-mm-per-prompt": {"video": 0, "image": 4},
                "tool-call-parser": None,
            },
            environment={"NCCL_DEBUG": "WARN"},
        )
    )
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(rendered.content)

    assert rendered.content == GOLDEN.read_text()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong(tmp_path, device):
    """`systemd-analyze verify` warns of unknown keys, bad values and lines it would ignore."""
    awkward = '100% "sure" it\'s $HOME; \\ \n # é 🙂'
    settings = model(flags={"chat-template": awkward}, environment={"MOTTO": awkward})
    rendered = render(settings, vllm(device=device, user="root"))
    unit = tmp_path / rendered.unit
    unit.write_text(rendered.content.replace(LAUNCHER, shutil.which("env")))

    verify = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        check=False,
    )

    assert rendered.unit not in verify.stderr
    assert verify.returncode == 0, verify.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_the_sandbox_keeps_its_strength(tmp_path):
    """systemd rates the exposure from 0 to 10; a unit without hardening has 9.2, ours 2.2."""
    rendered = render()
    (tmp_path / rendered.unit).write_text(rendered.content)

    rating = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=22", rendered.unit],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert rating.returncode == 0, rating.stdout.splitlines()[-1:]


def test_every_flag_has_its_own_line():
    """A diff of two units then shows which flag changed, and nothing else."""
    one = render(model(flags={"max-model-len": 4096, "enforce-eager": True}))
    two = render(model(flags={"max-model-len": 8192, "enforce-eager": True}))

    def but_the_record(rendered):
        return [line for line in rendered.content.splitlines() if "started/%n" not in line]

    differing = [
        pair
        for pair in zip(but_the_record(one), but_the_record(two), strict=True)
        if len(set(pair)) > 1
    ]
    assert differing == [("    --max-model-len 4096 \\", "    --max-model-len 8192 \\")]


def test_the_key_is_a_credential_and_never_text():
    """Unit files and command lines are readable by everybody on the node."""
    assert "LoadCredential=api-key:/etc/vllm/credentials/api-key\n" in render().content
    assert KEY["api-key"] not in render().content


SECRET_VARIABLES = {"variable.AWS_SECRET_ACCESS_KEY": "9f" * 32}


def test_a_variable_by_a_file_is_a_credential_and_starts_behind_a_program_of_its_own():
    files = {"environment_files": {"AWS_SECRET_ACCESS_KEY": "secrets/aws"}}
    name = "variable.AWS_SECRET_ACCESS_KEY"
    found = render(None, vllm(**files), credentials=KEY | SECRET_VARIABLES).content

    assert f"LoadCredential={name}:/etc/vllm/credentials/{name}\n" in found
    assert f"ExecStart={VARIABLES} {LAUNCHER} \\\n" in found
    assert "secrets/aws" not in found
    assert VARIABLES not in render().content


def test_a_new_value_of_a_variable_by_a_file_restarts_its_stages():
    files = {"environment_files": {"AWS_SECRET_ACCESS_KEY": "secrets/aws"}}

    def fingerprint(digest):
        hashes = KEY | {"variable.AWS_SECRET_ACCESS_KEY": digest}
        return render(None, vllm(**files), credentials=hashes).fingerprint

    assert fingerprint("9f" * 32) != fingerprint("9e" * 32)


def test_a_forgotten_variable_is_our_mistake():
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY"):
        render(None, vllm(environment_files={"AWS_SECRET_ACCESS_KEY": "secrets/aws"}))


def test_variables_by_files_reach_the_process_and_no_argument(tmp_path):
    """The program in front of the launcher, run for real; a newline at a file's end is no part."""
    (tmp_path / "variable.AWS_SECRET_ACCESS_KEY").write_text("a b'c\"$HOME\n")
    (tmp_path / "variable.MY_KEY.qwen3.5-8b").write_text("two\nlines\n")
    (tmp_path / "api-key").write_text("key")

    started = subprocess.run(
        ["sh", TEMPLATES / "vllm/vllm-variables.sh", "env", "-0"],
        env={"PATH": os.environ["PATH"], "CREDENTIALS_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    given = dict(line.split("=", 1) for line in started.stdout.split("\0") if line)
    assert given["AWS_SECRET_ACCESS_KEY"] == "a b'c\"$HOME"
    assert given["MY_KEY"] == "two\nlines"
    assert not [name for name in given if "gpufleet" in name]


def test_an_open_endpoint_has_no_credential():
    open_endpoint = vllm(api_key_file=None, allow_unauthenticated=True)

    assert "LoadCredential" not in render(None, open_endpoint, credentials={}).content


def test_a_forgotten_credential_is_our_mistake():
    """A unit without it would start an endpoint without a key, which the operator asked for."""
    with pytest.raises(ValueError, match="hash is missing"):
        render(credentials={})


def test_a_node_without_gpus_needs_none():
    """The CPU build runs where there is no driver to wait for and no GPU to pick."""
    content = render(None, vllm(device="cpu")).content

    assert "nvidia" not in content.lower()
    assert "CUDA_VISIBLE_DEVICES" not in content
    assert "Environment=VLLM_CPU_OMP_THREADS_BIND=nobind\n" in content


@pytest.mark.parametrize(
    ("path", "protection"), [("/srv/llama", "yes"), ("/home/ops/llama", "read-only")]
)
def test_a_model_in_a_home_directory_can_be_read(path, protection):
    """ProtectHome=yes would hide it, and vLLM would report a model that does not exist."""
    content = render(model(model=path, revision=None)).content

    assert f"ProtectHome={protection}\n" in content
    assert f"RequiresMountsFor={path}\n" in content


def test_a_stop_outlasts_the_drain():
    """systemd must not kill what is still answering within the time it was given."""
    settings = model(drain_seconds=300)
    content = render(settings).content

    assert "--shutdown-timeout 300" in content
    assert f"TimeoutStopSec={stop_seconds(settings)}\n" in content
    assert stop_seconds(settings) > 300


# What makes a restart


def test_equal_wishes_have_equal_fingerprints():
    """YAML has no order: reordered flags restart nothing."""
    one = render(model(flags={"a": 1, "b": {"x": 1, "y": 2}}, environment={"A": "1", "B": "2"}))
    two = render(model(flags={"b": {"y": 2, "x": 1}, "a": 1}, environment={"B": "2", "A": "1"}))

    assert one == two


@each_row(
    "changed",
    [
        pytest.param(render(model(flags={"seed": 1})), id="flag"),
        pytest.param(render(model(environment={"A": "1"})), id="variable"),
        pytest.param(render(release="0.33.0-ffffffffff"), id="release"),
        pytest.param(render(credentials={"api-key": "8e" * 32}), id="key"),
        pytest.param(render(toolkit=None), id="toolkit"),
    ],
)
def test_whatever_a_process_is_started_with_changes_its_fingerprint(changed):
    assert changed.fingerprint != render().fingerprint
    assert f"printf %%s {changed.fingerprint} >" in changed.content


def test_a_launcher_of_another_text_is_a_reason_to_restart(tmp_path):
    """The launcher is what systemd starts; nothing of it stands in the unit."""
    shutil.copytree(TEMPLATES, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "vllm/vllm-serve.sh").open("a") as launcher:
        launcher.write("# changed\n")

    assert render(templates=tmp_path).fingerprint != render().fingerprint


# Arguments


def test_the_model_comes_first():
    """`--served-model-name` takes several values and would swallow a model after it."""
    words = list(vllm_arguments(STAGE, model(), vllm(listen="127.0.0.1")))

    assert words == [
        "/var/lib/vllm/models/meta-llama--Llama-3.1-8B/d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
        "--served-model-name",
        "llama",
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
        "--tensor-parallel-size",
        "2",
        "--shutdown-timeout",
        "60",
        "--middleware",
        MIDDLEWARE,
    ]


@each_row(
    ("value", "words"),
    [
        pytest.param(True, ("--flag",), id="true"),
        pytest.param(False, ("--no-flag",), id="false"),
        pytest.param(None, (), id="null"),
        pytest.param(8192, ("--flag", "8192"), id="int"),
        pytest.param(0.92, ("--flag", "0.92"), id="float"),
        pytest.param("auto", ("--flag", "auto"), id="text"),
        pytest.param("", ("--flag", ""), id="empty-text"),
        pytest.param("true", ("--flag", "true"), id="text-that-looks-like-yaml"),
        pytest.param(-1, ("--flag=-1",), id="dash"),
        pytest.param(["a=b", 2, {"c": 3}], ("--flag", "a=b", "2", '{"c":3}'), id="list"),
        pytest.param({"b": [1, None], "a": True}, ("--flag", '{"a":true,"b":[1,null]}'), id="json"),
    ],
)
def test_yaml_values_become_words(value, words):
    assert flags({"flag": value}) == words


def test_arguments_that_no_command_line_can_say_are_refused_together():
    wanted = {"empty": [], "dash": ["-a"], "nul": "a\0b"}

    with pytest.raises(FleetError) as refused:
        flags(wanted)

    assert [problem.split()[0] for problem in refused.value.problems] == [
        "serving.llama.flags.dash",
        "serving.llama.flags.empty",
        "serving.llama.flags.nul",
    ]


# The guard


def test_the_guard_stands_before_an_operators_own_middleware():
    """vLLM puts each one before those that came earlier on its command line."""
    words = vllm_arguments(STAGE, model(flags={"middleware": "mine.Log"}), vllm())
    assert words[-4:] == ("--middleware", "mine.Log", "--middleware", MIDDLEWARE)


def test_no_module_of_an_operator_takes_the_guards_name():
    set_path = {"environment": {"PYTHONPATH": "/srv/mine"}}
    assert environment()["PYTHONPATH"] == node_paths.GUARD
    for changes in ({"changed_model": model(**set_path)}, {"changed_vllm": vllm(**set_path)}):
        assert environment(**changes)["PYTHONPATH"] == f"{node_paths.GUARD}:/srv/mine"


def test_another_guard_restarts_the_servers_that_load_it(monkeypatch):
    keyed, open_to_all = render(), render(changed_vllm=OPEN, credentials={})

    monkeypatch.setattr(unit.payload, "source", lambda name: f"another {name}")

    assert render().fingerprint != keyed.fingerprint
    again = render(changed_vllm=OPEN, credentials={})
    assert again.fingerprint == open_to_all.fingerprint


def test_a_server_without_a_key_has_no_guard():
    """`allow_unauthenticated`, or one that the node alone reaches: the guard would have no key."""
    rendered = render(changed_vllm=OPEN, credentials={})
    assert MIDDLEWARE not in rendered.content
    assert "PYTHONPATH" not in rendered.content


# Environment


def environment(changed_model=None, changed_vllm=None, **changes):
    wanted = {"release": "r", "toolkit": "13-0"} | changes
    return launch_environment.environment(
        STAGE, changed_model or model(), changed_vllm or vllm(), **wanted
    )


def test_the_model_has_the_last_word_on_variables():
    """Built-in, then the fleet's, then the model's."""
    everybody = vllm(environment={"HF_HUB_OFFLINE": "0", "NCCL_DEBUG": "WARN"})
    this_one = model(environment={"NCCL_DEBUG": "INFO"})

    found = environment(this_one, everybody)

    assert (found["HF_HUB_OFFLINE"], found["NCCL_DEBUG"]) == ("0", "INFO")


def test_gpus_are_named_by_uuid_where_vllm_understands_it():
    """An index may be another GPU after a reboot; vLLM before 0.24 dies of anything else."""
    assert environment()["CUDA_VISIBLE_DEVICES"] == "GPU-5f1c,GPU-9a2e"
    assert environment(None, vllm(version="0.24.0"))["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert environment(None, vllm(version="0.23.0"))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_toolkit_is_found_where_its_packages_put_it():
    """JIT kernels take the first nvcc on PATH; without a toolkit there is none to point to."""
    assert environment()["CUDA_HOME"] == "/usr/local/cuda-13.0"
    assert environment()["PATH"].split(":")[:2] == [
        "/opt/vllm/releases/r/bin",
        "/usr/local/cuda-13.0/bin",
    ]
    assert "CUDA_HOME" not in environment(toolkit=None)


def test_variables_that_systemd_would_drop_are_refused_together():
    """systemd logs a bad name and starts the process without it; ours are not to be overridden."""
    with pytest.raises(FleetError) as refused:
        environment(model(environment={"A B": "1", "C": "\0"}), vllm(environment={"D-E": "1"}))

    assert [problem.split(" ")[0] for problem in refused.value.problems] == [
        "vllm.environment.D-E",
        "serving.llama.environment.A",
        "serving.llama.environment.C",
    ]


# Quoting

# Any text but what systemd cannot say (Cs: surrogates, Cn: noncharacters among others), and text of
# what it has a meaning for.
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\0")) | st.text(
    st.sampled_from("%$\\'\"{}n;# \n\t-a")
)


@each_row(
    ("value", "quoted"),
    [
        ("--max-model-len", "--max-model-len"),
        ("", '""'),
        (";", '";"'),
        ("#", '"#"'),
        ("50%", '"50%%"'),
        ("$HOME", '"$$HOME"'),
        ('{"a":1}', "'{\"a\":1}'"),
        ("it's", '"it\'s"'),
        ("'\"", '"\'\\""'),
        ("a\\n\n\t", r'"a\\n\n\t"'),
        ("\x1bé🙂", r'"\x1b\u00e9\U0001f642"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(value, quoted):
    """systemd.syntax(7) "Quoting", systemd.unit(5) "Specifiers", systemd.service(5) "$"."""
    assert systemd_quote(value) == quoted


@each_row("value", ["a\0", "\ud800", "\ufdd0", "\ufffe", "\U0010ffff"])
def test_what_systemd_cannot_say_is_refused(value):
    """It would drop the variable, or pass the escape as text, and start the process anyway."""
    with pytest.raises(ValueError, match="systemd cannot express"):
        systemd_quote(value)
    with pytest.raises(FleetError, match=r"serving\.llama\.flags\.x contains"):
        flags({"x": value})


@given(WORDS)
def test_a_word_is_printable_ascii_on_one_line(value):
    """Nothing in a value can end a line, start another, or be invalid to systemd's reader."""
    assert re.fullmatch(r"[ -~]+", systemd_quote(value))


@given(WORDS)
def test_no_specifier_and_no_variable_survives(value):
    """After doubled ones are taken out, no % and no $ is left for systemd to expand."""
    quoted = systemd_quote(value)

    assert "%" not in quoted.replace("%%", "")
    assert "$" not in quoted.replace("$$", "")
    assert systemd_quote(value, command=False).count("$") == value.count("$")


@given(WORDS)
def test_a_word_ends_with_its_own_quote(value):
    """A word is bare, or in one pair of quotes without another of its kind inside."""
    quoted = systemd_quote(value)
    if quoted == value:
        assert re.fullmatch(r"[\w@:/.,=+-]+", value, re.ASCII)
        return

    inner = re.sub(r"\\.", "", quoted[1:-1])
    assert quoted[0] == quoted[-1]
    assert quoted[0] in "'\""
    assert quoted[0] not in inner
    assert "\\" not in inner


@given(st.lists(WORDS, min_size=1, max_size=4, unique=True))
def test_different_words_are_different_in_the_unit(values):
    """No two values become the same text: a change never hides."""
    assert len({systemd_quote(value) for value in values}) == len(values)


# Drop-ins


def test_a_drop_in_restarts_for_what_its_process_reads(tmp_path):
    """Its own text, and what is named: versions, contents of files."""
    (tmp_path / "x.conf.j2").write_text("[Service]\n{{ started }}\nEnvironment=PORT={{ port }}\n")

    def fingerprint(port=1, **started_with):
        return drop_in(
            "x.conf.j2", "x.service", port=port, started_with=started_with, templates=tmp_path
        ).fingerprint

    assert fingerprint(version="1") == fingerprint(version="1")
    different = {
        fingerprint(),
        fingerprint(port=2),
        fingerprint(version="1"),
        fingerprint(version="2"),
        fingerprint(counters=b"1"),
    }
    assert len(different) == 5


def test_a_drop_in_lies_beside_the_package_s_unit(tmp_path):
    (tmp_path / "x.conf.j2").write_text("[Service]\n{{ started }}\n")

    found = drop_in("x.conf.j2", "x.service", started_with={}, templates=tmp_path)

    assert found.path == "/etc/systemd/system/x.service.d/gpufleet.conf"
    assert found.file.content == found.content.encode()
    assert f"printf %%s {found.fingerprint} " in found.content


# The launcher, run for real


def launch(tmp_path, key=None):
    environment = {"PATH": os.environ["PATH"]}
    if key is not None:
        (tmp_path / "api-key").write_text(key)
        environment["CREDENTIALS_DIRECTORY"] = str(tmp_path)
    return subprocess.run(
        ["sh", TEMPLATES / "vllm/vllm-serve.sh", "env"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_launcher_hands_over_the_key(tmp_path):
    """Without the newline that editors leave at a file's end."""
    assert "VLLM_API_KEY=s3cret$key\n" in launch(tmp_path, "s3cret$key\n").stdout


def test_the_launcher_starts_without_a_credential(tmp_path):
    started = launch(tmp_path)

    assert started.returncode == 0
    assert "VLLM_API_KEY" not in started.stdout


def test_the_launcher_refuses_an_empty_key(tmp_path):
    """vLLM would take it for none; 2 is the status after which systemd does not try again."""
    refused = launch(tmp_path, "\n")

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the API key is empty" in refused.stderr


# -- shares of a GPU


def shared(**changes):
    stage = replace(STAGE, gpus=(2,), gpu_uuids=("GPU-5f1c",), tensor_parallel=1, gpu_share=0.2)
    return render_unit(
        stage,
        model(gpu_share=0.2, start_seconds=900),
        vllm(**changes),
        release="r",
        credentials=KEY,
    )


def test_a_server_that_shares_its_gpu_waits_for_its_turn():
    lines = shared().content.splitlines()

    assert (
        f"ExecStart={LAUNCHER} /usr/local/libexec/gpufleet/vllm-gpu-turn "
        "/var/lib/vllm/gpu-turns/GPU-5f1c llama-0 http://127.0.0.1:8000 900 \\"
    ) in lines
    assert "    /opt/vllm/releases/r/bin/vllm serve \\" in lines
    assert "StateDirectory=vllm/llama-0 vllm/gpu-turns" in lines
    assert "http://10.0.0.1:8000" in shared(listen="10.0.0.1").content


def test_a_node_reads_its_release_and_arguments_as_of_any_other():
    found = stages.started_release(shared().content)

    stage = replace(STAGE, gpus=(2,), gpu_uuids=("GPU-5f1c",), tensor_parallel=1, gpu_share=0.2)
    served = model(gpu_share=0.2, start_seconds=900)
    assert found["release"] == "r"
    assert found["arguments"] == unit.argument_lines(stage, served, vllm(), release="r")
    words = unit_command.serve(unit_command.command(shared().content))
    assert words == list(vllm_arguments(stage, served, vllm()))
