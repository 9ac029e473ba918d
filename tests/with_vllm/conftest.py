import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def temporary_files():
    """A folder for those of one process of pytest-xdist, where tests look for what engines have left."""
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
