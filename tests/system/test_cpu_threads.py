"""Nothing gives a thread another number of CPU threads than plain training gives it."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.base import cpu_threads
from tests.autograd.checks import check_same, train_step
from tests.autograd.models import WIDTH
from tests.autograd.random_training import on_a_thread

OPENMP = 3  # threads of a new thread, until it runs a parallel operator

pytestmark = pytest.mark.skipif(cpu_threads.number is torch.get_num_threads, reason="torch's OpenMP is not found")


def set_number(number):
    """As OpenMP, which torch is not told of."""
    library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    ctypes.CDLL(str(library)).omp_set_num_threads(number)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["keep", "raw", "derive", "zmask", "recompute", "recompute(segment=2)"])
def test_a_new_thread_keeps_the_number_of_openmp(policy):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Tanh()) for _ in range(3)))
    store = ActivationStore(model, f"[0-9] : {policy}", min_bytes=0)
    numbers, losses = [], []

    def forward():
        set_number(OPENMP)
        with store:
            losses.append(model(torch.randn(4, WIDTH)).sum())
        numbers.append(cpu_threads.number())

    def backward():
        set_number(OPENMP)
        losses[0].backward()
        numbers.append(cpu_threads.number())
        numbers.append(torch.get_num_threads())

    on_a_thread(forward)
    on_a_thread(backward)
    assert numbers == [OPENMP, OPENMP, 1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["recompute", "recompute(segment=2)", "recompute(schedule=revolve, slots=1)"])
def test_an_operator_of_a_region_gives_a_new_thread_its_number(policy):
    """BatchNorm does so, and sums in another order with another number of threads."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(4)))

    model, x = build(), torch.randn(64, 16)
    store = ActivationStore(model, f"[0-9] : {policy}", min_bytes=0)
    wanted = train_step(build(), (x,))
    found = []

    def step():
        set_number(OPENMP)
        settled.append(cpu_threads.is_settled())
        found.append(train_step(model, (x,), store))
        settled.append(cpu_threads.is_settled())

    settled = []
    on_a_thread(step)
    check_same(found[0], wanted)
    assert settled == [False, True]


def test_another_number_for_a_while():
    def run():
        cpu_threads.settle()
        set_number(OPENMP)
        with cpu_threads.using(2):
            inside.append((cpu_threads.number(), torch.get_num_threads()))
        inside.append(cpu_threads.number())

    inside, before = [], torch.get_num_threads()
    on_a_thread(run)
    on_a_thread(lambda: inside.append(torch.get_num_threads()))
    assert inside == [(2, 2), OPENMP, before]


@pytest.mark.usefixtures("one_thread")
def test_a_new_thread_has_the_number_of_torch_after_another_one():
    """An operator that ran meanwhile has taken the thread's only occasion to get it."""

    def run():
        set_number(OPENMP)
        with cpu_threads.using(2):
            torch.zeros(2, 64).cumsum(0)
        numbers.append(cpu_threads.number())

    numbers = []
    on_a_thread(run)
    assert numbers == [1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["recompute", "recompute(segment=2)", "recompute(schedule=revolve, slots=1)"])
def test_a_graph_gets_its_backward_on_a_new_thread(policy):
    """The products after the first second run have the number of threads that they have in plain training."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))), torch.randn(256, 64)
    store = ActivationStore(model, f"[0-9] : {policy}", min_bytes=0)
    wanted = train_step(model, (x,))
    with store:
        loss = model(x).square().mean()
    numbers, found = [], []

    def backward():
        set_number(OPENMP)
        found.extend(torch.autograd.grad(loss, [*model.parameters()]))
        numbers.append(cpu_threads.number())

    on_a_thread(backward)
    check_same(found, list(wanted.grads.values()))
    assert numbers == [1]


@pytest.mark.usefixtures("one_thread")
def test_the_number_of_a_thread_does_not_change_once_it_is_settled():
    def run():
        set_number(torch.get_num_threads())
        numbers.append(cpu_threads.is_settled())
        on_a_thread(lambda: torch.set_num_threads(2))
        torch.zeros(2, 64).cumsum(0)
        numbers.append(cpu_threads.number())

    numbers = []
    on_a_thread(run)
    assert numbers == [True, 1]
