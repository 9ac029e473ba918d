"""Measure SampleBuffer: groups per second and the driver's memory. `python -m benchmarks.sample_buffer` (minutes).

A thread generates groups of 8 x 1,024 tokens (int32 ids and float32 log-probs, 64 KiB) into Ray's store and puts their
references into the buffer; the main thread takes batches, reads them, and frees them. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

import numpy as np
import ray

from benchmarks.machine import memory
from workers.rollout.stream.sample_buffer import SampleBuffer

SAMPLES, TOKENS = 8, 1024
STORE_BYTES = 1_000_000_000


def private_mib() -> float:
    """Memory of this process in MiB without what it maps of Ray's store."""
    resident, shared = memory("VmRSS", "RssShmem")
    return (resident - shared) / 2**20


def generate(buffer: SampleBuffer, total: int, store: bool) -> None:
    """Put groups until there are `total` (this thread ends by itself)."""
    for number in range(total):
        while (begun := buffer.begin()) is None:
            time.sleep(0.0005)
        ids = np.full((SAMPLES, TOKENS), number, np.int32)
        payload = (ids, np.zeros((SAMPLES, TOKENS), np.float32))
        version = buffer.version or 0
        buffer.put(
            begun.number, ray.put(payload) if store else None, versions=(version, version), tokens=SAMPLES * TOKENS
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=100, help="groups per batch")
    parser.add_argument("--no-store", action="store_true", help="the buffer alone: payloads are None")
    args = parser.parse_args()
    batches, store = args.groups // args.batch, not args.no_store
    tenth = max(1, batches // 10)
    if store:
        ray.init(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False)
    buffer = SampleBuffer(args.batch, max_staleness=2, order="window", num_batches=batches)
    buffer.set_version(1)
    print("| groups taken | groups/s | driver's memory, MiB | groups in the buffer |\n|---|---|---|---|", flush=True)
    threading.Thread(target=generate, args=(buffer, batches * args.batch, store), name="generator", daemon=True).start()
    cpu = time.process_time()
    began = last = time.monotonic()
    for batch in range(batches):
        for number, reference in buffer.take(timeout=60):
            if store and ray.get(reference)[0][0, 0] != number:
                raise SystemExit(f"group {number} has another group's tokens")
        buffer.set_version(batch + 2)
        if (batch + 1) % tenth == 0:
            now = time.monotonic()
            held = sum(buffer.metrics()[f"buffer/{state}"] for state in ("pending", "in_flight", "ready"))
            done, speed = (batch + 1) * args.batch, tenth * args.batch / (now - last)
            print(f"| {done:,} | {speed:,.0f} | {private_mib():.0f} | {held:.0f} |", flush=True)
            last = now
    taken, seconds = batches * args.batch, time.monotonic() - began
    print(
        f"\n{taken / seconds:,.0f} groups/s, {1e6 * (time.process_time() - cpu) / taken:.0f} us of CPU time per group"
    )
    print(
        f"{taken * SAMPLES * TOKENS * 8 / 1e9:.1f} GB of tokens; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
