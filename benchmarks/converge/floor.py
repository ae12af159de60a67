"""The least that any way costs: a connection to every node at once, and `true`.

    python -m benchmarks.converge.floor KEY KNOWN_HOSTS ADDRESS...

With paramiko over gevent as pyinfra has it, Nagle's algorithm off, the nodes' keys verified. It is
a process like the others, its imports included.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import socket  # noqa: E402
import sys  # noqa: E402

import gevent  # noqa: E402
import paramiko  # noqa: E402

SECONDS = 60


def true(key: paramiko.PKey, known: str, address: str) -> None:
    """Connect to a node and have it run `true`; raises when it does not."""
    client = paramiko.SSHClient()
    client.load_host_keys(known)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    connection = socket.create_connection((address, 22), timeout=SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client:
        client.connect(
            address,
            username="root",
            pkey=key,
            sock=connection,
            allow_agent=False,
            look_for_keys=False,
            timeout=SECONDS,
        )
        _, output, _ = client.exec_command("true", timeout=SECONDS)
        if output.channel.recv_exit_status():
            raise RuntimeError(f"{address} does not run true")


def main() -> None:
    """Ask all nodes at once."""
    path, known, *addresses = sys.argv[1:]
    key = paramiko.Ed25519Key.from_private_key_file(path)
    asked = [gevent.spawn(true, key, known, address) for address in addresses]
    gevent.joinall(asked, raise_error=True)


if __name__ == "__main__":
    main()
