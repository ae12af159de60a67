"""
Carry frames between a node's cable and a tap on the lab's bridge, with a delay.

    python3 -I link_delay.py PORT TAP MILLISECONDS

This is for kernels without the netem queue. While the program runs, the port is not on the bridge.
Both sides use virtio-net headers, so that frames above the MTU and unfinished checksums pass
unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

# linux/if_tun.h
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# linux/if_packet.h, linux/if_ether.h
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 0x0003
FRAME_BYTES = 1 << 17


def main(port: str, tap: str, milliseconds: str) -> None:
    """Carry frames until killed."""
    late = float(milliseconds) / 1000
    ends = (_port(port), _tap(tap))
    # all frames have the same delay: first in, first out
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], pause)[0]:
            other = ends[1] if end == ends[0] else ends[0]
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(end, FRAME_BYTES)
                    waiting.append((time.monotonic() + late, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            # if the queue is full or the cable is out, the frame is lost
            with contextlib.suppress(OSError):
                os.write(end, frame)


def _port(name: str) -> int:
    carrier = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    carrier.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    carrier.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    carrier.bind((name, ETH_P_ALL))
    carrier.setblocking(False)
    return carrier.detach()


def _tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), flags))
    return end


if __name__ == "__main__":
    main(*sys.argv[1:])
