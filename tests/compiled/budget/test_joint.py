"""Operators as the reader of a joint graph has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from actstore.compiled.budget import costs
from actstore.compiled.budget.costs import Cost, Costs
from actstore.compiled.budget.operator import Operator
from actstore.compiled.joint import JointReader


class NoCosts(Costs):
    def by_bytes(self, node: Node) -> Cost:
        return Cost(0.0)

    computed = by_bytes

    def measured(self, node: Node, turned: Sequence[Any] = ()) -> Cost:
        return Cost(0.0)


def read(
    function: Callable[..., Tensor | tuple[Tensor, ...]], count: int, *, fuses: bool = True
) -> dict[str, Operator]:
    """The operators of a function of `count` matrices, by name."""
    module = make_fx(lambda *values: tree_leaves(function(*values)), tracing_mode="fake")(
        *(torch.randn(8, 8) for _ in range(count))
    )
    reader = JointReader(module, 1, NoCosts(), fuses=fuses)
    return dict(zip((node.name for node in reader.nodes), reader.step(()).operators, strict=True))


def test_a_loop_that_reads_much_writes_what_two_others_read() -> None:
    def sums(*values: Tensor) -> tuple[Tensor, Tensor]:
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total * 2.0, total - 1.0

    assert read(sums, 4)["add_2"].inlined
    assert not read(sums, 5)["add_3"].inlined
    assert read(sums, 5)["add_2"].inlined, "one loop reads it"


def test_a_scatter_into_a_part_is_a_loop() -> None:
    def scattered(x: Tensor) -> Tensor:
        return torch.select_scatter(torch.zeros(3, 8, 8), x, 0, 1)

    assert read(scattered, 1)["select_scatter"].inlined
    assert not read(scattered, 1, fuses=False)["select_scatter"].fused


@pytest.mark.parametrize("fuses", [True, False])
def test_convolutions_are_measured_on_images_as_inductor_lays_them_out(
    monkeypatch: pytest.MonkeyPatch, fuses: bool
) -> None:
    """With the channels last, but for the weight. Otherwise the operator would copy them."""
    ran = []

    def workspace(call: Callable[[], object], device: torch.device) -> int:
        ran.append(call)
        return 0

    monkeypatch.setattr(costs, "_known", {})
    monkeypatch.setattr(costs, "_workspace", workspace)

    def trained(image: Tensor, weight: Tensor) -> list[Tensor]:
        hidden = torch.nn.functional.conv2d(image, weight, padding=1)
        found = torch.nn.functional.conv2d(hidden, weight, padding=1)
        return [found, *torch.autograd.grad(found.sum(), [image, weight])]

    shapes = (2, 16, 8, 8), (16, 16, 3, 3)
    module = make_fx(trained, tracing_mode="fake")(*(torch.randn(shape, requires_grad=True) for shape in shapes))
    JointReader(module, 1, Costs(), fuses=fuses).step(())
    seen = []
    for call in ran:
        arguments = [cell.cell_contents for cell in call.__closure__ or ()]  # type: ignore[attr-defined]
        images = [each for each in tree_leaves(arguments) if isinstance(each, Tensor) and each.dim() == 4]
        seen.append([each.is_contiguous(memory_format=torch.channels_last) for each in images])
    kinds = [(True, False), (False, False), (True, True, False), (True, False, False)]  # the caller brings an image
    assert [kind for kind in kinds if list(kind) in seen] == kinds if fuses else not any(map(any, seen))


def test_attention_runs_again_and_dropout_does_not() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])
        return torch.nn.functional.dropout(seen, 0.5)

    found = read(attention, 3)
    assert not any(each.barred for name, each in found.items() if name.startswith("_scaled_dot_product"))
    assert any(each.barred for each in found.values())


def test_a_loop_computes_in_the_time_of_a_chunk_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def of_chunk(target: Any, node: Node) -> float:
        measured.append(target)
        return 2.0

    monkeypatch.setattr(costs, "_of_chunk", of_chunk)
    monkeypatch.setattr(costs, "_known", {})
    module = make_fx(lambda x: (x.erf() + x.sum()).erf())(torch.randn(2 * costs.CHUNK))
    nodes = {node.name: node for node in module.graph.nodes if node.op == "call_function"}
    known = Costs()
    found = {name: known.computed(node).ms for name, node in nodes.items()}
    assert found.pop("sum_1") > 0  # reads all of it
    assert found == {"erf": 4.0, "add": 4.0, "erf_1": 4.0}
    assert len(measured) == 2


def test_a_chunk_takes_the_shape_of_each_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(costs, "_fastest", lambda call, device: calls.append(call()) or 3.0 - len(calls))
    module = make_fx(lambda x, y: torch.where(x > 0, x, y))(torch.randn(2 * costs.CHUNK), torch.randn(1))
    where = next(node for node in module.graph.nodes if node.name == "where")
    assert costs._of_chunk(where.target, where) == 1.0
    assert calls[0].shape == (costs.CHUNK,)
