"""PyTorch's database of operators needs a package for tests; what a sweep of it must find."""

import pytest

from tests.operators.sweep import LENT


@pytest.fixture(scope="session", autouse=True)
def database() -> None:
    pytest.importorskip("expecttest", reason="torch.testing needs it")


@pytest.fixture
def check(record_property):
    """Of a sweep: nothing differs, each store saw so many `calls`, stored something of most, and lent memory."""

    def check(found, *, calls, refused=0, lent=True):
        counts, findings = found
        for policy, count in counts.items():
            record_property(policy, dict(count))
        assert findings == []
        for policy, count in counts.items():
            assert count["equal"] >= calls
            assert count["refused by both"] >= refused
            assert "keep" in policy or count["stored"] >= calls / 2
            assert count["differs from run to run"] <= 2
            assert count["right where plain is wrong"] <= calls / 200
        assert not lent or counts[LENT]["lent"] >= counts[LENT]["stored"] / 2

    return check
