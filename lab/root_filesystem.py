"""Build a node's root filesystem: its own layer over the base image, and its own files.

nodes/<name>/upper, work   files that the node has written; they stay after `power off` and `down`
nodes/<name>/root          the mount point of the whole filesystem while the lab is up
nodes/<name>/image         the base image below `upper`, and whether the node has a driver
nodes/<name>/hostkey/      the SSH host key, which stays when all other files are created again
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from lab import run_command
from lab.state import LabNode, LabState, write
from lab.vendor import kernels

# Directory of plain files that replaces /proc/sys/vm. The real settings belong to this machine, and
# a node that changes its settings must not change this machine.
SYSCTL = Path("var/lib/gpufleet-lab/vm")

# Text after the image's name, for a node that was delivered without a driver.
_WITHOUT = " without a driver"

_SSHD = """\
# Without name service, asking who logs in would only take time.
UseDNS no
HostKey /etc/ssh/ssh_host_ed25519_key
# A fleet tool opens many connections at once.
MaxStartups 200
"""


def mount(state: LabState, node: LabNode, image: Path) -> bool:
    """
    Mount the node's root with its earlier files; return whether these had to be discarded.

    The earlier files are discarded in two cases: if the base image has changed, because a layer is
    only valid over its own base, or if the node changes between with and without driver.
    """
    home = state.node_dir(node.name)
    root, made_on = home / "root", home / "image"
    if root.is_mount():
        return False
    # Nodes with and without driver are different machines, so one cannot use the files of the
    # other.
    beginning = f"{image}{_suffix(node)}\n"
    stale = made_on.exists() and made_on.read_text() != beginning
    if stale or not made_on.exists():
        for layer in (home / "upper", home / "work"):
            shutil.rmtree(layer, ignore_errors=True)
        write(made_on, beginning)
    for folder in (home / "upper", home / "work", root):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # the node's own / has the mode of `upper`
    layers = f"lowerdir={image},upperdir={home}/upper,workdir={home}/work"
    run_command.run("mount", "-t", "overlay", f"{state.prefix}-{node.name}", "-o", layers, root)
    return stale


def made_for(home: Path, node: LabNode) -> bool:
    """Return whether the files in `home` were begun with a driver, or without, like the node."""
    return (home / "image").read_text().strip().endswith(_WITHOUT) == (not node.driver)


def _suffix(node: LabNode) -> str:
    return "" if node.driver else _WITHOUT


def unmount(home: Path) -> None:
    """Unmount the root of the node with files in `home`, if it is mounted."""
    while (home / "root").is_mount():
        run_command.run("umount", home / "root")


def furnish(state: LabState, node: LabNode) -> None:
    """
    Write the node's own files to its mounted root, without changing correct ones.

    This also works on a running node.
    """
    root = state.node_dir(node.name) / "root"
    hosts = [f"{other.address} {other.name}\n" for other in state.nodes]
    # A fixed id, so that the journal of earlier boots still belongs to the node.
    machine_id = hashlib.sha256(f"{state.id}/{node.name}".encode()).hexdigest()[:32]
    direct = f'Acquire::http::Proxy::{state.machine} "DIRECT";'  # the mirror needs no proxy

    write(root / "etc/hostname", f"{node.name}\n")
    write(root / "etc/machine-id", f"{machine_id}\n", 0o444)
    write(root / "etc/hosts", "".join(["127.0.0.1 localhost\n", *hosts]))
    write(
        root / "etc/apt/apt.conf.d/90lab", f'Acquire::http::Proxy "{state.proxy_url}";\n{direct}\n'
    )
    write(root / "etc/ssh/sshd_config.d/lab.conf", _SSHD)
    write(root / "root/.ssh/authorized_keys", state.key.with_suffix(".pub").read_text(), 0o600)
    (root / "root/.ssh").chmod(0o700)
    _host_key(state, node, root / "etc/ssh")
    if not node.driver:
        _kernel_archive(state, root)
    (root / SYSCTL).mkdir(parents=True, exist_ok=True)


def _kernel_archive(state: LabState, root: Path) -> None:
    """Add the kernel archive to the node's apt, like its distribution's archive."""
    key = Path("usr/share/keyrings/gpufleet-lab.gpg")
    (root / key).write_bytes((state.dir / "vendor/signing-key.gpg").read_bytes())
    url = f"{state.mirror_url}/{kernels.FOLDER}/"
    source = f"Types: deb\nURIs: {url}\nSuites: /\nSigned-By: /{key}\n"
    write(root / "etc/apt/sources.list.d/lab-kernels.sources", source)


def host_key(state: LabState, node: LabNode) -> str:
    """Return the node's public host key in known_hosts' form: `ssh-ed25519 AAAA...`."""
    public = _kept(state, node).with_suffix(".pub")
    return " ".join(public.read_text().split()[:2])


def new_host_key(state: LabState, node: LabNode) -> None:
    """Create the node's host key if missing; clients trust it before the node's first boot."""
    new_key(_kept(state, node), node.name)


def _kept(state: LabState, node: LabNode) -> Path:
    return state.node_dir(node.name) / "hostkey/ssh_host_ed25519_key"


def _host_key(state: LabState, node: LabNode, folder: Path) -> None:
    kept = _kept(state, node)
    write(folder / kept.name, kept.read_text(), 0o600)
    write(folder / f"{kept.name}.pub", kept.with_suffix(".pub").read_text())


def new_key(path: Path, comment: str) -> None:
    """Create the SSH key `path` and `path`.pub if missing."""
    public = path.with_suffix(".pub")
    if path.exists() and public.exists():
        return
    draft = path.with_name(f"{path.name}-new")
    draft.parent.mkdir(parents=True, exist_ok=True)
    for half in (draft, draft.with_suffix(".pub"), path, public):
        half.unlink(missing_ok=True)  # remains of a killed ssh-keygen
    run_command.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", draft)
    draft.with_suffix(".pub").rename(public)
    draft.rename(path)
