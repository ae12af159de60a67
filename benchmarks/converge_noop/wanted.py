"""What both ways converge: a service's worth of state, 33 values."""

from __future__ import annotations

PACKAGES = ("ca-certificates", "curl", "openssh-server", "procps")
GROUP = "bench"
USER = "bench"
DIRECTORIES = tuple(f"/srv/bench/{name}" for name in ("a", "b", "c", "d", "e"))
FILES = {f"/srv/bench/a/{number}.conf": f"value = {number}\n" * 20 for number in range(20)}
UNITS = ("ssh.service", "dbus.service")
