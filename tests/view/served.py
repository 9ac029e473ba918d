"""A server of the page that answers in a thread of this process."""

import threading
from contextlib import contextmanager

from single_controller.view.server import ViewServer


@contextmanager
def served_runs(runs):
    with ViewServer(runs) as server:
        threading.Thread(target=server.serve, daemon=True).start()
        yield server
