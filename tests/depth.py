"""How deep property tests go: a few examples at up to 512 ranks in `make test`, many at up to 4,096 in `make test-all`.

Property tests that say no number draw 40 and 100 (conftest.py). Examples given with `@example` run at either depth.
"""

from hypothesis import HealthCheck, settings

full = False
"""Whether pytest runs with ``--full``. conftest.py sets it before any test is imported."""


def examples(few, many):
    """Settings for a property test: ``few`` examples, or ``many`` at full depth."""
    return settings(max_examples=many if full else few, suppress_health_check=[HealthCheck.too_slow])


def most_ranks():
    """The largest world size to draw."""
    return 4096 if full else 512
