"""Forwards packets between two network devices, late or not at all. The kernels of small machines lack netem.

python relay.py h2 slow 0.1 0.05  # 0.1 s later, and 5 % are lost; in each direction
"""

import collections
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
LARGEST = 1 << 17


def endpoint(device):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    # With their header, packets keep what the kernel left for the hardware to do: checksums and segmentation.
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    end.bind((device, 0x0003))
    return end


def relay(devices, delay, loss):
    ends = [endpoint(device) for device in devices]
    other = dict(zip(ends, reversed(ends), strict=True))
    due = collections.deque()  # (time, where to, packet); the delay is the same for all, so in order of time
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for end in select.select(ends, [], [], wait)[0]:
            packet = end.recv(LARGEST)
            if random.random() >= loss:
                due.append((time.monotonic() + delay, other[end], packet))
        while due and due[0][0] <= time.monotonic():
            _, end, packet = due.popleft()
            try:
                end.send(packet)
            except OSError:  # the device's queue is full: lost, as on a real network
                continue


if __name__ == "__main__":
    one, another, delay, loss = sys.argv[1:]
    relay([one, another], float(delay), float(loss))
