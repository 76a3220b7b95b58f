"""An LSTM cell over long sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads import text
from actstore.bench.workloads.job import Job, Kind
from actstore.bench.workloads.text import Batches, vocabulary
from actstore.bench.workloads.workload import Workload

MIN_BYTES = 4096  # the tensors of one step are small, and many


class Cell(nn.Module):
    """A step of all layers: ``cell(x, *state)`` returns the new state, h and c of each layer."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(work.width, work.width) for _ in range(work.layers))

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        out: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, c = layer(x, state[2 * number : 2 * number + 2])
            out += [x, c]
        return tuple(out)


class LSTM(nn.Module):
    """An LSTM: ``model(x, y)`` is the mean cross entropy of predicting the characters `y` after `x`."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(vocabulary()), work.width)
        self.cell = Cell(work)
        self.head = nn.Linear(work.width, len(vocabulary()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        e = self.characters(x)
        state = (e.new_zeros(e.shape[0], e.shape[2]),) * (2 * len(self.cell.layers))
        outputs = []
        for step in e.unbind(1):
            state = self.cell(step, *state)
            outputs.append(state[-2])
        logits = self.head(torch.stack(outputs, 1)).float()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make(work: Workload) -> Job:
    model = LSTM(work).to(work.device)
    return Job(work, model, [model.cell], Batches(work), min_bytes=MIN_BYTES, chain=False)


KIND = Kind(
    title="an LSTM cell over long sequences of English text",
    default=Workload("lstm", layers=1, width=256, heads=1, context=256, batch=32),
    uses=("layers", "width", "context", "batch"),
    make=make,
    check=text.check,
    policies=("cell : recompute(schedule=sqrt)", "cell : recompute(schedule=revolve, slots=10)"),
)
