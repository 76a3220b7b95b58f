"""Jobs of ranks that plan together. Each compares, step by step, what the ranks run."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from actstore import ActivationStore, Auto
from actstore.auto import planner
from actstore.auto.group import ROUND_STEPS, GroupBoard
from actstore.auto.planner import slowest_sample
from actstore.auto.sample import Sample
from actstore.errors import CapacityError, ConfigError, StateError
from tests.distributed.jobs import build_tp
from tests.distributed.training import WIDTH, Model, batch, different, saved_nbytes, train

SHARE = 0.6  # of what plain autograd saves
MOST = 60  # steps until a plan
SLOW_S = 0.003
PARTS = ("norm", "up", "down")


def last() -> int:
    return dist.get_world_size() - 1


def of_all(value: object) -> list[object]:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def saved_by(model: nn.Module) -> int:
    with (store := ActivationStore(model, "keep", min_bytes=0)):
        model(batch(0))
    return store.report().saved_bytes


class Job:
    """Training of one rank in a group, with gradients of its own."""

    def __init__(
        self, depth: int = 3, share: float = SHARE, wait_s: float = 30.0, make: Callable[[int], nn.Module] = Model
    ) -> None:
        torch.manual_seed(0)
        self.model = make(depth)
        self.budget = int(share * saved_by(self.model))
        self.store = ActivationStore(self.model, Auto(self.budget, group=dist.group.WORLD, wait_s=wait_s), min_bytes=0)

    def step(self, x: Tensor | None = None) -> str:
        """Train one step, and return the policy that it ran."""
        with self.store:
            loss = self.model(batch(0) if x is None else x).square().mean()
        loss.backward()
        return str(self.store.policy)

    def step_alike(self, x: Tensor | None = None) -> str:
        """Train one step, and check that all ranks ran the same."""
        ran = of_all(self.step(x))
        assert len(set(ran)) == 1, ran
        return str(ran[0])

    def plan(self, each: Callable[[int], object] = lambda step: None) -> None:
        """Train until the plan runs, on ranks that wait for each other only where their stores do."""
        ran: list[str] = []
        while self.store.plan is None and len(ran) < MOST:
            each(len(ran))
            ran.append(self.step())
        self.check_alike(ran)
        assert self.store.plan is not None
        assert len(set(map(str, of_all((self.store.plan.text, self.store.plan.profile.to_dict()))))) == 1

    def check_alike(self, ran: list[str]) -> None:
        """Check that all ranks ran the same policies, step by step."""
        assert len(set(map(tuple, of_all(ran)))) == 1, of_all(ran)


class Layer(nn.Module):
    """An MLP with a residual: what a seed costs is the number of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Layer() for _ in range(depth)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def slowed(module: nn.Module, rank: int) -> None:
    """Make the forward of a module slower on one rank."""
    if dist.get_rank() == rank:
        module.register_forward_pre_hook(lambda module, args: sleep(SLOW_S))


@contextmanager
def steps_of_the_group() -> Iterator[list[float]]:
    """The milliseconds of the steps that the leader plans with."""
    found: list[float] = []

    def slowest(samples: Sequence[Sample]) -> Sample:
        found.append(slowest_sample(samples).total)
        return slowest_sample(samples)

    with mock.patch.object(planner, "slowest_sample", slowest):
        yield found


def seeds(first: int, count: int = 10) -> None:
    """Whichever rank is slow, and wherever: the ranks run the same in each step, and what the slowest measured."""
    for seed in range(first, first + count):
        random.seed(seed)
        job = Job(share=random.uniform(0.4, 0.9), make=Layers)
        rank, part, late = random.randrange(dist.get_world_size()), random.choice(PARTS), random.randrange(10)
        for block in job.model.blocks:
            slowed(getattr(block, part), rank)

        def be_late(step: int, late: int = late, rank: int = rank) -> None:
            if step == late and dist.get_rank() != rank:
                sleep(0.1)

        with steps_of_the_group() as steps:
            job.plan(be_late)
        assert bool(steps) == (dist.get_rank() == 0)
        assert all(step > 1000 * SLOW_S * len(job.model.blocks) for step in steps), steps
        plan = job.store.plan
        assert plan is not None
        assert any(row.decision != "keep" for row in plan.rows)
        job.check_alike([job.step() for _ in range(3)])
        assert job.store.report().peak_held_bytes <= job.budget
        job.store.close()


def one_seed() -> None:
    seeds(0, 1)


def tensor_parallel_for(steps: int) -> int:
    """Train as plain training does, within the budget, and return the number of plans.

    Recomputed blocks run collectives again: ranks with other decisions would wait for each other for ever.
    """
    build = partial(build_tp, sequence=True)
    budget = int(0.6 * saved_nbytes(build))
    train(build, None, steps=1)
    wanted, _ = train(build, None, steps=steps)
    with mock.patch.object(GroupBoard, "_run", autospec=True, side_effect=GroupBoard._run) as run:
        found, report = train(build, Auto(budget, group=dist.group.WORLD), steps=steps)
    problems = different(found, wanted, "agreed")
    assert not problems, problems
    assert report.peak_held_bytes <= budget
    return run.call_count


def tensor_parallel_that_measures() -> None:
    tensor_parallel_for(10)


def tensor_parallel_with_a_plan() -> None:
    assert tensor_parallel_for(48) > 0


def ranks_with_other_models_plan_by_themselves() -> None:
    job = Job(depth=2 + dist.get_rank() % 2)
    for _ in range(MOST):
        job.step()
        if all(of_all(job.store.plan is not None)):
            break
    texts = of_all(job.store.plan.text)
    assert len(set(texts)) == 2, texts
    assert texts[::2] == texts[:1] * len(texts[::2])
    job.store.close()


def a_plan_changes_on_all_ranks_at_once() -> None:
    """The last rank's steps grow beyond the budget."""
    job = Job(share=0.8)
    job.plan()
    before = str(job.store.policy)
    x = torch.cat([batch(0), batch(1)[:1]]) if dist.get_rank() == last() else batch(0)
    ran = [job.step_alike(x) for _ in range(2 * ROUND_STEPS + 2)]
    change = 2 * ROUND_STEPS - 1  # the plan's first step came before
    assert set(ran[:change]) == {before}
    assert before not in ran[change:]
    assert all(text == job.store.plan.text for text in of_all(job.store.plan.text))
    if dist.get_rank() == last():
        assert job.store.report().peak_held_bytes <= job.budget
    job.store.close()


def a_plan_stays_where_a_rank_is_late() -> None:
    """The last rank does no further step: the others go on, without a wait, with the plan that they had."""
    job = Job()
    job.plan()
    before = str(job.store.policy)
    x = torch.cat([batch(0), batch(1)])
    if dist.get_rank() != last():
        for _ in range(3 * ROUND_STEPS):
            assert job.step(x) == before
    dist.barrier()
    if dist.get_rank() == last():  # and so does the late one, when it comes
        for _ in range(2 * ROUND_STEPS):
            assert job.step(x) == before
    job.store.close()


def a_rank_that_skips_a_step_is_named() -> None:
    job = Job(wait_s=0.5)
    for step in range(4):
        if step < 3:
            job.step_alike()
        elif dist.get_rank() != last():
            with pytest.raises(StateError, match=rf"step 4: nothing came from rank {last()}, ") as refused:
                job.step()
            assert refused.value.facts == {"ranks": [last()], "step": 4}
    dist.barrier()
    with pytest.raises(StateError, match=f"step 4: nothing came from rank {last()}, "):
        job.step()
    job.store.close()


def the_leader_that_fails_is_named_with_its_error() -> None:
    job = Job(wait_s=0.5)
    job.step_alike()
    if dist.get_rank() == 0:
        hook = job.model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.step()
        hook.remove()
    else:
        job.step()
    dist.barrier()
    if dist.get_rank() != 0:
        with pytest.raises(StateError, match=r"step 3: nothing came from rank 0 \(ZeroDivisionError in step 2\), "):
            job.step()
    job.store.close()
    dist.barrier()


def a_failed_step_is_measured_again() -> None:
    job = Job()

    def fail(step: int) -> None:
        if step == 2 and dist.get_rank() == last():
            hook = job.model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                job.step()
            hook.remove()
        elif step == 2:
            job.step()

    job.plan(fail)
    job.store.close()


def a_budget_that_is_too_small_is_refused_on_all_ranks() -> None:
    job = Job(share=0.05 if dist.get_rank() == last() else 2.0)
    found = None
    for _ in range(MOST):
        try:
            job.step()
        except CapacityError as error:
            found = error
            break
    assert found is not None
    assert len(set(of_all(found.facts["least"]))) == 1
    with pytest.raises(CapacityError):
        job.step()
    job.store.close()


def evaluations_count_for_no_rank() -> None:
    job = Job()

    def evaluate(step: int) -> None:
        if step % 2 and dist.get_rank() == 0:
            with torch.no_grad(), job.store:
                job.model(batch(0))

    job.plan(evaluate)
    job.store.close()


def is_killed(rank: int, folder: str) -> None:
    """One rank of two is killed in a step that measures; the other one writes what it raises."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/rendezvous", 2), rank=rank, world_size=2)
    job = Job(wait_s=0.5)
    job.step_alike()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(2):  # the killed one may have been here
            job.step()
    except StateError as error:
        Path(folder, "raised").write_text(str(error))
    job.store.close()


def a_report_has_all_ranks() -> None:
    """One row for each rank, of its own figures; the last rank's larger steps are nearest to its limit."""
    rank = dist.get_rank()
    model = Model()
    store = ActivationStore(model, "blocks.0 : recompute" if rank == last() else "raw @ disk", min_bytes=0)
    job = Job(share=0.9)
    x = batch(0)[: 2 + 2 * (rank == last())]
    with store:
        loss = model(x).square().mean()
    loss.backward()
    own, found = store.report(), store.job_report()
    figures = of_all((own.saved_bytes, own.held_bytes, own.peak_held_bytes, own.stall_ms))
    assert (found is not None) == (rank == 0)
    if found is not None:
        rows = [(r.saved_bytes, r.held_bytes, r.peak_held_bytes, r.stall_ms) for r in found.ranks]
        assert rows == figures
        assert [r.rank for r in found.ranks] == list(range(last() + 1))
        assert found.nearest is None
        assert not found.agrees
        lines = str(found).splitlines()
        assert lines[1].endswith("* : raw @ disk")
        assert "blocks.0 : recompute" in lines[last() + 1]
        assert lines[-1] == "the ranks run different policies"
    job.plan()
    with job.store:
        loss = job.model(x).square().mean()
    loss.backward()
    found, peaks = job.store.job_report(), of_all(job.store.report().peak_held_bytes)
    if found is not None:
        assert found.agrees
        assert found.nearest is found.ranks[last()]
        assert [r.limit_bytes for r in found.ranks] == [job.budget] * len(peaks)
        assert f"nearest to its limit: rank {last()}, " in str(found)
        assert f"{peaks[last()] / job.budget:.1%}" in str(found)
        counted = sum(int(part.rpartition(" ")[2]) for part in found.ranks[0].decisions.split(", "))
        assert counted == sum(bool(row.unit) for row in job.store.plan.rows)
        assert json.loads(found.to_json())["ranks"][0]["peak_held_bytes"] == peaks[0]
        assert f"{len(peaks)} ranks" in found._repr_html_()
    part = dist.new_group([last()])
    if rank == last():
        alone = store.job_report(part)
        assert alone is not None
        assert [r.rank for r in alone.ranks] == [rank]
    store.close()
    job.store.close()


def a_group_is_checked() -> None:
    with pytest.raises(ConfigError, match="must be a process group"):
        Auto("1GiB", group="world")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exact decisions only"):
        Auto("1GiB", 0.1, group=dist.group.WORLD)
    with pytest.raises(ConfigError, match="a number of seconds"):
        Auto("1GiB", wait_s=0)
    assert str(Auto("1GiB", group=dist.group.WORLD)) == f"auto(1GiB, group of {dist.get_world_size()})"
