"""The sweep over models of other projects: that it finds what differs, and some models of each kind."""

import pytest

from tests.models import sweep
from tests.models.architectures import architectures

SOME = (  # the others: make test-models
    "Gemma3nForCausalLM", "DeepseekV3ForCausalLM", "JambaForCausalLM", "ModernBertForMaskedLM",
    "ConvNextForImageClassification", "T5ForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("each", [each for each in architectures() if each.name in SOME], ids=lambda each: each.name)
def test_models_of_transformers(each):
    found = sweep.tried(each)
    for dtype in sweep.DTYPES:
        wrong = {policy: what for policy, what in found[dtype].items() if isinstance(what, str)}
        assert not {policy: what for policy, what in wrong.items() if "'@attention' finds nothing" not in what}


def test_a_difference_is_found(monkeypatch):
    each = next(each for each in architectures() if each.name == "LlamaForCausalLM")
    monkeypatch.setattr(sweep, "EXACT", ("int8",))
    monkeypatch.setattr(sweep, "LOSSY", ())
    assert sweep.tried(each)["float32"]["int8"].startswith("DIFFERS")
