"""Slices of a data set: what autograd saves of memory that the program keeps anyway."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto
from actstore.inspection import inspect_step
from tests.autograd.checks import check_drained

ROWS, WIDTH = 40, 256
NBYTES = 4 * ROWS * WIDTH


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def report_of(batch, policy, loss=lambda y: y.sum()):
    store = ActivationStore(model(), policy, min_bytes=0)
    with store:
        y = loss(store.model(batch))
    report = store.report()
    del y
    check_drained(store)
    return report


@pytest.fixture(params=[100, 12])  # a store accounts for kept storages below 1 MiB in groups
def data(request):
    return torch.randn(request.param * ROWS, WIDTH)


@pytest.mark.parametrize("policy", ["keep", "raw", "int8", "raw @ disk", "recompute", "derive"])
def test_a_slice_counts_as_its_copy_does(data, policy):
    found, wanted = (report_of(batch, policy) for batch in (data[ROWS : 2 * ROWS], data[ROWS : 2 * ROWS].clone()))
    assert found.saved_bytes == wanted.saved_bytes
    assert (found.held_bytes, found.peak_held_bytes) == (wanted.held_bytes, wanted.peak_held_bytes)


@pytest.mark.parametrize("policy", ["keep", "raw"])
@pytest.mark.parametrize(
    ("slices", "rows"),
    [([(0, 40), (0, 40)], 40), ([(0, 40), (20, 60)], 60), ([(40, 80), (0, 40)], 80), ([(0, 80), (20, 60)], 80)],
)
def test_overlapping_slices_count_once(data, policy, slices, rows):
    class Each(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(()))

        def forward(self, *batches):
            return sum((batch * self.weight).sum() for batch in batches)

    store = ActivationStore(Each(), policy, min_bytes=0)
    with store:
        y = store.model(*(data[start:stop] for start, stop in slices))
    report = store.report()
    assert report.saved_bytes == 4 * WIDTH * rows
    assert report.held_bytes == report.saved_bytes if policy == "keep" else report.held_bytes >= report.saved_bytes
    del y
    check_drained(store)


def test_all_of_a_storage_behind_a_part_counts_the_rest(data):
    weight = nn.Parameter(torch.rand(()))
    store = ActivationStore(None, "keep", min_bytes=0)
    with store:
        y = (data[:ROWS] * weight).sum() + (data * weight).sum() + (data[ROWS:] * weight).sum()
    assert store.report().saved_bytes == store.report().held_bytes == data.nbytes
    del y
    check_drained(store)


def test_all_of_a_storage_behind_a_part_of_another_call_counts_the_rest(data):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(()))

        def forward(self, *batches):
            return sum((batch * self.weight).sum() for batch in batches)

    part, rest, whole = net = nn.Sequential(Scaled(), Scaled(), Scaled())
    store = ActivationStore(net, "keep", min_bytes=0)
    with store:
        y = part(data[:ROWS]) + rest(data, data[ROWS:]) + whole(data)
    report = store.report()
    assert report.saved_bytes == report.held_bytes == data.nbytes
    assert sorted(row.saved for row in report.modules) == [NBYTES, data.nbytes - NBYTES]
    del y
    check_drained(store)


def test_views_of_activations_hold_their_storage():
    """Autograd alone holds it."""

    class Cut(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, :8] ** 2

    store = ActivationStore(Cut(WIDTH, 10 * WIDTH), "keep", min_bytes=0)
    batch = torch.randn(ROWS, WIDTH)
    with store:
        y = store.model(batch)
    assert store.report().saved_bytes == batch.nbytes + 10 * NBYTES
    del y


def test_a_plan_for_a_slice_is_that_for_its_copy(data):
    store = ActivationStore(model(), Auto(4 * NBYTES), min_bytes=0)
    for step in range(12):
        with store:
            loss = store.model(data[step * ROWS : (step + 1) * ROWS]).square().mean()
        loss.backward()
    assert store.report().peak_held_bytes <= 4 * NBYTES


def test_an_inspection_counts_the_slice(data):
    net = model()
    store = ActivationStore(net, "keep")

    def step(store):
        with store:
            loss = net(data[:ROWS]).sum()
        loss.backward()

    found = inspect_step(step, store)
    assert found.saved_bytes == 2 * NBYTES  # the batch, and what tanh returns


@pytest.mark.parametrize("rows", [64, 4096])
def test_tokens_and_those_that_follow_are_inspected(rows):
    """Two slices of one storage, which overlap; a report counts all of a small one."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 2)

        def forward(self, tokens):
            return (self.embed(tokens[:, :-1]) * self.embed(tokens[:, 1:])).sum()

    net, tokens = Both(), torch.randint(9, (rows, 65))
    store = ActivationStore(net, "keep")

    def step(store):
        with store:
            loss = net(tokens)
        loss.backward()

    assert inspect_step(step, store).saved_bytes == tokens.nbytes + 2 * 2 * 4 * rows * 64
