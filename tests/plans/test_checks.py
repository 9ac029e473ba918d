"""Checks of options."""

import pytest

from dispatch.checks import check_count, is_count


@pytest.mark.parametrize(("value", "least"), [(1, 1), (0, 0), (7, 2)])
def test_counts(value, least):
    assert is_count(value, least) and check_count("size", value, least) == value


@pytest.mark.parametrize(("value", "least"), [(0, 1), (-1, 0), (True, 1), (1.0, 1), ("1", 1), (None, 0)])
def test_what_is_no_count_is_refused_by_name(value, least):
    assert not is_count(value, least)
    with pytest.raises(ValueError, match=rf"^size={value!r}: expected an integer of at least {least}; 0 is all$"):
        check_count("size", value, least, "; 0 is all")
