"""Recomputation by rule inside of compiled graphs."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from actstore import ActivationStore
from actstore.compiled.backend import GraphBackend
from actstore.errors import ConfigError, StateError
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import WIDTH, AttentionNet, DeepConvolutions, Mlp, compiled, error, gradients, make, plain
from tests.model.test_norms import READERS

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself

SAVED: dict[type[nn.Module], int] = {}  # the bytes that plain compilation saves


def held_bytes(kind: type[nn.Module], policy: str) -> int:
    """What a region saves; the report's saved bytes are those of PyTorch's own partition under each policy."""
    model, x, store = compiled(kind, policy)
    gradients(model, x, store)
    report = store.report()
    assert report.held_bytes <= report.saved_bytes == sum(row.saved for row in report.layers)
    assert report.saved_bytes == SAVED.setdefault(kind, report.saved_bytes)
    return report.held_bytes


@pytest.mark.parametrize("policy", ["blocks.* : recompute", "recompute", "blocks.1 : recompute; * : keep"])
def test_gradients_are_those_of_the_plain_graphs(policy: str) -> None:
    model, x, store = compiled(Mlp, policy)
    for _ in range(2):
        check_same(gradients(model, x, store), plain(Mlp))
        check_drained(store)


class PowerNet(nn.Module):
    """Weights by spectral norm: each forward overwrites the vectors that it starts from."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_buffers_that_forward_overwrites_are_not_read_again(norm) -> None:
    torch.manual_seed(0)
    model, x = PowerNet(norm), torch.randn(8, WIDTH)
    wanted = copy.deepcopy(model)
    store = ActivationStore(model, "blocks.* : recompute", min_bytes=0)
    store.compile(backend="aot_eager")
    for _ in range(3):
        check_same(gradients(model, x, store), gradients(wanted, x))
        check_same(dict(model.named_buffers()), dict(wanted.named_buffers()))
        check_drained(store)


def test_forwards_before_a_backward_change_no_statistics_of_it() -> None:
    """A norm that runs again in backward reads the batch alone, as its backward does."""
    model, x, store = compiled(DeepConvolutions, "layers.* : recompute")
    wanted, _ = make(DeepConvolutions)
    wanted.compile(backend="aot_eager")
    for net, context in ((model, store), (wanted, nullcontext())):
        with context:
            first, second = (net(batch).square().mean() for batch in (x, 2 * x))
        second.backward()
        first.backward()
        del first, second
    check_same(
        {name: p.grad for name, p in model.named_parameters()}, {n: p.grad for n, p in wanted.named_parameters()}
    )
    check_same(dict(model.named_buffers()), dict(wanted.named_buffers()))
    check_drained(store)


class Reading(nn.Module):
    """Reads running statistics beside its norm."""

    def __init__(self, read) -> None:
        super().__init__()
        self.layer, self.norm, self.read = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.read(self.norm, self.layer(x)))


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_running_statistics_that_a_module_reads_are_those_of_forward(read) -> None:
    """Plain training's without a compiler: compiled, it reads the updated ones in some of these models."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reading(read), nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    wanted = copy.deepcopy(model)
    store = ActivationStore(model, "1 : recompute", min_bytes=0)
    store.compile(backend="aot_eager")
    for _ in range(3):
        check_same(gradients(model, x, store), gradients(wanted, x))
        check_same(dict(model.named_buffers()), dict(wanted.named_buffers()))
        check_drained(store)


def test_running_statistics_do_not_keep_a_norm_from_running_again() -> None:
    assert held_bytes(DeepConvolutions, "layers.* : recompute") < 0.5 * held_bytes(DeepConvolutions, "keep")


def test_less_is_saved_and_less_still_of_more_modules() -> None:
    keep = held_bytes(Mlp, "keep")
    one = held_bytes(Mlp, "blocks.1 : recompute; * : keep")
    most = held_bytes(Mlp, "blocks.* : recompute")
    assert most < one < keep
    assert most < 0.4 * keep


def test_a_part_does_not_run_again() -> None:
    part = held_bytes(Mlp, "blocks.*.up : keep; blocks.* : recompute")
    assert held_bytes(Mlp, "blocks.* : recompute") < part < held_bytes(Mlp, "keep")
    model, x, store = compiled(Mlp, "blocks.*.up : keep; blocks.* : recompute")
    check_same(gradients(model, x, store), plain(Mlp))


def test_dropout_draws_the_same_numbers_again() -> None:
    model, x = make(AttentionNet, 0.5)
    store = ActivationStore(nn.Sequential(model), "0 : recompute", min_bytes=0)
    store.compile(backend="aot_eager")
    found = gradients(store.model, x, store)
    wanted, x = make(AttentionNet, 0.5)
    wanted = nn.Sequential(wanted)
    wanted.compile(backend="aot_eager")
    check_same(found, gradients(wanted, x))


@pytest.mark.parametrize(("mode", "own"), [(None, False), ("reduce-overhead", True)])
def test_generators_of_their_own_are_for_cuda_graphs_alone(mode, own, monkeypatch) -> None:
    """On CUDA, PyTorch's partitioner follows this setting: such generators draw other numbers than plain training."""
    found = []

    def watch(self, graph, *arguments):
        found.append(functorch.graphsafe_rng_functionalization)
        return graph

    monkeypatch.setattr(GraphBackend, "_compile", watch)
    gradients(*compiled(Mlp, "recompute", backend="inductor", mode=mode))
    assert found == [own]


def test_inputs_of_regions_may_be_payloads() -> None:
    wanted = plain(Mlp)
    model, x, store = compiled(Mlp, "blocks.* : recompute(int8); * : int8")
    assert 0 < error(gradients(model, x, store), wanted) < 0.02
    assert store.report().held_bytes < 0.2 * held_bytes(Mlp, "keep")


def test_blocks_that_are_compiled_one_by_one() -> None:
    model, x = make(Mlp)
    store = ActivationStore(model, "blocks.1 : recompute; * : keep", min_bytes=0)
    for block in model.blocks:
        store.compile(block, backend="aot_eager")
    found = gradients(model, x, store)
    torch._dynamo.reset()
    other, x = make(Mlp)
    for block in other.blocks:
        block.compile(backend="aot_eager")
    check_same(found, gradients(other, x))
    sites = store.report().sites
    first, second = (
        sum(site.held_bytes for site in sites if site.site.startswith(name)) for name in ("blocks.0", "blocks.1")
    )
    assert second < 0.5 * first


class Recurrent(nn.Module):
    """Overwrites a state that an operator outside of all recomputed modules has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y = nn.functional.gelu(self.first(x) + state)
        state.copy_(y.detach())
        return self.last(y)


@pytest.mark.parametrize("policy", ["first : recompute", "recompute", "first : recompute; * : raw @ disk"])
def test_what_the_graph_overwrites_is_not_read_again_outside_of_recomputed_modules(policy: str) -> None:
    def step(policy: str, *, compiled: bool) -> list[Tensor | None]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x, state = Recurrent(), torch.randn(2 * WIDTH, WIDTH), torch.randn(2 * WIDTH, WIDTH)
        store = ActivationStore(model, policy, min_bytes=0) if policy else None
        if store is not None:
            store.compile(backend="aot_eager")
        elif compiled:
            model.compile(backend="aot_eager")
        for _ in range(2):
            with store or nullcontext():
                loss = model(x, state).square().sum()
            loss.backward()
        return [state, *(weight.grad for weight in model.parameters())]

    wanted = step("", compiled=True)
    check_same(wanted, step("", compiled=False))
    check_same(step(policy, compiled=True), wanted)


def test_the_state_of_a_generator_is_no_payload() -> None:
    def step(policy: str) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout1d(0.5))
        model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), torch.randn(8, WIDTH, WIDTH)
        store = ActivationStore(model, policy, min_bytes=0)
        store.compile()
        return gradients(model, x, store)

    check_same(step("1 : recompute; * : raw @ disk"), step("1 : recompute"))


def test_what_graphs_cannot_recompute_is_refused() -> None:
    model, _ = make(Mlp)
    for decision in ("recompute(segment=2)", "recompute(schedule=sqrt)", "recompute(first=1)"):
        with pytest.raises(ConfigError, match="segment, schedule, first and tiles are not for compiled graphs"):
            ActivationStore(model, f"blocks.* : {decision}").compile(backend="aot_eager")
    store = ActivationStore(model, "blocks.* : recompute", min_bytes=0)
    with store, pytest.raises(StateError, match="Compile it before the first step"):
        store.compile(backend="aot_eager")
