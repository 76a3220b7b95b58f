"""Inspection of a step: saved tensors with operators and lines, and memory through the step."""

import gc
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, inspect_step
from actstore.base.units import format_nbytes
from actstore.devices import cpu_memory
from actstore.errors import ConfigError, StateError
from actstore.inspection import MemoryPoint, Timeline
from actstore.inspection.beside import BesideActivations

BATCH, WIDTH = 32, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x)))  # the line of gelu
        return x + self.down(hidden) @ torch.linspace(0, 1, WIDTH).diag()  # the line of the product


def make(layers=3):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.layers = nn.Sequential(*(Layer() for _ in range(layers)))
    return model, torch.randn(BATCH, WIDTH)


def line_of(comment):
    with open(__file__) as source:
        return next(at for at, text in enumerate(source, 1) if text.rstrip().endswith(f"# {comment}"))


def inspected(policy="keep", layers=3, **options):
    model, x = make(layers)
    with_store = ActivationStore(model, policy, min_bytes=0, **options)
    return inspect_step(lambda: model(x).square().mean(), with_store)


def test_each_tensor_has_its_operator_shape_and_line():
    found = inspected(layers=1)
    gelu = next(tensor for tensor in found.tensors if tensor.operator == "gelu")
    assert (gelu.shape, gelu.dtype, gelu.layout, gelu.producer) == (
        (BATCH, 4 * WIDTH),
        "float32",
        "dense",
        "AddmmBackward0",
    )
    assert (gelu.place, gelu.function) == (f"test_inspect.py:{line_of('the line of gelu')}", "forward")
    assert gelu.code.startswith("hidden = F.gelu(")
    assert gelu.module == "layers.0"
    assert gelu.saved_bytes == BATCH * 4 * WIDTH * 4
    product = next(tensor for tensor in found.tensors if tensor.operator == "@")
    assert product.line == line_of("the line of the product")
    norm = next(tensor for tensor in found.tensors if tensor.operator == "layer_norm")
    assert (norm.module, norm.made_by) == ("layers.0.norm", "input")


@pytest.mark.parametrize("policy", ["keep", "int8", "recompute", "raw @ disk", "layers.1 : recompute; * : int4"])
def test_saved_bytes_are_those_of_the_report(policy):
    found = inspected(policy)
    assert found.saved_bytes == found.report.saved_bytes
    assert found.plain.peak.held_bytes >= found.saved_bytes * 0.99
    assert found.store.peak.held_bytes <= found.report.peak_held_bytes


def test_memory_goes_up_in_forward_and_down_in_backward():
    points = inspected().plain.points
    forward = [point.held_bytes for point in points if not point.backward]
    backward = [point.held_bytes for point in points if point.backward]
    assert forward == sorted(forward)
    assert backward == sorted(backward, reverse=True)
    assert backward[-1] == 0
    assert [point.ms for point in points] == sorted(point.ms for point in points)
    assert all(point.allocated_bytes is None or point.allocated_bytes > point.held_bytes for point in points)


def test_every_tensor_is_let_go():
    tensors = inspected().tensors
    assert all(tensor.freed_ms is not None and tensor.freed_ms >= tensor.saved_ms for tensor in tensors)


def test_a_store_that_holds_less_has_a_lower_curve():
    plain, int8 = inspected(), inspected("int8")
    assert int8.store.peak.held_bytes < 0.5 * plain.store.peak.held_bytes
    assert int8.plain.peak.held_bytes == plain.plain.peak.held_bytes
    assert int8.store.policy == "int8"


def test_the_step_leaves_what_it_found():
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step():
        optimizer.zero_grad()
        loss = model(F.dropout(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    inspect_step(step, ActivationStore(model, "int8"))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_step_may_enter_the_store_itself():
    model, x = make()

    def step(store):
        with store or nullcontext():
            loss = model(x).square().mean()
        loss.backward()

    found = inspect_step(step, ActivationStore(model, "int8", min_bytes=0))
    assert found.saved_bytes == inspected().saved_bytes
    with pytest.raises(StateError, match="did not enter the store"):
        inspect_step(lambda store: model(x).square().mean().backward(), ActivationStore(model))


def test_recomputed_layers_are_seen_as_plain_saves_them():
    found = inspected("layers.* : recompute")
    assert {tensor.module for tensor in found.tensors if tensor.operator == "gelu"} == {
        "layers.0",
        "layers.1",
        "layers.2",
    }
    assert found.store.peak.held_bytes < found.plain.peak.held_bytes


def test_a_model_that_the_store_compiled_is_refused():
    model, x = make(1)
    store = ActivationStore(model, "int8", min_bytes=0)
    store.compile(backend="aot_eager")
    with pytest.raises(StateError, match=r"in graphs that store.compile\(\) made"):
        inspect_step(lambda: model(x).square().mean(), store)


def test_a_compiled_model():
    model, x = make(1)
    model.compile(backend="aot_eager")
    found = inspect_step(lambda: model(x).square().mean(), ActivationStore(model, min_bytes=0))
    assert found.saved_bytes == found.report.saved_bytes > 0


def test_errors_pass_and_leave_no_hooks():
    model, x = make()

    def step():
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        inspect_step(step, ActivationStore(model))
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_arguments_are_checked():
    model, _ = make()
    with pytest.raises(ConfigError, match="must be an ActivationStore"):
        inspect_step(lambda: None, "int8")
    store = ActivationStore(model)
    with store, pytest.raises(StateError, match="inside a store's context"):
        inspect_step(lambda: None, store)
    with pytest.raises(ConfigError, match="by='color': must be"):
        inspected().table("color")


def test_the_table_of_lines():
    found = inspected(layers=8)
    head, *rows = found.table().splitlines()
    assert head.split() == ["saved", "share", "tensors", "shape", "dtype", "saved", "by", "module", "line"]
    row = next(row for row in rows if " gelu " in row)
    assert "layers.0-7" in row
    assert f"test_inspect.py:{line_of('the line of gelu')}  hidden = F.gelu(" in row
    assert rows[-1].endswith("total")
    assert len(str(found).splitlines()) <= 40
    assert rows[0].split()[:2] == max(rows[:-1], key=lambda row: float(row.split()[2])).split()[:2]


@pytest.mark.parametrize("by", ["line", "operator", "module"])
def test_tables_add_up(by):
    found = inspected(layers=4)
    rows = found.table(by, most=None).splitlines()[1:]
    counts = [int(row.split()[4]) for row in rows]  # after bytes, share and their units
    assert sum(counts[:-1]) == counts[-1]
    few = found.table(by, most=1).splitlines()
    assert "more: table(most=None) shows them" in few[2]


def test_json_has_all():
    found = inspected("int8")
    values = json.loads(found.to_json())
    assert len(values["tensors"]) == len(found.tensors)
    assert len(values["plain"]["points"]) == len(found.plain.points)
    assert values["report"]["saved_bytes"] == found.report.saved_bytes


def test_the_picture_shows_both_steps():
    pytest.importorskip("matplotlib")
    figure = inspected("layers.0 : keep; * : int8", layers=6).plot()
    upper, lower = figure.axes
    assert upper.get_title(loc="left").startswith("plain PyTorch: at most")
    assert lower.get_title(loc="left").startswith("layers.0 : keep; * : int8: at most")
    assert any("layers.0" in text.get_text() for text in upper.get_legend().get_texts())
    texts = [text.get_text() for text in lower.get_legend().get_texts()]
    assert texts[0] == "layers.0-1: keep, int8"
    assert texts[1] == "layers.2-3: int8"


@pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")
def test_an_optimizer_that_gc_freeze_has_hidden_is_counted():
    model, x = make(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    gc.freeze()

    def step(store):
        with store:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    found = inspect_step(step, ActivationStore(model))
    assert found.beside.optimizer_bytes == found.beside.weights_bytes > 0


def test_the_picture_has_weights_gradients_and_optimizer_below_activations():
    pytest.importorskip("matplotlib")
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(store):
        optimizer.zero_grad()
        with store:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    step(nullcontext())
    found = inspect_step(step, ActivationStore(model, "keep", min_bytes=0))
    weights = sum(weight.nbytes for weight in model.parameters())
    gradients = [point.gradients_bytes for point in found.plain.points]
    assert (gradients[0], gradients[-1]) == (0, weights)
    assert gradients == sorted(gradients)
    axes = found.plot().axes[0]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    optimizer_bytes = 2 * weights + 4 * len(list(model.parameters()))  # and counters
    named = {"weights": weights, "optimizer": optimizer_bytes, "gradients": weights}
    assert texts[-4:] == [*(f"{name} {format_nbytes(nbytes)}" for name, nbytes in named.items()), "all tensors"]
    bands = axes.collections[:3]
    tops = [max(path.vertices[:, 1].max() for path in band.get_paths()) for band in bands]
    assert [round(2**20 * top) for top in tops] == [weights, weights + optimizer_bytes, 2 * weights + optimizer_bytes]


def test_the_line_of_all_tensors_is_left_out_where_not_all_are_counted():
    point = MemoryPoint(1.0, False, {"layer": 10}, 34, 3)
    assert BesideActivations(20, 0, 1).are_counted(Timeline("plain", (point,)))
    assert not BesideActivations(20, 0, 2).are_counted(Timeline("plain", (point,)))
    assert not BesideActivations(20, 0, 1).are_counted(Timeline("plain", (replace(point, allocated_bytes=None),)))
