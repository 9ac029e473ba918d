"""Registries as they were, whatever a test adds to them."""

import pytest
from plan_helpers import Table, table_functions

from dispatch import batch, modes, register_batch_type


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Give every test copies of the registries, so that nothing it registers outlives it."""
    monkeypatch.setattr(batch, "_user_types", dict(batch._user_types))
    monkeypatch.setattr(modes, "_dispatch_modes", dict(modes._dispatch_modes))
    monkeypatch.setattr(modes.Dispatch, "_members", dict(modes.Dispatch._members))
    monkeypatch.setattr(modes.Execute, "_members", dict(modes.Execute._members))
    register_batch_type(Table, **table_functions())
