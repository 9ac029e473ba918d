"""Data-parallel ranks as threads, which gather values from each other."""

import threading
from concurrent.futures import ThreadPoolExecutor


def on_ranks(of_rank, parts):
    """What ``of_rank(part, rank, gather)`` returns on each rank. ``gather(value)`` returns those of all ranks."""
    both, slots = threading.Barrier(len(parts), timeout=30), [None] * len(parts)

    def run(rank):
        def gather(value):
            slots[rank] = value
            both.wait()
            said = list(slots)
            both.wait()
            return said

        return of_rank(parts[rank], rank, gather)

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, range(len(parts))))
