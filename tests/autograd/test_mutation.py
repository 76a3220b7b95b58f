"""A saved tensor that is changed in place gets the verdict of plain autograd, wherever it waits."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import MutationError
from actstore.policy import parse_decision
from tests.autograd.checks import check_same, verdict

PLACES = {
    "kept": {"policy": "keep", "min_bytes": 0},
    "small": {"policy": "raw", "min_bytes": "1GiB"},
    "device": {"policy": "raw", "min_bytes": 0},
    "host": {"policy": "raw @ host", "min_bytes": 0},
    "disk": {"policy": "raw @ disk", "min_bytes": 0},
    "int8": {"policy": "int8", "min_bytes": 0},
}
STORED = [place for place in PLACES if place not in ("kept", "small")]
EXACT = [place for place in STORED if place != "int8"]


def square(x):
    return x * x


def test_a_changed_weight_is_named_as_one():
    """It is not copied, and so `allow_mutation` does not help."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    with ActivationStore(model, "raw @ disk", min_bytes=0, allow_mutation=True):
        loss = model(x).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(MutationError, match=r"saved at 1,.* It is a weight, .* optimizer.step") as info:
        loss.backward()
    assert "allow_mutation" not in str(info.value)


def _input():
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 1
    return x, h, square(h), h


def _output():
    x = torch.randn(4, 6, requires_grad=True)
    y = x.exp()
    return x, y, y * 1, y


def _view_of_what_was_saved():
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 1
    return x, h, square(h), h[1]


def _base_of_what_was_saved():
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 1
    return x, h, square(h[:, ::2]), h


def _sibling_of_what_was_saved():
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 1
    return x, h, square(h[:2]), h[2:]


def _detached_alias():
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 1
    return x, h, square(h), h.detach()


def _without_gradient():
    x = torch.randn(4, 6, requires_grad=True)
    c = torch.randn(4, 6)
    return x, c, x * c, c


def _leaf():
    x = torch.randn(4, 6, requires_grad=True)
    return x, x, square(x), x


def _parameter():
    x = torch.randn(4, 6, requires_grad=True)
    layer = nn.Linear(6, 3)
    return x, layer.weight, layer(x), layer.weight


def _unsafe_chunk():
    x = torch.randn(4, 6, requires_grad=True)
    a, b = (x * 1).unsafe_chunk(2)
    return x, a, square(a), b  # of one storage, and each with a version of its own


PROGRAMS = {
    f.__name__.strip("_"): f
    for f in (
        _input, _output, _view_of_what_was_saved, _base_of_what_was_saved, _sibling_of_what_was_saved, _detached_alias,
        _without_gradient, _leaf, _parameter, _unsafe_chunk,
    )
}  # fmt: skip


def change(tensor, how):
    with torch.no_grad():
        if how == "twice":
            tensor.add_(1)
            tensor.sub_(1)  # the same values again: the verdict is about versions, not values
        elif how == "later":
            tensor.mul_(2)
        elif how == "data":
            tensor.data.mul_(2)
        elif how == "element":
            tensor.view(-1)[:1].fill_(0)


def run(program, how, store, *, when="inside"):
    torch.manual_seed(0)
    with store or nullcontext():
        x, saved, y, changed = program()
        if when == "inside":
            change(changed, how)
            y = y * 2  # a later node: what waited for its operator is encoded by now
    if when == "outside":
        change(changed, how)
    grads = torch.autograd.grad(y.sum(), x)
    del saved
    return grads


@pytest.mark.parametrize("when", ["inside", "outside"])
@pytest.mark.parametrize("how", ["never", "twice", "later", "element"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_verdict_is_that_of_plain_autograd(program, place, how, when):
    plain = verdict(lambda: run(PROGRAMS[program], how, None, when=when))
    found = verdict(lambda: run(PROGRAMS[program], how, ActivationStore(**PLACES[place]), when=when))
    assert found[0] == plain[0]
    if plain[0] == "ok" and place != "int8":
        check_same(found[1], plain[1])


@pytest.mark.parametrize("place", PLACES)
def test_the_verdicts_are_not_all_the_same(place):
    """The programs above do raise, and do pass: the test of the tests."""
    seen = {
        (name, how): verdict(lambda n=name, h=how: run(PROGRAMS[n], h, ActivationStore(**PLACES[place])))[0]
        for name in PROGRAMS
        for how in ("never", "later")
    }
    assert {seen[name, "never"] for name in PROGRAMS} == {"ok"}
    assert {name for name in PROGRAMS if seen[name, "later"] == "ok"} == {"unsafe_chunk"}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_names_site_versions_and_shape(place):
    model = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())
    store = ActivationStore(model, **PLACES[place])
    with store:
        y = model(torch.randn(4, 6))
    with torch.no_grad():
        y.add_(1).mul_(2)
    with pytest.raises(MutationError) as info:
        y.sum().backward()
    text = str(info.value)
    assert re.search(r"modified by an inplace operation", text)
    assert "float32 4x6" in text
    assert "saved at 1" in text
    assert "is at version 2; expected version 0 instead" in text
    assert "allow_mutation=True" in text
    assert (info.value.site.name, info.value.expected, info.value.found) == ("1", 0, 2)
    assert isinstance(info.value, RuntimeError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("asked", [False, True], ids=["named", "asked"])
@pytest.mark.parametrize("place", PLACES)
def test_a_nested_tensor(place, asked):
    """It has no one shape that an error, or a policy that is a function, could be told."""
    options = dict(PLACES[place])
    if asked:
        decision = parse_decision(options["policy"])
        options["policy"] = lambda site, spec: decision
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], requires_grad=True)
    with ActivationStore(**options):
        h = nested * 1
        y = square(h)
        z = square(nested)
    assert torch.autograd.grad(torch.nested.to_padded_tensor(z, 0.0).sum(), nested)[0].is_nested
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(MutationError, match=r"\[nested float32 of 2 tensors on cpu\], saved at \(top\)") as info:
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()
    assert (info.value.site.name, info.value.expected, info.value.found) == ("", 0, 1)


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_step_between_forward_and_backward(place):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = ActivationStore(model, **PLACES[place])
    x = torch.randn(4, 6)
    with store:
        first, second = model(x).sum(), model(x).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("place", EXACT)
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "parameter"])
def test_allowed_mutation_gives_the_values_at_save_time(program, place, inside):
    when = "inside" if inside else "outside"
    wanted = run(PROGRAMS[program], "never", None, when=when)
    store = ActivationStore(**PLACES[place], allow_mutation=True)
    check_same(run(PROGRAMS[program], "later", store, when=when), wanted)


LAYOUTS = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.t(),
    "gaps": lambda base: base[:, ::2],
    "slice": lambda base: base[1:3],
    "expanded": lambda base: base[:, :1].expand(4, 6),
    "overlapping": lambda base: base.view(-1).unfold(0, 5, 2),
    "scalar": lambda base: base[1, 2],
    "empty": lambda base: base[:0],
}


@pytest.mark.parametrize("backward_first", [False, True], ids=["after_a_later_node", "at_once"])
@pytest.mark.parametrize("place", EXACT)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("conjugated", [False, True], ids=["plain", "conj"])
def test_allowed_mutation_of_what_requires_no_gradient(layout, place, backward_first, conjugated):
    """Such a tensor is encoded one node later: a change before that must not be seen."""
    base = torch.randn(4, 6, dtype=torch.complex64 if conjugated else torch.float32)
    constant = LAYOUTS[layout](base.conj() if conjugated else base)
    wanted = constant.conj().resolve_conj().clone()
    x = torch.zeros(constant.shape, dtype=base.dtype, requires_grad=True)
    with ActivationStore(**PLACES[place], allow_mutation=True):
        y = x * constant
        base.add_(100)
        if backward_first:
            grad = torch.autograd.grad(y, x, torch.ones_like(y))
        else:
            grad = torch.autograd.grad(square(y), y, torch.ones_like(y), retain_graph=True)
            grad = torch.autograd.grad(y, x, torch.ones_like(y))
    check_same(grad, (wanted,))


@pytest.mark.parametrize("place", ["kept", "small"])
def test_allowed_mutation_of_what_was_kept_is_an_error_all_the_same(place):
    with pytest.raises(MutationError):
        run(_input, "later", ActivationStore(**PLACES[place], allow_mutation=True))


@pytest.mark.parametrize("place", PLACES)
def test_inside_allow_mutation_on_saved_tensors(place):
    store = ActivationStore(**PLACES[place])
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        wanted = run(_input, "later", None)
        if place in EXACT:
            check_same(run(_input, "later", store), wanted)
        elif place != "int8":
            with pytest.raises(MutationError):
                run(_input, "later", store)


@pytest.mark.parametrize("place", EXACT)
def test_a_write_through_data_after_the_save_does_not_reach_a_copy(place):
    """Plain autograd is silently wrong here; a copy is right."""
    check_same(run(_input, "data", ActivationStore(**PLACES[place])), run(_input, "never", None))


@pytest.mark.parametrize("place", EXACT)
def test_a_write_through_data_between_two_saves(place):
    x = torch.randn(5, requires_grad=True)
    with ActivationStore(**PLACES[place]):
        first = square(x)
        x.data.mul_(2)
        second = square(x)
    del first
    check_same(torch.autograd.grad(second.sum(), x), ((2 * x).detach(),))


@pytest.mark.parametrize("place", PLACES)
def test_two_versions_of_one_tensor_are_two_payloads(place):
    x = torch.randn(5, requires_grad=True)
    with ActivationStore(**PLACES[place]):
        h = x * 1
        first = square(h)
        with torch.no_grad():
            h.mul_(3)
        second = square(h)
    wanted = 2 * h.detach()
    if place != "int8":
        check_same(torch.autograd.grad(second.sum(), h), (wanted,))
    with pytest.raises(MutationError):
        torch.autograd.grad(first.sum(), h)


@pytest.mark.parametrize("place", EXACT)
def test_chunks_with_versions_of_their_own_are_not_mixed_up(place):
    """As recurrent cells do: chunks of one storage, changed in place one after the other, all at version 1."""

    def cell(x):
        gates = (x * 1).unsafe_chunk(3)
        return sum(gate.sigmoid_() for gate in gates)

    x = torch.randn(6, 4, requires_grad=True)
    with ActivationStore(**PLACES[place]):
        y = cell(x)
    check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(cell(x).sum(), x))
