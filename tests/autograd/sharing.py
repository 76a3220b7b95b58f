"""Stores of which several saves share one payload, and how often they compare bytes."""

from contextlib import contextmanager

import pytest

from actstore import ActivationStore
from actstore.autograd import encoder


def store_of(policy, **options):
    return ActivationStore(policy=policy, min_bytes=0, **options)


def square(x):
    return (x * x).sum()


def stored_bytes(store):
    return store.report().stored_bytes


@contextmanager
def comparisons():
    """How often bytes are compared meanwhile."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        compare = encoder.compare
        patch.setattr(encoder, "compare", lambda *args: calls.append(1) or compare(*args))
        yield calls
