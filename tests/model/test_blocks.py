"""The blocks of a model, for the structures that models have."""

import re

import pytest
import torch
from torch import nn
from torch.nn import Linear, ModuleDict, ModuleList, ReLU, Sequential

from actstore import ActivationStore
from actstore.model.blocks import repeated_blocks

WIDTH = 8


class Parts(nn.Module):
    """Module with a layer, and these children."""

    def __init__(self, width=WIDTH, **children):
        super().__init__()
        self.layer = Linear(width, width)
        for name, child in children.items():
            self.add_module(name, child)


class Block(Parts):
    def __init__(self, width=WIDTH, **children):
        super().__init__(width, mlp=Sequential(Linear(width, 2 * width), ReLU(), Linear(2 * width, width)), **children)


class Other(Block): ...


class Tower(Parts): ...


class TextTower(Tower): ...


class Merging(Block): ...


class Pooling(Block): ...


class Rest(Sequential):
    def __init__(self):
        super().__init__(ReLU(), nn.Dropout())


class ConvNorm(Sequential):
    def __init__(self, width=WIDTH):
        super().__init__(nn.Conv1d(width, width, 1), nn.BatchNorm1d(width), ReLU())


class MBConv(Parts):
    def __init__(self, width):
        super().__init__(width, block=Sequential(ConvNorm(width), ConvNorm(width), Pooling(width)))


def blocks(count, kind=Block, width=WIDTH):
    return [kind(width) for _ in range(count)]


def stages(kind, *counts):
    """Return stages of a network for images, each one wider."""
    return [Sequential(*blocks(count, kind, WIDTH << i)) for i, count in enumerate(counts)]


def encoder(count=6):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), count)


def tower(kind=Tower):
    return kind(layers=ModuleList(blocks(3)))


def part_of_unet(kind=Tower):
    return kind(resnets=ModuleList(blocks(2)), attentions=ModuleList(blocks(2, Other)))


def experts():
    return Block(experts=ModuleList(blocks(4, Other)))


def heads():
    return Sequential(nn.LayerNorm(WIDTH), Linear(WIDTH, 4))


LISTS = {
    "model with blocks": (lambda: Parts(blocks=ModuleList(blocks(3)), head=heads()), "blocks.0-2 head.0-1"),
    "Sequential of layers": (lambda: Sequential(Linear(8, 8), ReLU(), Linear(8, 8)), "0 2"),
    "Sequential of blocks": (lambda: Sequential(*blocks(3)), "0-2"),
    "embedding, blocks, head": (lambda: Sequential(nn.Embedding(9, 8), *blocks(3), Linear(8, 9)), "0-4"),
    "blocks of two classes": (lambda: ModuleList([*blocks(2), Other()]), "0-2"),
    "blocks that are Sequentials": (lambda: ModuleList([Sequential(Linear(8, 8), ReLU()) for _ in range(3)]), "0-2"),
    "blocks of two halves": (lambda: ModuleList([Sequential(*blocks(2)) for _ in range(3)]), "0-2"),
    "blocks that are lists": (lambda: ModuleList([ModuleList([Parts(), Other()]) for _ in range(3)]), "0-2"),
    "one block": (lambda: Parts(layers=ModuleList(blocks(1))), "layers.0"),
    "no list": (lambda: Parts(first=Parts(), second=Parts()), "layer first second"),
    "transformer": (lambda: nn.Transformer(8, 2, 3, 2, 16, batch_first=True), "encoder.layers.0-2 decoder.layers.0-1"),
    "experts": (lambda: Parts(layers=ModuleList(experts() for _ in range(3))), "layers.0-2"),
    "one block with experts": (lambda: Parts(layers=ModuleList([experts()])), "layers.0"),
    "one block with experts in a Sequential": (lambda: Sequential(experts()), "0"),
    "blocks, one with experts": (lambda: Sequential(*blocks(2, Other), experts()), "0-2"),
    "blocks of three classes, one with experts": (lambda: ModuleList([Block(), Other(), tower()]), "0-2"),
    "towers": (lambda: ModuleDict({"image": tower(), "text": tower()}), "image.layers.0-2 text.layers.0-2"),
    "towers in a list": (lambda: ModuleList([tower(), tower(TextTower)]), "0-1"),
    "stages of one class": (lambda: Sequential(*(tower() for _ in range(3))), "0-2"),
    "parts of a U-Net": (
        lambda: Parts(down=ModuleList([part_of_unet(), part_of_unet(TextTower)]), middle=part_of_unet()),
        "down.0-1 middle.resnets.0-1 middle.attentions.0-1",
    ),
    "layers side by side": (
        lambda: Sequential(Tower(convs=ModuleList([*blocks(3), Other()])), Linear(8, 8), Linear(8, 8)),
        "0-2",
    ),
}
LISTS_OF_PARTS = {
    "embedding, encoder, head": (lambda: Sequential(nn.Embedding(9, 8), encoder(), Linear(8, 9)), "1.layers.0-5"),
    "layer, encoder, layer": (lambda: Sequential(Linear(8, 8), encoder(), Linear(8, 8)), "1.layers.0-5"),
    "parts without parameters": (lambda: Sequential(Linear(8, 8), Rest(), encoder(), Rest()), "2.layers.0-5"),
    "parts that have parts": (lambda: Sequential(Merging(), tower(), heads()), "1.layers.0-2"),
    "embedding, layers with experts": (
        lambda: Sequential(Linear(8, 8), Tower(layers=ModuleList(experts() for _ in range(3)))),
        "1.layers.0-2",
    ),
    "towers of parts": (
        lambda: Parts(image=Sequential(Merging(), encoder(2)), text=Sequential(nn.Embedding(9, 8), encoder(3))),
        "image.1.layers.0-1 text.1.layers.0-2",
    ),
    "Sequential in a Sequential": (lambda: Sequential(Linear(8, 8), Sequential(*blocks(3)), heads()), "1.0-2"),
    "Sequentials in a Sequential": (
        lambda: Sequential(Linear(8, 8), Sequential(*(Sequential(Linear(8, 8), ReLU()) for _ in range(3)))),
        "1.0-2",
    ),
    "residual network": (lambda: Sequential(ConvNorm(), *stages(Block, 2, 2, 3), heads()), "1.0-1 2.0-1 3.0-2"),
    "stages with layers between them": (
        lambda: Sequential(
            Linear(8, 8), *(each for stage in stages(Block, 2, 2) for each in (stage, Merging())), heads()
        ),
        "1.0-1 2 3.0-1 4",
    ),
    "a stage with one block": (
        lambda: Sequential(ConvNorm(), *stages(MBConv, 1, 2, 2), ConvNorm()),
        "0 1.0 2.0-1 3.0-1 4",
    ),
    "lists in a list": (lambda: ModuleList(map(ModuleList, stages(Block, 1, 3))), "0.0 1.0-2"),
}


def names(text):
    """Return the names behind a text such as ``blocks.0-2 head``."""
    found = []
    for each in text.split():
        span = re.fullmatch(r"(.*?)(\d+)-(\d+)", each)
        found += [f"{span[1]}{i}" for i in range(int(span[2]), int(span[3]) + 1)] if span else [each]
    return found


@pytest.mark.parametrize("structure", [*LISTS, *LISTS_OF_PARTS])
def test_blocks_are_what_the_lists_of_a_model_repeat(structure):
    make, expected = (LISTS | LISTS_OF_PARTS)[structure]
    assert repeated_blocks(make(), callable_only=False) == names(expected)


def test_recompute_of_a_sequential_of_parts_holds_the_inputs_of_its_layers():
    model, x = Sequential(Linear(WIDTH, WIDTH), encoder(), Linear(WIDTH, WIDTH)), torch.ones(4, 64, WIDTH)
    held = {}
    for policy in ("keep", "recompute"):
        store = ActivationStore(model, policy, min_bytes=0)
        with store:
            model(x).sum().backward()
        held[policy] = store.report().peak_held_bytes
    assert held["recompute"] < held["keep"] / 3


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, weight):
        return weight * self.by


def test_parametrizations_of_a_module_are_not_blocks():
    """PyTorch holds them in a ModuleList."""
    for layers in (1, 3):
        parts = {"layers": ModuleList(Linear(WIDTH, WIDTH) for _ in range(layers))} if layers > 1 else {}
        model = Parts(head=Linear(WIDTH, WIDTH), **parts)
        nn.utils.parametrize.register_parametrization(model.head, "weight", Scale())
        assert repeated_blocks(model) == (names("layers.0-2") if parts else ["layer", "head"])
