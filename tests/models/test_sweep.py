"""The sweep over models of Transformers: that it finds what differs, and some models of each kind."""

import pytest

from tests.models import sweep
from tests.models.architectures import architectures

SOME = ("Gemma3n", "DeepseekV3", "Jamba", "ModernBert", "ConvNext", "T5")  # the others: make test-models


@pytest.mark.parametrize("each", [each for each in architectures() if each.name in SOME], ids=lambda each: each.name)
def test_models_of_transformers(each):
    found = sweep.tried(each)
    assert all("equal" in found[policy] or "@attention' finds nothing" in found[policy] for policy in sweep.EXACT)


def test_a_difference_is_found(monkeypatch):
    each = next(each for each in architectures() if each.name == "Llama")
    monkeypatch.setattr(sweep, "EXACT", ("int8",))
    monkeypatch.setattr(sweep, "LOSSY", ())
    assert sweep.tried(each)["int8"] == "DIFFERS"
