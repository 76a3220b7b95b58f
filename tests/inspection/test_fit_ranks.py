"""Fits of one of several ranks: shards of FSDP2, and the parts of tensor parallelism."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import fit_step
from actstore.devices import cpu_memory
from actstore.errors import ConfigError
from actstore.inspection.fit.memory import LiveMemory
from actstore.inspection.fit.shards import output_parts

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")

WIDTH, HIDDEN, ROWS = 256, 1024, 512
LAYER = 4 * (2 * WIDTH * HIDDEN + HIDDEN + WIDTH)  # bytes of a block's weights


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, block=Block, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def make_mlp(rows=ROWS):
    model, x = Model(), torch.ones(rows, WIDTH)
    return model, lambda: model(x)


def make_attention():
    def block():
        return nn.TransformerEncoderLayer(WIDTH, 8, HIDDEN, dropout=0.0, batch_first=True)

    model, x = Model(block), torch.ones(8, 64, WIDTH)
    return model, lambda: model(x)


def at_peak(make_step, policy="plain", **options):
    return fit_step(make_step, [policy], **options).rows[-1].at_peak


class LargeUpdate(torch.optim.AdamW):
    def step(self):
        torch.empty(64 << 20)
        super().step()


def test_each_rank_has_whole_rows_of_weights_gradients_and_optimizer():
    found = at_peak(make_mlp, fsdp=4, make_optimizer=LargeUpdate)
    shard = 2 * LAYER // 4 + 4 * 3 * WIDTH  # 3 of the 10 rows of the head
    assert found["weights"] == found["gradients"] == shard
    assert found["optimizer"] == 2 * shard + 9 * 4  # and a counter for each weight
    assert "gathered" not in found


def test_the_first_block_in_backward_is_gathered_beside_the_gradients_of_the_last_one():
    found = at_peak(lambda: make_mlp(8), fsdp=4)
    assert found["gathered"] == 3 * LAYER  # its weights, what the ranks have sent for them, and a reduction's buffer
    assert found["gradients"] == LAYER // 4 + 4 * 3 * WIDTH


def test_a_second_backward_adds_to_the_shards():
    def make_step(backwards):
        model, step = make_mlp(8)

        def run():
            model.zero_grad()
            for _ in range(backwards):
                step().backward()

        return model, run

    one, two = (fit_step(make_step, [], fsdp=4, backwards=count).rows[0] for count in (1, 2))
    new = 4 * (WIDTH * HIDDEN + WIDTH)  # of the last layer, which has its gradients at the peak
    assert two.at_peak["gathered"] == 2 * LAYER + 4 * 3 * 4 * WIDTH  # and the buffer of the head's reduction
    assert two.at_peak["gradients"] == 2 * LAYER // 4 + 4 * 3 * WIDTH + new
    assert one.peak_bytes < two.peak_bytes


def test_recomputation_gathers_no_more():
    assert at_peak(make_mlp, "recompute", fsdp=4)["gathered"] == at_peak(make_mlp, fsdp=4)["gathered"]


@pytest.mark.parametrize("fsdp", [1, 2])
def test_pairs_of_linear_layers_are_split(fsdp):
    found = at_peak(make_mlp, tp=4, fsdp=fsdp, make_optimizer=LargeUpdate)
    part = 2 * 4 * ((2 * WIDTH * HIDDEN + HIDDEN) // 4 + WIDTH) + 4 * 10 * WIDTH  # the second bias is whole
    assert found["weights"] == found["gradients"] == part // fsdp
    assert found["optimizer"] == 2 * part // fsdp + 9 * 4
    assert at_peak(make_mlp, tp=4, fsdp=fsdp, make_optimizer=None)["weights"] == part // fsdp


@pytest.mark.parametrize("tp", [1, 4])
def test_activations_inside_of_a_pair_are_split(tp):
    hidden = 2 * 2 * ROWS * HIDDEN  # before and after GELU, in each block
    assert at_peak(make_mlp, tp=tp)["activations"] == 4 * (2 * ROWS * WIDTH + hidden // tp)


@pytest.mark.parametrize("policy", ["plain", "int8", "raw @ host"])
def test_heads_and_payloads_are_split(policy):
    label = "activations" if policy == "plain" else "payloads"
    one, two, four = (at_peak(make_attention, policy, tp=ranks)[label] for ranks in (1, 2, 4))
    assert one - two == 2 * (two - four) > one // 4
    updated = at_peak(make_attention, policy, tp=4, make_optimizer=LargeUpdate)
    assert updated["gradients"] == updated["weights"]


def test_outputs_of_lists_have_the_parts_of_their_elements():
    memory, tensors = LiveMemory(), [torch.ones(8) for _ in range(4)]
    for each in tensors:
        memory.meet(each)
    memory.split(tensors[2], 2)
    parts = output_parts("aten::_foreach_add", tensors, (2, 2), memory)
    assert [parts(0), parts(1)] == [2, 1]


class Odd(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("block", "ranks", "text"),
    [
        (Block, {"tp": 3}, r"tp=3: must divide both widths of blocks\.0\.up, 1024x256\."),
        (Odd, {"tp": 2}, r"tp=2: blocks\.0 must have pairs of linear layers"),
        (lambda: nn.LayerNorm(WIDTH), {"tp": 2}, "tp=2: the blocks of the model must have linear layers"),
        (Block, {"tp": 0}, "tp=0: must be an int >= 1"),
        (Block, {"fsdp": 2.0}, r"fsdp=2\.0: must be an int >= 1"),
    ],
)
def test_what_ranks_cannot_share_is_refused(block, ranks, text):
    def make_step():
        model, x = Model(block), torch.ones(ROWS, WIDTH)
        return model, lambda: model(x)

    with pytest.raises(ConfigError, match=text):
        fit_step(make_step, [], **ranks)


def test_the_table_says_of_how_many_ranks():
    found = fit_step(make_mlp, [], fsdp=2, memory="1GiB", device="a100-sxm")
    assert str(found).splitlines()[-2:] == [
        "of one rank: weights sharded by fsdp=2, layers split by tp=1",
        "times: none, as copies between ranks are not modelled",
    ]
    assert "times plain" not in str(found)
    assert found.to_dict()["fsdp"] == 2
