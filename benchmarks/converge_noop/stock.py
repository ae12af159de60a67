"""The same state through pyinfra's own operations, one a value as its users write them."""

from io import StringIO

from pyinfra.operations import apt, files, server, systemd

from benchmarks.converge_noop import wanted

apt.packages(name="packages", packages=list(wanted.PACKAGES))
server.group(name="group", group=wanted.GROUP, system=True)
server.user(
    name="user",
    user=wanted.USER,
    group=wanted.GROUP,
    home="/srv/bench",
    shell="/usr/sbin/nologin",
    system=True,
    create_home=False,
    ensure_home=False,
)
for path in wanted.DIRECTORIES:
    files.directory(name=f"directory {path}", path=path, mode="755", user="root", group="root")
for path, content in wanted.FILES.items():
    files.put(
        name=f"file {path}",
        src=StringIO(content),
        dest=path,
        mode="644",
        user="root",
        group="root",
    )
for name in wanted.UNITS:
    systemd.service(name=f"unit {name}", service=name, running=True)
