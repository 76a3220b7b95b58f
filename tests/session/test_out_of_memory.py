"""The note of errors about memory that pass out of a store."""

import gc
import re
import traceback
import weakref

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto, Disk, Window
from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes, parse_nbytes
from actstore.errors import CapacityError
from actstore.policy import Keep, Rules
from actstore.session import out_of_memory

pytestmark = pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")


class OutOfMemoryOfAnAllocator(torch.OutOfMemoryError):
    """As allocators of other libraries raise them."""


ROWS = 8192

MEMORY = {
    "torch": OutOfMemoryOfAnAllocator("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    "python": MemoryError(),
    "store": CapacityError("no tier has room"),
}
OTHERS = {
    "value": ValueError("out of memory"),
    "runtime": RuntimeError("CUDA error: device-side assert triggered"),
    "interrupt": KeyboardInterrupt(),
    "key": KeyError("out of memory"),
}


class Fails(nn.Module):
    error = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32 * size), nn.Tanh(), nn.Linear(32 * size, 32)) for size in (2, 2, 4)
        )
        self.last = Fails()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def failed(store, model, error):
    """The error as it comes out of the store."""
    model.last.error = error
    with pytest.raises(type(error)) as found, store:
        model(torch.ones(ROWS, 8))
    assert found.value is error
    return error


def notes(error):
    return getattr(error, "__notes__", [])


def copy(error):
    return type(error)(*error.args)


@pytest.mark.parametrize("name", MEMORY)
def test_an_error_about_memory_says_who_holds_what_and_what_to_try(name):
    model = Model()
    store = ActivationStore(model, "keep", min_bytes=0)
    (note,) = notes(failed(store, model, copy(MEMORY[name])))
    first, second, third = note.splitlines()
    saved = ROWS * 4 * (8 + 3 * 32 + 64 + 64 + 128)  # what each linear layer was given; tanh saves that, too
    size = format_nbytes(saved)
    assert first == f"actstore: held {size} of {size} that this forward saved, {size} at its peak"
    assert second.startswith("  most is held by blocks.2.1 4.0 MiB (keep), blocks.0.1 2.0 MiB (keep), ")
    assert second.count("iB (keep)") == 3
    assert third.startswith('  try next: the policy "@blocks : recompute", or the policy "auto(')


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_have_none(name):
    model = Model()
    assert notes(failed(ActivationStore(model, "int8", min_bytes=0), model, copy(OTHERS[name]))) == []


POLICIES = {
    "keep": "@blocks : recompute",
    "int8": "@blocks : recompute",
    "blocks.0 : int4": "@blocks : recompute",
    "@blocks : recompute": "@blocks : recompute(raw @ disk); * : raw @ disk",
    "@blocks : recompute(int8)": "@blocks : recompute(raw @ disk); * : raw @ disk",
    "raw @ disk": "@blocks : recompute(raw @ disk); * : raw @ disk",
    "@blocks : recompute(raw @ disk); * : raw @ disk": None,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_it_tells_to_try_is_exact_runs_and_holds_less(policy, tmp_path):
    torch.manual_seed(0)  # a sampled step warns of some other weights in int4
    model = Model()
    store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path), Window("256KiB")])
    (note,) = notes(failed(store, model, MemoryError()))
    held = store.report().peak_held_bytes
    texts = re.findall(r'the policy "([^"]+)"', note)
    assert (texts[0] if texts else None) == POLICIES[policy]
    assert ("a smaller batch" in note) == (not texts)
    model.last.error = None
    for text in texts:
        if text.startswith("auto"):
            ActivationStore(model, text).close()
        else:
            store = ActivationStore(model, text, min_bytes=0, tiers=[Disk(tmp_path), Window("256KiB")])
            given = torch.ones(ROWS, 8)
            plain = torch.autograd.grad(model(given).sum(), list(model.parameters()))
            with store:
                loss = model(given).sum()
            assert store.report().held_bytes < held
            found = torch.autograd.grad(loss, list(model.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_a_budget_gives_way_to_a_smaller_one():
    model = Model()
    store = ActivationStore(model, Auto("1GiB"), min_bytes=0)
    with pytest.warns(RuntimeWarning, match="memory ran out"):
        error = failed(store, model, MemoryError())
    (note,) = [note for note in notes(error) if note.startswith(out_of_memory.NOTE_PREFIX)]
    budget = re.search(r'try next: the policy "auto\((.+)\)", or a smaller batch', note)
    assert 0 < parse_nbytes(budget[1]) < store.report().peak_held_bytes


def test_nested_stores_add_one_note_and_so_does_an_error_that_comes_again():
    model, error = Model(), MemoryError()
    with pytest.raises(MemoryError), ActivationStore(model), ActivationStore(model.blocks):
        raise error
    assert len(notes(error)) == 1
    with pytest.raises(MemoryError), ActivationStore(model):
        raise error
    assert len(notes(error)) == 1


def test_in_backward_it_is_seen_inside_of_the_context_only():
    def fails(_grad):
        raise MemoryError

    model = Model()
    store = ActivationStore(model, "keep", min_bytes=0)
    with pytest.raises(MemoryError) as found, store:  # noqa: PT012
        y = model(torch.ones(ROWS, 8))
        y.register_hook(fails)
        y.sum().backward()
    assert len(notes(found.value)) == 1
    with store:
        y = model(torch.ones(ROWS, 8))
    y.register_hook(fails)
    with pytest.raises(MemoryError) as found:
        y.sum().backward()
    assert notes(found.value) == []


def test_with_nothing_saved_it_is_not_about_activations():
    with pytest.raises(MemoryError) as found, ActivationStore():
        raise MemoryError
    (note,) = notes(found.value)
    assert note == (
        "actstore: held 0 B of 0 B that this forward saved, 0 B at its peak\n"
        "  try next: a smaller batch: activations are not what fills memory"
    )


def test_without_a_model_it_names_a_tier():
    x = torch.ones(1000, requires_grad=True)
    with pytest.raises(MemoryError) as found, ActivationStore(min_bytes=0):  # noqa: PT012
        y = x.sin()
        raise MemoryError
    assert (
        '\n  most is held by (top) 3.9 KiB (keep)\n  try next: the policy "raw @ disk"; gradients'
        in (notes(found.value)[0])
    )
    del y


def test_it_is_shown_with_the_traceback():
    model = Model()
    error = failed(ActivationStore(model, "keep", min_bytes=0), model, MemoryError())
    assert "\nactstore: held " in "".join(traceback.format_exception(error))


def test_a_note_that_cannot_be_made_raises_nothing(monkeypatch):
    def fails(*_):
        raise MemoryError("for the note, too")

    monkeypatch.setattr(out_of_memory, "_note", fails)
    model = Model()
    assert notes(failed(ActivationStore(model, "keep"), model, MemoryError())) == []


def test_it_keeps_nothing_alive_and_looks_at_nothing_for_other_errors():
    error, ledger, model = MemoryError(), Ledger(), Model()
    out_of_memory.explain(error, ledger, Rules([], Keep()), model, has_budget=False)
    gone = [weakref.ref(each) for each in (ledger, model)]
    del ledger, model
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert len(notes(error)) == 1
    out_of_memory.explain(ValueError(), None, None, None, has_budget=False)


def test_states_that_a_hidden_optimizer_still_makes_count(monkeypatch):
    """`gc.freeze` hides an optimizer from searches. It is known by its steps."""
    model, seen = Model(), []
    model.spare = nn.Linear(32, 32)  # of which backward has made no gradient yet
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(out_of_memory, "outlook_of", lambda error, forward: seen.append(forward))
    gc.freeze()
    try:
        store = ActivationStore(model, "keep", min_bytes=0)
        with store:
            loss = model(torch.ones(ROWS, 8)).square().mean()
        loss.backward()
        optimizer.step()
        failed(store, model, MemoryError())
        (forward,) = seen
        needs = out_of_memory._needs(forward, 0, set())
    finally:
        gc.unfreeze()
    assert list(forward.optimizers) == [optimizer]
    assert needs.optimizer == 2 * sum(weight.nbytes for weight in model.spare.parameters())
    store.close()
