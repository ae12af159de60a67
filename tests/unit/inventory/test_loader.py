"""
Inventories: whose value wins, what is refused, and that no exit code of pyinfra lies.

The real `pyinfra` command runs in a project of its own, against nodes of its `@fake` connector;
what is only read needs no process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from threading import Thread

import click
import pytest
from click.testing import CliRunner

from gpufleet.errors import FleetError
from gpufleet.inventory import loader
from gpufleet.settings import node_variables
from tests.support.checkout import ROOT

runs_pyinfra = pytest.mark.slow
"""For a test that starts programs of its own."""

PYINFRA = Path(sys.executable).with_name("pyinfra")


class Project:
    """A checkout in small: our config.py, an inventory of three nodes, a deploy of one command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copy(ROOT / "config.py", path)
        self.inventory(
            """\
            groups={"gpu_a": ["@fake/n1", ("@fake/n2", {"_timeout": 7})], "gpu_b": ["@fake/n3"]},
            children={"gpu": ["gpu_a", "gpu_b"]},
            """
        )
        self.write(
            "deploys/say.py",
            """\
            from pyinfra.operations import server
            server.shell(name="say", commands=["true"])
            """,
        )

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))

    def inventory(self, arguments: str) -> None:
        head = "from gpufleet import inventory\nglobals().update(inventory.load(__file__,\n"
        self.write("inventories/fake.py", head + dedent(arguments) + "\n))\n")

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYINFRA")}
        return kept | {"PYINFRA_FAKE_DELAY": "0", "PYINFRA_FAKE_DELAY_JITTER": "0"}

    def pyinfra(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYINFRA, *arguments],
            cwd=self.path,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def data(self, *arguments: str) -> dict[str, dict]:
        """Return {node: its data} as pyinfra's own command prints it."""
        run = self.pyinfra("inventories/fake.py", "debug-inventory", "--json", *arguments)
        assert run.returncode == 0, run.stderr
        return {host["name"]: host["data"] for host in json.loads(run.stdout)}

    def refuses(self, *arguments: str) -> str:
        """Return what pyinfra said when it refused: a clean message, and no exit code 0."""
        run = self.pyinfra(*arguments)
        assert run.returncode == 1, run.stderr
        assert "Traceback" not in run.stdout + run.stderr
        assert "Connecting to hosts" not in run.stderr
        return run.stderr


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


DEPLOY = ("-y", "inventories/fake.py", "deploys/say.py")


# -- what works ------------------------------------------------------------------------------------


@runs_pyinfra
def test_a_deploy_reaches_every_node(project):
    run = project.pyinfra(*DEPLOY, "--json")

    assert run.returncode == 0, run.stderr
    (done,) = json.loads(run.stdout)["results"]["operations"]
    assert sorted(done["success"]) == ["@fake/n1", "@fake/n2", "@fake/n3"]


@runs_pyinfra
def test_the_more_specific_place_wins(project):
    """Each layer says its name for its own key and all those below; pyinfra sees the last word."""
    layers = ["all", "fake", "gpu", "gpu_a"]
    for count, layer in enumerate(layers, 1):
        project.write(f"group_vars/{layer}.yml", f"node_exporter: {{port: {9000 + count}}}\n")

    for count in range(4, 0, -1):
        ports = {name: data["node_exporter"]["port"] for name, data in project.data().items()}
        inner = min(count, 3)  # gpu_b has no file of its own
        numbers = {name: port - 9000 for name, port in ports.items()}
        assert numbers == {"@fake/n1": count, "@fake/n2": count, "@fake/n3": inner}
        (project.path / f"group_vars/{layers[count - 1]}.yml").unlink()


@runs_pyinfra
def test_a_node_beats_its_groups_and_the_command_line_beats_all(project):
    project.write("group_vars/gpu_a.yml", "_timeout: 1\nnode_exporter: {port: 9001}\n")
    project.write("host_vars/@fake/n2.yml", "_timeout: 2\nnode_exporter: {port: 9002}\n")

    data = project.data()
    assert [data[f"@fake/n{n}"]["_timeout"] for n in (1, 2, 3)] == [
        1,
        7,
        node_variables.COMMAND_SECONDS,
    ]
    assert data["@fake/n2"]["node_exporter"] == {"port": 9002}
    typed = project.data("--data", 'node_exporter={"port": 9003}')
    assert {data["node_exporter"]["port"] for data in typed.values()} == {9003}


@runs_pyinfra
def test_the_command_line_sets_one_value_inside_a_setting_where_a_node_has_it(project):
    model = "{model: /srv/a, replicas: 1, flags: {max-num-seqs: 8}}"
    vllm = "{version: 0.32.0, lock: locks/x.txt, api_key_file: secrets/key}"
    serving = f"{{llama-3.1: {model}, b: {model}}}"
    project.write("group_vars/gpu_a.yml", f"vllm: {vllm}\nserving: {serving}\n")

    typed = "serving.llama-3.1.flags.max-num-seqs"
    before = project.data()
    data = project.data("--data", f"{typed}=16")
    # pyinfra shows it beside all settings, too.
    assert {each.pop(typed) for each in data.values()} == {16}
    changed = [name for name in data if data[name] != before[name]]
    assert changed == [name for name in before if before[name].get("serving")] != []
    for name in changed:
        serving = data[name]["serving"]
        assert serving["llama-3.1"]["flags"] == {"max-num-seqs": 16}
        assert serving["b"] == before[name]["serving"]["b"]
        del serving["llama-3.1"]["flags"], before[name]["serving"]["llama-3.1"]["flags"]
        assert data[name] == before[name]


@runs_pyinfra
def test_groups_of_the_same_depth_are_read_by_name(project):
    """As Ansible does: the last name wins."""
    project.inventory('groups={"b": ["@fake/n1"], "a": ["@fake/n1"]}')
    for name in "ab":
        project.write(f"group_vars/{name}.yml", f"_chdir: /{name}\n")

    assert project.data()["@fake/n1"]["_chdir"] == "/b"


@runs_pyinfra
def test_a_further_directory_is_read_behind_ours(project):
    project.write("group_vars/gpu.yml", "_chdir: /ours\n_retries: 1\n")
    project.write("state/group_vars/gpu.yml", "_chdir: /theirs\n")
    project.inventory(f'groups={{"gpu": ["@fake/n1"]}}, also=["{project.path}/state"]')

    data = project.data()["@fake/n1"]
    assert (data["_chdir"], data["_retries"]) == ("/theirs", 1)


@runs_pyinfra
def test_hosts_by_themselves_are_enough_for_exec(project):
    """Only deploys need variables."""
    assert project.pyinfra("-y", "@fake/a,@fake/b", "exec", "--", "true").returncode == 0


@runs_pyinfra
def test_every_connection_is_tuned_and_every_key_is_checked(project):
    data = project.data()["@fake/n1"]

    assert data["ssh_strict_host_key_checking"] == "yes"
    assert "nodelay_transport" in str(data["ssh_paramiko_connect_kwargs"])


@runs_pyinfra
def test_files_of_ours_are_found_from_any_directory(project):
    project.write("group_vars/all.yml", "ssh_key: keys/id\nssh_known_hosts_file: /etc/known\n")

    data = project.data()["@fake/n1"]
    assert data["ssh_key"] == str(project.path / "keys/id")
    assert data["ssh_known_hosts_file"] == "/etc/known"


# -- exit codes that would be 0 --------------------------------------------------------------------


@runs_pyinfra
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(
            ("-y", "inventories/nope.py", "deploys/say.py"),
            ("inventories/nope.py: there is no such inventory file; there are inventories/fake.py"),
            id="no-such-inventory",
        ),
        pytest.param(
            ("-y", "inventories/nope", "exec", "--", "true"),
            "no such inventory file",
            id="no-suffix",
        ),
        pytest.param(
            ("-y", "inventories", "deploys/say.py"), "inventories is a directory", id="directory"
        ),
        pytest.param(
            ("-y", "group_vars/all.yml", "deploys/say.py"),
            "all.yml is not a Python file",
            id="yaml",
        ),
        pytest.param(
            ("-y", "no-such-host.invalid", "exec", "--", "true"),
            "neither an inventory file nor a host that resolves",
            id="no-such-host",
        ),
        pytest.param(
            ("-y", "@fake/n1", "deploys/say.py"),
            "deploys need the variables of an inventory:",
            id="bare-host",
        ),
        pytest.param((*DEPLOY, "--no-wait"), "--no-wait", id="no-wait"),
        pytest.param((*DEPLOY, "--dry"), "--dry with -y", id="dry-and-yes"),
        pytest.param((*DEPLOY, "--limit", "gpu_c"), "did you mean 'gpu_b'", id="limit-group"),
        pytest.param((*DEPLOY, "--limit", "n9*"), "--limit n9*: matches no host", id="limit-host"),
        pytest.param((*DEPLOY, "--exclude", "zz"), "--exclude zz: matches no", id="exclude"),
        pytest.param((*DEPLOY, "--exclude", "gpu"), "match no host", id="excludes-all"),
        pytest.param((*DEPLOY, "--group-data", "x"), "--group-data", id="group-data"),
        pytest.param((*DEPLOY, "--data", "x"), "--data x: has no value", id="data-without-value"),
        pytest.param(
            (*DEPLOY, "--data", "serving.tiny.replicas=2"),
            "--data serving.tiny.replicas: no node has the setting `serving.tiny`, in",
            id="data-into-nothing",
        ),
        pytest.param(
            (*DEPLOY, "--data", "node_exporter.prt=1"),
            "--data on group_vars/all.yml:1: node_exporter.prt: no setting has this name",
            id="data-inside-checked",
        ),
        pytest.param((*DEPLOY, "--data", "vlm={}"), "--data: vlm: no setting", id="data-unknown"),
        pytest.param(
            (*DEPLOY, "--data", 'node_exporter={"prt": 1}'),
            ("--data: node_exporter.prt: no setting has this name; did you mean 'port'"),
            id="data-checked",
        ),
    ],
)
def test_a_command_line_that_would_do_nothing_is_refused(project, arguments, says):
    project.write("group_vars/all.yml", "node_exporter: {port: 9100}\n")

    assert says in project.refuses(*arguments)


@runs_pyinfra
@pytest.mark.parametrize("limit", ["gpu_a", "gpu", "fake", "@fake/n1", "@fake/*"])
def test_limits_that_match_are_left_alone(project, limit):
    assert project.pyinfra(*DEPLOY, "--limit", limit).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param('groups={"gpu": []}', "has no nodes", id="empty"),
        pytest.param("groups={}", "has no nodes", id="no-groups"),
        pytest.param('groups={"gpu": "n1"}', "but must be a list:", id="text-for-list"),
        pytest.param('groups={"gpu": ["n1", "n1"]}', "contains n1 twice", id="twice"),
        pytest.param('groups={"gpu": ["n1,n2"], "b": [3]}', "group b has 3", id="no-name"),
        pytest.param(
            'groups={"_gpu": ["n1"]}', "'_gpu' cannot be the name of a group", id="underscore"
        ),
        pytest.param('groups={"all": ["n1"]}', "'all' cannot be the name of a group", id="all"),
        pytest.param(
            'groups={"gpu": ["n1"]}, children={"top": ["gpus"]}',
            "children of top: there is no group 'gpus'; did you mean 'gpu'?",
            id="unknown-child",
        ),
        pytest.param(
            'groups={"a": ["n1"]}, children={"a": ["b"], "b": ["a"]}',
            "groups contain each other",
            id="cycle",
        ),
        pytest.param(
            'groups={"a": [("n1", {"_retries": 1})], "b": [("n1", {"_retries": 2})]}',
            "n1 has two different values for _retries",
            id="two-values",
        ),
        pytest.param(
            'groups={"a": [("n1", {"vllm": {1, 2}})]}',
            "the value cannot be written as JSON:",
            id="not-json",
        ),
    ],
)
def test_an_inventory_that_cannot_be_meant_is_refused(project, arguments, says):
    project.inventory(arguments)

    with pytest.raises(FleetError) as refused:
        loader.read(project.path / "inventories/fake.py")
    assert says in str(refused.value)


@runs_pyinfra
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param('groups={"gpu": []}', "inventories/fake.py: has no nodes", id="empty"),
        pytest.param('groups={"a": [}', "inventories/fake.py:3: is not Python", id="syntax"),
    ],
)
def test_pyinfra_passes_the_refusal_on(project, arguments, says):
    project.inventory(arguments)

    assert says in project.refuses(*DEPLOY)


def hang_up(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.close()


@runs_pyinfra
def test_a_node_that_does_not_speak_ssh_is_one_sentence(project):
    """paramiko alone logs a traceback for each such node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        project.inventory(
            f'groups={{"gpu": [("n1", {{"ssh_hostname": "127.0.0.1", '
            f'"ssh_port": {server.getsockname()[1]}}})]}}'
        )
        Thread(target=hang_up, args=(server,), daemon=True).start()
        run = project.pyinfra(*DEPLOY)

    assert run.returncode == 1
    assert "[n1]" in run.stderr
    assert "Traceback" not in run.stderr


@runs_pyinfra
def test_an_interrupted_run_does_not_exit_with_0(project):
    """pyinfra's own handler does, and a script would go on as if all nodes were done."""
    run = subprocess.Popen(
        [PYINFRA, "-y", "@local", "exec", "--", "echo begun; sleep 20"],
        cwd=project.path,
        env=project.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with run:
        for line in run.stderr:
            if "Starting operation" in line:
                break
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()

    assert run.returncode == 130
    assert "Traceback" not in rest
    assert "may continue to run on the nodes: @local: server.shell" in rest
    assert "run the same command again:" in rest


# -- mistakes in variables -------------------------------------------------------------------------


@runs_pyinfra
def test_all_mistakes_of_all_nodes_are_said_at_once_with_their_lines(project):
    """Three nodes inherit them; each is said once, in the order of the file."""
    project.write(
        "group_vars/gpu.yml",
        """\
        vllm:
          version: 0.32.0
          lock: locks/x.txt
          api_key_fil: secrets/key
          allow_unauthenticated: true
        serving:
          tiny:
            model: /srv/tiny
            replicas: 0
            replica: 1
        servin: {}
        ssh_prot: 22
        ssh_port: "22"
        """,
    )

    said = project.refuses(*DEPLOY)

    mistakes = [line.strip() for line in said.splitlines() if "group_vars" in line]
    assert mistakes == [
        "group_vars/gpu.yml:4: vllm.api_key_fil: no setting has this name; did "
        "you mean 'api_key_file'?",
        "group_vars/gpu.yml:9: serving.tiny.replicas: must be a number of 1 or more, or "
        "`fit` for as many replicas as fit (got 0)",
        "group_vars/gpu.yml:10: serving.tiny.replica: no setting has this name; did you mean "
        "'replicas'?",
        ("group_vars/gpu.yml:11: servin: no setting has this name; did you mean 'serving'?"),
        ("group_vars/gpu.yml:12: ssh_prot: no setting has this name; did you mean 'ssh_port'?"),
        "group_vars/gpu.yml:13: ssh_port: str is not an instance of int",
    ]
    assert "inventories/fake.py is refused, 6 problems" in said


@runs_pyinfra
def test_yaml_that_is_none_is_refused_with_file_and_line(project):
    project.write("group_vars/gpu.yml", "vllm:\n  version: [\n")

    assert "group_vars/gpu.yml:3: is not valid YAML" in project.refuses(*DEPLOY)


@runs_pyinfra
def test_what_is_missing_is_placed_where_it_belongs(project):
    project.write("group_vars/all.yml", "# first line\ncuda:\n  repository:\n    url: http://m\n")

    said = project.refuses(*DEPLOY)

    assert "group_vars/all.yml:3: cuda.repository.keyring_sha256: is required but not set" in said


@runs_pyinfra
def test_what_only_some_nodes_lack_names_them(project):
    project.write("group_vars/gpu_a.yml", "serving: {m: {model: /srv/m}}\n")

    assert "@fake/n1, @fake/n2: `serving` is set, but `vllm` is not" in project.refuses(*DEPLOY)


def test_a_variable_beside_a_name_is_placed_in_the_inventory(project):
    project.inventory('groups={"gpu": [\n  ("@fake/n1", {"ssh_prot": 1}),\n]}')

    with pytest.raises(FleetError, match=r"inventories/fake\.py:4: ssh_prot: no setting"):
        loader.read(project.path / "inventories/fake.py")


@pytest.mark.parametrize("key", sorted(node_variables.PASSWORDS))
def test_passwords_are_refused_and_not_repeated(project, key):
    project.write("group_vars/all.yml", f"{key}: TOPSECRET42\n")

    with pytest.raises(FleetError) as refused:
        loader.read(project.path / "inventories/fake.py")
    said = str(refused.value)
    assert f"group_vars/all.yml:1: {key}: variables must not contain passwords" in said
    assert "TOPSECRET42" not in said


# -- outside pyinfra -------------------------------------------------------------------------------


@runs_pyinfra
def test_reading_gives_what_pyinfra_gets(project):
    """`gpufleet` commands and deploys must not see different values."""
    project.write("group_vars/gpu.yml", "node_exporter: {port: 9999}\n")

    fleet = loader.read(project.path / "inventories/fake.py")

    theirs = project.data()
    for name, node in fleet.nodes.items():
        assert node.values.items() <= theirs[name].items()
    assert fleet.nodes["@fake/n2"].settings.node_exporter.port == 9999
    assert fleet.nodes["@fake/n2"].groups == ("fake", "gpu", "gpu_a")


def test_a_command_of_another_program_reads_inventories_too(project):
    """Its command line is not pyinfra's; the fleet is that of the inventory read last."""
    project.inventory('groups={"gpu": ["n1"], "cpu": [("n2", {"gpu_node": False})]}')
    path = str(project.path / "inventories/fake.py")

    run = CliRunner().invoke(click.Command("mine", callback=lambda: loader.read(path)))

    assert run.exception is None
    fleet = loader.current()
    assert (fleet.root, fleet.typed) == (project.path, None)
    assert list(fleet.nodes) == ["n1", "n2"]
    assert list(fleet.gpu_nodes) == ["n1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(
            "hosts = ['a']\n",
            "the inventory does not load its variables with gpufleet:",
            id="plain-pyinfra",
        ),
        pytest.param("import nothing_like_this\n", r"fake\.py:1: ModuleNotFoundError", id="import"),
        pytest.param("x = (\n", r"fake\.py:1: is not Python", id="syntax"),
    ],
)
def test_a_file_that_is_no_inventory_of_ours_is_refused(project, text, says):
    project.write("inventories/fake.py", text)

    with pytest.raises(FleetError, match=says):
        loader.read(project.path / "inventories/fake.py")


@pytest.mark.parametrize("name", ["hosts.yml", "hosts.ini"])
def test_an_ansible_inventory_is_told_to_be_imported(project, name):
    project.write(f"inventories/{name}", "all:\n  hosts: {a: {}}\n")

    with pytest.raises(
        FleetError, match=rf"{name}: an inventory is a Python file: `gpufleet import "
    ):
        loader.read(project.path / "inventories" / name)


def test_a_file_of_variables_that_nobody_reads_is_remarked_upon(project):
    project.write("group_vars/gpus.yml", "node_exporter: {port: 9001}\n")

    (remark,) = loader.read(project.path / "inventories/fake.py").remarks

    assert remark.startswith("group_vars/gpus.yml is not read")
    assert "did you mean 'gpu'?" in remark


# -- the examples that operators copy --------------------------------------------------------------


def test_the_inventory_of_this_machine_has_no_mistake():
    assert loader.read(ROOT / "inventories/local.py").nodes


def test_the_explained_example_names_files_that_exist():
    fleet = loader.read(ROOT / "examples/explained/inventories/prod.py")
    locks = {node.settings.vllm.lock for node in fleet.nodes.values()}
    locks |= {node.settings.vllm.uv_lock for node in fleet.nodes.values()}

    assert [lock for lock in sorted(locks) if not (ROOT / lock).is_file()] == []


@runs_pyinfra
def test_without_a_lab_its_inventory_says_what_to_run(tmp_path):
    run = subprocess.run(
        [PYINFRA, "inventories/lab.py", "debug-inventory"],
        cwd=ROOT,
        env=os.environ | {"GPUFLEET_LAB": "nolab"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1
    assert "run: gpufleet lab up" in run.stderr
    assert "Traceback" not in run.stderr
