"""Scalars on their way to the host: none is lost."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from actstore.accuracy.influence.scalars import Scalars
from tests.system.interrupts import Moments, in_package

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_interrupt_at_each_moment_on_the_way_to_the_host():
    def send(at: int | None) -> int:
        scalars = Scalars()
        numbers = [scalars.put(torch.tensor(float(i))) for i in range(3)]
        with suppress(KeyboardInterrupt), Moments(in_package, at) as moments:
            scalars.send()
        numbers.append(scalars.put(torch.tensor(3.0)))
        assert scalars.read() == {number: float(i) for i, number in enumerate(numbers)}
        assert scalars.ready()
        return moments.count

    count = send(None)
    assert count > 10
    for at in range(1, count + 1):
        send(at)
