"""Bits of a ReLU whose result the next region stores: they are read from there, or kept where they cannot be."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.recompute.regions import (
    KEPT,
    Inner,
    batch,
    gradients,
    notes,
    of_masks,
)


class Stacked(nn.Module):
    """Blocks of a linear layer and ReLU, with a `change` of what one puts out before the next one takes it."""

    def __init__(self, change=None, inplace=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace)) for _ in range(3))
        self.change = change

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.change is not None:
                x = self.change(x)
        return x


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "fp8", "nf4", "raw, decisions=kept"])
@pytest.mark.parametrize("inplace", [False, True])
def test_bits_are_read_from_the_next_input(inplace, codec):
    model, x = Stacked(inplace=inplace), batch(shape=(64, 32))
    wanted = of_masks(model, gradients(model, x))
    store = ActivationStore(model, f"blocks.* : recompute({codec})", min_bytes=0)
    anew = ActivationStore(model, f"blocks.* : recompute({codec.partition(',')[0]}, decisions=anew)", min_bytes=0)
    with gc_off():
        for _ in range(2):
            check_same(of_masks(model, gradients(model, x, store)), wanted)
            check_drained(store)
            gradients(model, x, anew)
    assert store.report().held_bytes - anew.report().held_bytes == x.numel() // 8  # of the last block
    assert [note.rpartition(" keep ")[2] for note in notes(store)] == [
        "0 bytes, and one is read from the next input",
        "0 bytes, and one is read from the next input",
        f"{x.numel() // 8} bytes",
    ]


CHANGES = {
    "in place": lambda x: x.add_(1),
    "in place of a view": lambda x: x.view(-1).add_(1).view_as(x),
    "another tensor": lambda x: x + 1,
    "a view": lambda x: x.flip(0),
    "a slice": lambda x: x[:32],
}


@pytest.mark.parametrize("inputs", [KEPT, "raw, decisions=kept"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_bits_are_not_read_from_an_input_that_is_something_else(name, inside, inputs):
    change = CHANGES[name]
    if inside and name.startswith("in place"):
        model = Stacked()  # ReLU's own result, which it saves, must not change
        for block in model.blocks:
            block.append(Inner(lambda m, x: change(x.clone())))
    else:
        model = Stacked(change)
    x = batch(shape=(64, 32))
    if name.startswith("in place") and not inside:
        store = ActivationStore(model, f"blocks.* : recompute({inputs})", min_bytes=0, allow_mutation=True)
        wanted = of_masks(model, gradients(Stacked(lambda x: x + 1), x))
    else:
        store = ActivationStore(model, f"blocks.* : recompute({inputs})", min_bytes=0)
        wanted = of_masks(model, gradients(model, x))
    check_same(of_masks(model, gradients(model, x, store)), wanted)
    assert not any("next input" in note for note in notes(store))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_bits_are_read_whatever_backward_comes_first(first):
    model, x = Stacked(), batch(shape=(64, 32)).requires_grad_()
    outputs, found = [], []
    for store in (None, ActivationStore(model, f"blocks.* : recompute({KEPT})", min_bytes=0)):
        with store or gc_off():
            made = [x]
            for block in model.blocks:
                made.append(block(made[-1]))
        outputs.append(made[1:])
    with gc_off():
        for made in outputs:
            grads = [torch.autograd.grad(made[first].sum(), x, retain_graph=True)[0]]
            grads += [torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in made]
            found.append(grads)
        check_same(found[1], found[0])
        del made, outputs
        check_drained(store)


def test_bits_outlive_a_later_block_that_is_dropped():
    model, x = Stacked(), batch(shape=(64, 32)).requires_grad_()
    (wanted,) = torch.autograd.grad(model.blocks[0](x).sum(), x)
    store = ActivationStore(model, f"blocks.* : recompute({KEPT})", min_bytes=0)
    with gc_off():
        with store:
            y = model.blocks[0](x)
            model.blocks[1](y)
        check_same(torch.autograd.grad(y.sum(), x), [wanted])
        del y
        check_drained(store)
