"""Restores the registries after each test."""

import pytest
from plan_helpers import Table, table_functions

from dispatch import batch, modes, register_batch_type


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Start every test with only the built-in modes, and remove afterwards what it registered."""
    monkeypatch.setattr(batch, "_user_types", dict(batch._user_types))
    monkeypatch.setattr(modes, "_absent", {})
    built_in = {name: modes.Dispatch[name] for name in modes._BUILT_IN}
    for name, mode in modes._BUILT_IN.items():
        monkeypatch.setattr(built_in[name], "mode", mode)
    monkeypatch.setattr(modes.Dispatch, "_members", built_in)
    register_batch_type(Table, **table_functions())
