"""What testinfra reads of a node: many things of one kind with one command, for tables."""

from __future__ import annotations

from testinfra.host import Host


def owners(node: Host, *paths: str) -> dict[str, str]:
    """Return {path: "user:group mode"}; a path that is not there fails the test."""
    text = node.check_output(f"stat -c '%n %U:%G %a' {' '.join(paths)}")
    return dict(line.split(None, 1) for line in text.splitlines())


def absent(node: Host, *paths: str) -> bool:
    """Tell whether none of these paths is there."""
    return node.run(f"ls -d {' '.join(paths)}").stdout == ""


def services(node: Host, *units: str) -> dict[str, str]:
    """Return {unit: "whether it runs, whether it starts at boot"}, in systemd's words."""
    properties = "--property=Id --property=ActiveState --property=UnitFileState"
    text = node.check_output(f"systemctl show {properties} {' '.join(units)}")
    found = {}
    for block in text.split("\n\n"):
        of = dict(line.split("=", 1) for line in block.splitlines())
        found[of["Id"]] = f"{of['ActiveState']} {of['UnitFileState']}".strip()
    return found


def packages(node: Host, *names: str) -> dict[str, str]:
    """Return {package: its version, with " held" if apt holds it}; one that is not installed fails
    the test."""
    text = node.check_output(
        "dpkg-query -W -f '${Package} ${Version} ${db:Status-Want}\\n' " + " ".join(names)
    )
    rows = (line.split() for line in text.splitlines())
    return {name: f"{version} held" if want == "hold" else version for name, version, want in rows}


def listens(node: Host) -> set[str]:
    """Return the TCP sockets that listen, as "address:port"; "*" is any address."""
    text = node.check_output("ss --listening --tcp --numeric --no-header")
    addresses = {line.split()[3] for line in text.splitlines()}
    return {each.replace("0.0.0.0:", "*:").replace("[::]:", "*:") for each in addresses}


def account(node: Host, name: str) -> str:
    """Return "group home shell" of an account."""
    user = node.user(name)
    return f"{user.group} {user.home} {user.shell}"
