"""`gpufleet init`: create a fleet's project directory from host names.

Thin: fetches keys and probes, calls `setup`, writes, prints.
"""

from __future__ import annotations

import getpass
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli.default_release import SHIPPED
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.setup.first_model import FirstModel
    from gpufleet.setup.hosts import Host
    from gpufleet.setup.kinds import Findings


@click.command(cls=StrictCommand)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("words", metavar="[HOST]...", nargs=-1)
@click.option("--ansible", metavar="FILE", help="Use the hosts of this Ansible inventory.")
@click.option("--yes", is_flag=True, help="Accept the printed host keys without asking.")
@click.option(
    "--known-hosts",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Use the host keys in this file, and do not ask.",
)
@click.option(
    "--key",
    metavar="FILE",
    help="SSH private key.  [default: the keys of the SSH agent and of ~/.ssh]",
)
@click.option(
    "--model", metavar="ID[@COMMIT]", help="Model to serve.  [default: a model that fits]"
)
@click.option(
    "--settings",
    "settings_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with settings that override the generated settings, for example a mirror, a "
    "lock or a different release.",
)
def init(
    directory: Path,
    words: tuple[str, ...],
    *,
    ansible: str | None,
    yes: bool,
    known_hosts: Path | None,
    key: str | None,
    model: str | None,
    settings_file: Path | None,
) -> int:
    """
    Create a fleet's project directory from host names.

    The directory contains an inventory, settings, host keys, API keys and a README.

    \b
    gpufleet init fleet gpu-01.example.net root@192.0.2.12:2222
    gpufleet init fleet --ansible hosts.ini
    gpufleet init fleet gpu-01 gpu-02 --known-hosts ~/.ssh/known_hosts

    HOST is HOST, USER@HOST, USER@HOST:PORT, or a name in ~/.ssh/config. The command prints the
    fingerprint of each host's key. Compare it with the fingerprint on the host's console. Then the
    command probes the nodes. It installs nothing, and it does not change existing files.

    Exit status: 0: the files were written. 2: refused, and nothing was written.
    """
    use_gevent()  # before pyinfra is imported
    from gpufleet.setup import fleet_files, host_keys, kinds
    from gpufleet.setup.first_model import parse_model

    given = _settings(settings_file)
    wanted = parse_model(model) if model else None
    hosts = _hosts(words, ansible, key)
    lines = _known(directory, hosts, known_hosts)
    if unknown := [host for host in hosts if host.name not in lines]:
        if known_hosts:
            raise FleetError(
                *(f"{known_hosts}: contains no key of {host.known_name}" for host in unknown)
            )
        found = host_keys.fetch_keys(unknown)
        for host in unknown:
            shown = host_keys.fingerprint(found[host.name])
            click.echo(printable(f"{host.known_name}  {found[host.name].get_name()}  {shown}"))
            lines[host.name] = host_keys.known_hosts_line(host, found[host.name])
        _accept(yes=yes)
    known = host_keys.known_hosts_text(lines)
    with tempfile.TemporaryDirectory(prefix="gpufleet-init-") as folder:
        documents = _probe(Path(folder), hosts, known, given)
        findings = kinds.read_kinds(documents)
        serving = _first_model(wanted, findings, given)
        files = fleet_files.render(hosts, findings, model=serving, release=SHIPPED, given=given)
        files[fleet_files.KNOWN_HOSTS] = known
        api_key = _own_key(given)
        _check(Path(folder) / "whole", files, api_key=api_key)
    for each in fleet_files.write_files(directory, files, api_key=api_key):
        state = (
            "written"
            if each.new
            else "skipped, because the inventory has no such group:"
            if each.left_out
            else "kept, although it differs"
            if each.differs
            else "kept"
        )
        click.echo(printable(f"{state:8}  {directory / each.path}"))
    python = None if "lock" in (given.get("vllm") or ()) else kinds.old_pythons(documents, SHIPPED)
    for remark in (*findings.remarks, *filter(None, (python,))):
        click.echo(printable(f"note: {remark}"), err=True)
    _say_next(directory, findings, serving, given)
    return 0


def _settings(file: Path | None) -> dict[str, Any]:
    """Return the values in a settings file, or {} if there is no file."""
    from gpufleet.settings import variables

    if file is None:
        return {}
    if not file.is_file():
        raise FleetError(f"--settings {file}: there is no such file")
    return {name: value for name, (value, _) in variables.load_file(file).items()}


def _hosts(words: tuple[str, ...], ansible: str | None, key: str | None) -> tuple[Host, ...]:
    from dataclasses import replace

    import paramiko

    from gpufleet.importer.ansible import read_hosts
    from gpufleet.setup.hosts import hosts_of_inventory, parse_hosts, words_host

    if bool(words) == bool(ansible):
        raise click.UsageError(
            "Give either HOST..., or the hosts of an Ansible inventory with --ansible."
        )
    user = getpass.getuser()
    if ansible:
        try:
            entries = read_hosts(Path(ansible).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise FleetError(f"{ansible}: cannot be read: {error}") from None
        except FleetError as error:
            raise FleetError(*(f"{ansible}: {problem}" for problem in error.problems)) from None
        hosts = hosts_of_inventory(entries, user)
    else:
        file = Path("~/.ssh/config").expanduser()
        config = paramiko.SSHConfig.from_path(str(file)) if file.is_file() else None
        names = map(words_host, words)
        said = {name: dict(config.lookup(name)) for name in names} if config else {}
        hosts = parse_hosts(words, said, user)
    return tuple(replace(host, key=str(Path(key).resolve())) for host in hosts) if key else hosts


def _known(directory: Path, hosts: tuple[Host, ...], known_hosts: Path | None) -> dict[str, str]:
    """Return the host key lines that are already known, from a file or from an earlier run."""
    from gpufleet.setup import fleet_files, host_keys

    earlier = directory / fleet_files.KNOWN_HOSTS
    found = host_keys.known_hosts_keys(earlier, hosts) if earlier.is_file() else {}
    if known_hosts:
        found |= host_keys.known_hosts_keys(known_hosts.expanduser(), hosts)
    return found


def _accept(*, yes: bool) -> None:
    """Ask the operator whether the keys on the screen are correct."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise FleetError(
            "the host keys above are new, and there is no terminal on which you can "
            "confirm them: compare them with the keys on the hosts, and then add --yes or "
            "--known-hosts FILE"
        )
    click.confirm("Are these the keys of your hosts?", abort=True)


def _probe(
    folder: Path, hosts: tuple[Host, ...], known: str, given: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Probe each host. Raises `FleetError` with every host that does not answer."""
    import yaml

    from gpufleet.fleet import live
    from gpufleet.fleet.assessment import require_documents
    from gpufleet.setup import fleet_files

    reached = fleet_files.connection(hosts, fleet_files.KNOWN_HOSTS, given)
    texts = {
        fleet_files.INVENTORY: fleet_files.inventory_of(
            {"all_hosts": hosts}, reached.get("ssh_user")
        ),
        fleet_files.KNOWN_HOSTS: known,
        fleet_files.VARIABLES: yaml.safe_dump(reached),
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return dict(require_documents(live.probe(str(folder / fleet_files.INVENTORY))))


def _first_model(
    wanted: FirstModel | None, findings: Findings, given: Mapping[str, Any]
) -> FirstModel | None:
    """Return the model to serve. It has a commit if the Hub reports one."""
    from dataclasses import replace

    from gpufleet.setup.first_model import choose, hub_revision

    if "serving" in given:
        return None
    found = wanted or choose([kind.memory_gib for kind in findings.kinds if kind.gpus])
    if found is None or found.revision or found.local:
        return found
    return replace(found, revision=hub_revision(found.model))


def _own_key(given: Mapping[str, Any]) -> bool:
    """Return whether to generate an API key for the fleet, because no setting names a key file."""
    vllm = given.get("vllm")
    return not (isinstance(vllm, Mapping) and "api_key_file" in vllm)


def _check(root: Path, files: Mapping[str, str], *, api_key: bool) -> None:
    """
    Write the files to a folder and load them, to validate them.

    Raises `FleetError` with every mistake in the settings.
    """
    from gpufleet.inventory.loader import read
    from gpufleet.setup import fleet_files

    list(fleet_files.write_files(root, files, api_key=api_key))
    read(root / fleet_files.INVENTORY)


def _say_next(
    directory: Path, findings: Findings, model: FirstModel | None, given: Mapping[str, Any]
) -> None:
    click.echo()
    if "serving" not in given and model is None:
        click.echo(f"gpufleet chose no model: write a model into {directory}/group_vars/gpu.yml.")
    elif model and not (model.revision or model.local):
        click.echo(
            f"The Hub did not report the current commit of {model.model}: write the commit "
            f"into {directory}/group_vars/gpu.yml."
        )
    click.echo("Next:")
    click.echo(f"  cd {directory}")
    if any(kind.gets_driver for kind in findings.kinds):
        click.echo("  gpufleet deploy node     # the driver first")
    else:
        click.echo("  gpufleet plan            # which GPUs would serve what")
    click.echo("  gpufleet deploy vllm     # asks before it changes anything")
