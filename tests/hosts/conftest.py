"""Without root or namespaces, the tests on several hosts are skipped with the reason."""

import pytest
from host_network import missing


@pytest.fixture(autouse=True, scope="session")
def hosts_or_skip():
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
