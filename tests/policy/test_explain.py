"""`ActivationStore.explain`: what each rule covers in a model."""

import pytest
from torch import nn

from actstore import ActivationStore


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.MultiheadAttention(8, 2), nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        return self.mlp(self.attn(x, x, x)[0])


def model():
    return nn.ModuleDict({"embed": nn.Linear(8, 8), "blocks": nn.Sequential(*(Block() for _ in range(4)))})


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        ("int8", ["* : int8  everything"]),
        ("recompute", ["* : recompute  runs again in backward: blocks.0-3; everything else is kept"]),
        (
            "@attention : keep; @blocks : recompute(int8)",
            [
                "blocks.*.attn : keep  does not run again: blocks.0-3.attn",
                "blocks.* : recompute(int8)  runs again in backward: blocks.0-3",
                "* : keep  everything else",
            ],
        ),
        (
            "@blocks[::2] : recompute; @mlp : int8 @ host; embed : raw @ host",
            [
                "blocks.0 : recompute  runs again in backward: blocks.0",
                "blocks.2 : recompute  runs again in backward: blocks.2",
                "blocks.*.mlp : int8 @ host  what is saved in blocks.1.mlp, 3",
                "embed : raw @ host  what is saved in embed",
                "* : keep  everything else",
            ],
        ),
        (
            "blocks/@sdpa : keep; */@aten.gelu : int8; embed/q : keep; embed : recompute; emb* : int8",
            [
                "blocks/@sdpa : keep  results of @sdpa, saved in blocks",
                "*/@aten.gelu : int8  results of @aten.gelu, anywhere",
                "embed/q : keep  tensors tagged q, saved in embed",
                "embed : recompute  runs again in backward: embed",
                "emb* : int8  nothing",
                "* : keep  everything else",
            ],
        ),
    ],
    ids=["one decision", "default", "part", "slice", "tensors"],
)
def test_rules(policy, rows):
    _, *found = ActivationStore(model(), policy).explain().splitlines()
    assert [" ".join(line.split()) for line in found] == [" ".join(row.split()) for row in rows]


def test_what_is_no_rule():
    assert ActivationStore(policy="int8").explain().endswith("* : int8  everything")
    assert "decides after the first steps" in ActivationStore(model(), "auto(1MiB)").explain()
    assert "decides for each tensor" in ActivationStore(model(), lambda site, spec: None).explain()
