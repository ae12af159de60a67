"""Run an HTTP proxy on the bridge that caches Debian packages, the nodes' only way out.

The proxy is Squid. Of the proxies that were tried with 32 nodes updating at once, only Squid lost
no request. Through the proxy, nodes reach only the hosts of this machine's own Debian archives. So
all other downloads of a node must come from the lab's mirror.
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lab import base_image, run_command
from lab.state import CACHE, PROXY_PORT, LabState, write

_USER = "proxy"  # of Debian's squid package

_CONFIG = """\
http_port {address}:{port}
acl nodes src {subnet}
acl debian dstdomain {hosts}
http_access allow nodes debian
http_access deny all
{parent}
cache_effective_user {user}
# Packages never change under their name; indexes are fetched again when they expire.
refresh_pattern -i \\.deb$ 129600 100% 129600
refresh_pattern . 0 20% 4320
collapsed_forwarding on
maximum_object_size 512 MB
cache_mem 64 MB
cache_dir ufs {cache}/objects 4096 16 64
coredump_dir {cache}
cache_log /dev/null
access_log stdio:{cache}/access.log
logfile_rotate 0
pid_filename none
pinger_enable off
via off
forwarded_for delete
shutdown_lifetime 0 seconds
max_filedescriptors 4096
"""


def configure(state: LabState) -> bool:
    """Write squid's configuration; return whether it changed, so that squid must restart."""
    return write(_config_file(state), _config(state), 0o600)


def prepare(state: LabState) -> None:
    """Create the cache's directories before squid starts; cached files stay."""
    cache = _cache(state)
    cache.mkdir(parents=True, exist_ok=True)
    shutil.chown(cache, _USER, _USER)
    run_command.run(*program(state), "-z")


def program(state: LabState) -> list[str]:
    """Return the command that runs squid in the foreground, with its messages on stderr."""
    # -n sets the name of the shared memory, so that each lab's squid has its own.
    return ["squid", "-N", "-d1", "-n", state.id, "-f", str(_config_file(state))]


def tidy(state: LabState) -> None:
    """Remove the shared memory that a killed squid left."""
    for segment in Path("/dev/shm").glob(f"{state.id}-cf__*.shm"):
        segment.unlink(missing_ok=True)


def _cache(state: LabState) -> Path:
    """Return the lab's cache directory, because two squids cannot share a cache."""
    return CACHE / "squid" / state.id


def _config_file(state: LabState) -> Path:
    return state.dir / "squid.conf"


def _config(state: LabState) -> str:
    return _CONFIG.format(
        address=state.machine,
        port=PROXY_PORT,
        subnet=state.subnet,
        hosts=" ".join(base_image.archive_hosts()),
        parent=_parent(),
        user=pwd.getpwnam(_USER).pw_name,
        cache=_cache(state),
    )


def _parent() -> str:
    """Return squid's lines for this machine's own proxy, or "" if it has none."""
    shell = run_command.run("apt-config", "shell", "PROXY", "Acquire::http::Proxy")
    configured = shell.strip().removeprefix("PROXY=").strip("'\"")
    url = urlsplit(configured or os.environ.get("http_proxy", ""))
    if not url.hostname:
        return ""
    login = f" login={unquote(url.username)}:{unquote(url.password or '')}" if url.username else ""
    return (
        f"cache_peer {url.hostname} parent {url.port or 80} 0 no-query default{login}\n"
        "never_direct allow all"
    )
