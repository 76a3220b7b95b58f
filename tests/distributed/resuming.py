"""The jobs of ranks that stop and go on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from actstore import ActivationStore, Auto
from actstore.auto import group_store, planner
from actstore.errors import StateError
from tests.distributed.agreeing import Job, of_all
from tests.distributed.training import Model, batch, loss_of

STEPS, STOP = 8, 4


class Run:
    """Training of one rank, with random bits of its own.

    DDP adds the gradients of more than two ranks in another order in its first step than in later ones, also in plain
    training.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.store = ActivationStore(self.model, "int8(round=stochastic)", seed=dist.get_rank(), min_bytes=0)

    def train(self, first: int, last: int) -> list[Tensor]:
        for number in range(first, last):
            with self.store:
                loss = loss_of(self.model(batch(number, dist.get_rank())))
            loss.backward()
            for weight in self.model.parameters():
                dist.all_reduce(weight.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [weight.detach().clone() for weight in self.model.parameters()]

    def parts(self) -> dict[str, object]:
        return {"model": self.model, f"store_{dist.get_rank()}": self.store}


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        yield Path(str(of_all(mine)[0]))
        dist.barrier()


def a_checkpoint_has_the_stores_of_all_ranks() -> None:
    wanted = Run().train(0, STEPS)
    first, again, without = Run(), Run(), Run()
    first.train(0, STOP)
    with shared_folder() as folder:
        dcp.save(first.parts(), checkpoint_id=folder)
        dcp.load(again.parts(), checkpoint_id=folder)
        dcp.load({"model": without.model}, checkpoint_id=folder)
    assert again.store.state_dict() == first.store.state_dict()
    assert again.store.state_dict()["seed"] == dist.get_rank()
    assert all(map(torch.equal, again.train(STOP, STEPS), wanted))
    assert not all(map(torch.equal, without.train(STOP, STEPS), wanted))


def planned() -> Job:
    with steady():
        job = Job()
        job.plan()
        job.step_alike()
    return job


def steady() -> object:
    """No plan is made anew because of times."""
    return mock.patch.object(planner.GroupPlanner, "review", return_value=None)


def steps_of_leader(job: Job) -> object:
    """The steps that the leader has measured."""
    planner = job.store._controller.board._planner
    return of_all(None if planner is None else planner.probes.steps)[0]


def a_group_runs_its_plan_at_once() -> None:
    first = planned()
    state = first.store.state_dict()
    for states in (of_all(state)[dist.get_rank()], of_all(state)[0]):  # each its own, or all that of the leader
        again = Job()
        again.store.load_state_dict(states)
        with steady():
            assert again.step_alike() == str(first.store.policy)
            assert again.store.plan.rows == first.store.plan.rows
            assert steps_of_leader(again) == steps_of_leader(first)
            assert again.store._ledger.budget.limit == first.store._ledger.budget.limit
            for _ in range(20):  # a round of reports
                again.step_alike()
    assert again.store._controller.board._step == first.store._controller.board._step + 21


def a_rank_with_another_state_is_named() -> None:
    state = planned().store.state_dict()
    alone = Job()
    if dist.get_rank() == 0:
        alone.store.load_state_dict(state)
    with pytest.raises(StateError, match=r"rank 1 has loaded no state, and rank 0 plan \w{16} of step \d+\. Load the"):
        alone.step()
    other = Job()
    later = planned()
    later.step_alike()
    other.store.load_state_dict(state if dist.get_rank() == 0 else later.store.state_dict())
    with pytest.raises(StateError, match=r"rank 1 has loaded plan \w{16} of step \d+, and rank 0 plan \w{16} of step"):
        other.step()


def measures_again(job: Job, state: dict[str, object], why: str) -> None:
    with mock.patch("actstore.session.state.log.warning") as warned:
        job.store.load_state_dict(state)
    said = [call.args[2] for call in warned.call_args_list]
    assert [why in one for one in said] == [True] * bool(why), said
    for _ in range(3):
        job.step()
        assert job.store.plan is None


def other_groups_and_budgets_measure_again() -> None:
    first = planned()
    state, world = first.store.state_dict(), dist.get_world_size()
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    single = Job()
    single.store = ActivationStore(single.model, Auto(single.budget, group=alone), min_bytes=0)
    measures_again(single, state, f"the group has 1 ranks, before {world}")
    while single.store.plan is None:
        single.step()
    measures_again(Job(), single.store.state_dict(), f"the group has {world} ranks, before 1")
    fewer = Job(share=0.59 if dist.get_rank() == 0 else 0.6)
    measures_again(fewer, state, "the budget has changed (device" if dist.get_rank() == 0 else "")
    measures_again(Job(), Job().store.state_dict(), "steps were still measured")


def a_restart_finds_no_values_of_the_ranks_before() -> None:
    """torchrun keeps the key-value store where it starts all ranks again."""
    name = "-".join(map(str, range(dist.get_world_size())))
    for attempt, wanted in (("0", None), ("0", 1), ("1", None)):
        with (
            mock.patch.dict("os.environ", {"TORCHELASTIC_RESTART_COUNT": attempt}),
            mock.patch.object(group_store, "_opened", {name: 10**6}),
        ):
            found = group_store.GroupStore(dist.group.WORLD, 1.0)
        dist.barrier()
        assert found.read(f"value/{dist.get_rank()}") == wanted
        found.put(f"value/{dist.get_rank()}", 1)
        dist.barrier()
