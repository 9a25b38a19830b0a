"""No order of joins, appends, lost answers and lost hosts loses an entry, and removing any rule
does lose one."""

from dataclasses import fields

import pytest

from tests.hosts.model import Rules, explore


def test_no_order_loses_an_acknowledged_entry() -> None:
    assert not explore(Rules(), range(4000))


@pytest.mark.soak
def test_no_order_of_more_hosts_and_jobs_loses_an_acknowledged_entry() -> None:
    assert not explore(Rules(), range(200_000))
    assert not explore(Rules(), range(100_000), hosts=5, jobs=7)


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_without_any_rule_an_entry_is_lost(rule: str) -> None:
    assert explore(Rules(**{rule: False}), range(30_000))
