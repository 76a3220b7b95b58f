"""Orders of backward, and loops that take the memory of what they are the last to read."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from actstore.compiled.arrange import arrange, write_in_place
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionStep


def product(*inputs: int, index: int, nbytes: int = 100) -> Operator:
    return Operator(inputs, index, nbytes, 1.0, late=True, layout=nbytes)


def loop(*inputs: int, index: int, nbytes: int = 100) -> Operator:
    return Operator(inputs, index, nbytes, fused=True, inlined=True, late=True, layout=nbytes)


def given(index: int, nbytes: int = 0, *, late: bool = False) -> Operator:
    return Operator((), index, nbytes, given=True, late=late)


def step_of(*operators: Operator, gradients: tuple[int, ...], ordered: bool = True) -> RegionStep:
    return RegionStep(operators, (), gradients, ordered)


def mlp() -> list[Operator]:
    """A weight, a product, its activation, a gradient, and gradients of activation, weight, product and weight."""
    return [
        given(0),
        Operator((0,), 1, 100, 1.0, layout=100),
        Operator((1,), 2, 100, 1.0, layout=100),
        given(3, 10, late=True),
        product(0, 3, index=4),
        product(2, 3, index=5, nbytes=10),
        loop(1, 4, index=6),
        product(3, 6, index=7, nbytes=10),
    ]


def test_a_product_waits_for_its_reader_where_its_inputs_exist_anyway() -> None:
    found = step_of(*mlp(), gradients=(5, 7)).evaluate(frozenset())
    assert found.backward == (1, 2, 5, 4, 6, 7)
    assert found.peak == 220
    assert step_of(*mlp(), gradients=(5, 7), ordered=False).evaluate(frozenset()).peak == 320


def test_a_product_does_not_wait_where_that_would_hold_its_inputs() -> None:
    operators = [*mlp()[:7], product(6, index=7, nbytes=10)]
    found = step_of(*operators, gradients=(5, 7)).evaluate(frozenset())
    assert found.backward[0] == 4, "the gradient that it reads would stay"


def gate() -> list[Operator]:
    """Two products, and what reads both; the gradients of each, which read one gradient and the other product."""
    return [
        given(0),
        Operator((0,), 1, 100, 1.0, layout=100),
        Operator((0,), 2, 100, 1.0, layout=100),
        given(3, 10, late=True),
        product(1, 2, 3, index=4, nbytes=10),
        product(3, index=5),
        loop(1, 5, index=6),
        product(6, index=7, nbytes=10),
        loop(1, 2, 5, index=8),
        product(8, index=9, nbytes=10),
    ]


def test_what_frees_an_input_runs_first() -> None:
    found = step_of(*gate(), gradients=(4, 7, 9)).evaluate(frozenset())
    assert found.backward == (1, 2, 4, 5, 8, 6, 7, 9)
    assert found.peak == 320, "the loops write over what they are the last to read"
    assert step_of(*gate(), gradients=(4, 7, 9), ordered=False).evaluate(frozenset()).peak == 420


@pytest.mark.parametrize(
    ("changed", "peak"),
    [
        ({}, 200),
        ({5: {"layout": None}}, 300),
        ({2: {"layout": 50}, 4: {"layout": 50}}, 300),
        ({5: {"inlined": False}}, 300),
    ],
)
def test_a_loop_takes_the_memory_of_an_equal_tensor(changed: dict[int, dict[str, object]], peak: int) -> None:
    operators = [
        given(0),
        given(1),
        Operator((1,), 2, 100, late=True, layout=100),
        given(3, late=True),
        product(0, 3, index=4),
        loop(2, 4, index=5),
        product(5, index=6, nbytes=10),
    ]
    for index, fields in changed.items():
        operators[index] = replace(operators[index], **fields)  # type: ignore[arg-type]
    assert step_of(*operators, gradients=(6,)).evaluate(frozenset()).peak == peak


def test_a_loop_takes_no_memory_that_stays() -> None:
    operators = [given(0, late=True), product(0, index=1), loop(1, index=2), product(2, index=3, nbytes=10)]
    assert step_of(*operators, gradients=(3,)).evaluate(frozenset()).peak == 110
    assert step_of(*operators, gradients=(1, 3)).evaluate(frozenset()).peak == 210


def test_a_loop_takes_no_memory_that_another_loop_may_read_at_its_side() -> None:
    """The compiler may run the sum and the loop as one."""
    total = replace(loop(1, index=2, nbytes=10), inlined=False)
    operators = [given(0, late=True), product(0, index=1), total, loop(1, index=3), product(3, index=4, nbytes=10)]
    assert step_of(*operators, gradients=(2, 4)).evaluate(frozenset()).peak == 210


def test_a_loop_takes_no_memory_that_a_loop_before_it_reads_for_it() -> None:
    """The compiler may run both as one."""
    operators = [given(0, late=True), product(0, index=1), loop(1, index=2), loop(1, 2, index=3)]
    operators += [product(3, index=4, nbytes=10), product(2, index=5, nbytes=10)]
    assert step_of(*operators, gradients=(4, 5)).evaluate(frozenset()).peak == 300


def test_a_saved_tensor_is_not_written_over() -> None:
    operators = [given(0), Operator((0,), 1, 100, 1.0, layout=100), given(2, late=True), loop(1, 2, index=3)]
    operators.append(product(3, index=4, nbytes=10))
    assert step_of(*operators, gradients=(4,)).evaluate(frozenset({1})).peak == 200
    assert step_of(*operators, gradients=(4,)).evaluate(frozenset()).peak == 110


def test_results_of_one_operator_are_taken_out_at_once() -> None:
    """Until the last one is taken out, the operator holds all of them."""
    operators = [
        given(0),
        Operator((0,), 1, ms=1.0, view=True),
        Operator((1,), 2, 100),
        Operator((1,), 3, 10),
        given(4, late=True),
        product(2, 4, index=5, nbytes=10),
        product(3, 5, index=6, nbytes=10),
    ]
    assert step_of(*operators, gradients=(6,), ordered=False).evaluate(frozenset()).backward == (1, 2, 5, 3, 6)
    assert step_of(*operators, gradients=(6,)).evaluate(frozenset()).backward == (1, 2, 3, 5, 6)


def test_what_writes_nothing_runs_right_before_it_is_read() -> None:
    """A compiler may write it after all."""
    operators = [
        given(0),
        Operator((0,), 1, 100, fused=True, inlined=True, layout=100),
        given(2, 10, late=True),
        product(0, 2, index=3),
        loop(1, 3, index=4),
    ]
    assert step_of(*operators, gradients=(4,)).evaluate(frozenset()).backward == (3, 1, 4)


def random_operators(random: Random) -> tuple[list[Operator], tuple[int, ...]]:
    """Products, loops and views of forward, and of backward products and loops that read these."""
    operators, gradients = [given(0)], []
    for late in (False, True):
        if late:
            operators.append(given(len(operators), 100, late=True))
        first = len(operators) - late
        for _ in range(8):
            index = len(operators)
            inputs = tuple({random.randrange(first if late and random.random() < 0.6 else 0, index) for _ in range(2)})
            if late and not any(operators[each].late for each in inputs):
                inputs = (*inputs, first)
            kind = random.choice(["product", "loop", "view"])
            nbytes = random.choice([10, 100])
            if kind == "view":
                source = operators[inputs[-1]]
                operators.append(replace(source, inputs=inputs[-1:], nbytes=0, view=True, given=False, late=late))
                operators[-1] = replace(operators[-1], fused=False, inlined=False, ms=0.0)
                continue
            make = loop if kind == "loop" else product
            operators.append(replace(make(*inputs, index=index, nbytes=nbytes), late=late))
            if late and random.random() < 0.4:
                gradients.append(index)
    return operators, (*gradients, max(each.owner for each in operators))


def test_no_order_needs_more_bytes_and_each_is_behind_what_it_reads() -> None:
    lower = 0
    for seed in range(200):
        operators, gradients = random_operators(Random(seed))
        before = step_of(*operators, gradients=gradients, ordered=False).evaluate(frozenset())
        found = step_of(*operators, gradients=gradients).evaluate(frozenset())
        assert sorted(found.backward) == sorted(before.backward), seed
        assert found.peak <= before.peak, seed
        places = {index: place for place, index in enumerate(found.backward)}
        for index, place in places.items():
            assert all(places.get(source, -1) < place for source in operators[index].inputs), seed
        lower += before.peak > found.peak and before.backward != found.backward
    assert lower > 10


def test_nodes_are_arranged_behind_what_they_read() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp(), (y.cos() * y).neg()

    module = make_fx(function)(torch.ones(2), torch.ones(2))
    arrange(module.graph, ["neg", "exp", "sin"])  # the other names are unknown
    module.graph.lint()
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["cos", "mul", "neg", "sin", "exp"]


def gated(gradient: Tensor, gate: Tensor, up: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    of_gate, of_up = gradient * up, gradient * gate
    return of_up @ one, of_gate @ two


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which Inductor imports
@pytest.mark.parametrize("in_place", [False, True])
def test_inductor_writes_a_result_of_a_loop_at_its_place(in_place: bool) -> None:
    """If it does not, a product comes before the second loop, whose inputs exist so long."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    tensors = [torch.randn(64, 64) for _ in range(5)]
    graph = make_fx(gated)(*tensors)
    names = [node.name for node in graph.graph.nodes if node.name.startswith("mul")]
    if in_place:
        write_in_place(graph.graph, names, 64 * 64 * 4)
    codes: list[str] = []
    written = mock.patch.object(GraphLowering, "save_output_code", staticmethod(codes.append))
    with written, config.patch(reorder_for_peak_memory=False, fx_graph_cache=False):
        found = compile_fx_inner(graph, tensors)
    products = re.findall(r"extern_kernels.mm\(.*, out=buf(\d)\)", codes[0])
    assert products == (["2", "3"] if in_place else ["1", "3"])  # numbers of all results, in their order
    for result, wanted in zip(found(list(tensors)), gated(*tensors), strict=True):
        assert torch.equal(result, wanted)
