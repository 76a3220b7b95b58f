"""Each test compiles anew. What the compiler warns of about itself is no failure."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
