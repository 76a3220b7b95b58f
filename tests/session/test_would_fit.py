"""What would have fitted, in the note of an error about memory."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from actstore import ActivationStore, encode
from actstore.base.ledger import Account
from actstore.base.spec import Site
from actstore.base.units import parse_nbytes
from actstore.codecs import Int8
from actstore.devices import refusals
from actstore.session import out_of_memory
from actstore.session.out_of_memory import Shortage, shortage_of
from actstore.session.would_fit import Needs, Stretch, _floats, missing_states

MIB = 2**20
NEEDS = Needs((Stretch("", 5, 0, 0), Stretch("a", 40, 10, 3), Stretch("b", 40, 10, 4), Stretch("", 30, 0, 0)), 2, 16, 8)


def trained(policy: str, room: int, blocks: int = 8, layers: int = 2) -> str:
    command = [sys.executable, "-m", "tests.session.under_a_limit", policy, *map(str, (room, blocks, layers))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.promise
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is of Linux")
@pytest.mark.parametrize(
    ("room", "policy"),
    [pytest.param(155, "@blocks[::2] : recompute", marks=pytest.mark.slow), (100, "@blocks : recompute")],
)
def test_a_step_trains_under_the_limit_that_it_ran_into_with_the_policy_that_its_note_names(
    room: int, policy: str
) -> None:
    note = trained("keep", room)
    found = re.search(r'try next: the policy "(.+?)"', note)
    assert found is not None, note
    assert found[1] == policy
    memory = re.search(r"memory: (\S+ MiB) asked for, (\S+ [KM]iB) of \S+ MiB \(RLIMIT_DATA\) free", note)
    assert memory is not None
    assert parse_nbytes(memory[2]) < room * MIB
    assert trained(policy, room) == "trained\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is of Linux")
def test_a_step_trains_with_the_lossy_policy_that_its_note_names_where_no_exact_one_fits() -> None:
    note = trained("keep", 130, blocks=3, layers=6)
    assert note.endswith(
        'try next: the policy "int4", which is lossy, as no exact policy is predicted to fit: a value becomes '
        "one of 16 levels from the least to the most in its group of 32\n"
    )
    assert trained("int4", 130, blocks=3, layers=6) == "trained\n"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is of Linux")
def test_a_note_names_no_policy_where_none_is_predicted_to_fit() -> None:
    note = trained("keep", 50)
    assert note.endswith("try next: a smaller batch, as no exact policy is predicted to fit\n")
    least = re.search(r'"@blocks : recompute" (\S+ MiB), .*; there are (\S+ MiB) for it', note)
    assert least is not None
    assert parse_nbytes(least[1]) * (1 + out_of_memory.MARGIN) > parse_nbytes(least[2])


def test_a_peak_is_the_most_of_what_waits_runs_again_and_is_made() -> None:
    fixed = 16 + 8
    assert NEEDS.peak() == 5 + 40 + 40 + 30 + 2 + fixed
    # at the begin of backward; then b runs again; then a, beside the gradients of b
    assert (
        NEEDS.peak(["a", "b"]) == max(5 + 10 + 10 + 30 + 2, 5 + 10 + 10 + 2 + 4 + 40, 5 + 10 + 2 + 4 + 3 + 40) + fixed
    )
    assert NEEDS.peak(["a"]) == max(5 + 10 + 40 + 30 + 2, 5 + 10 + 2 + 4 + 3 + 40) + fixed
    assert NEEDS.peak(["a", "b"], 12) == 12 + 2 + 4 + 3 + 40 + fixed
    assert NEEDS.fixed == 2 + 3 + 4 + fixed


def test_under_a_codec_floats_have_the_sizes_of_payloads_and_one_is_decoded() -> None:
    floats = ((torch.float32, 4096), (torch.bfloat16, 2048))
    needs = Needs((Stretch("a", 10_000, 0, 0, floats), Stretch("", 500, 0, 0)), 0, 0, moving=800)
    payloads = 2 * (1024 + 8 * 2)  # two times 1024 elements, each of 128 with a scale
    assert needs.peak() == 10_500 + 800
    assert needs.peak(codec=Int8()) == 10_500 - 4096 - 2048 + payloads + 800 + 400


def test_a_codec_takes_floats_of_layers_but_the_first_ones_and_copies_of_weights() -> None:
    named = {"": nn.Module(), "0": nn.Linear(64, 64), "1": nn.Dropout(), "2": Stack(), "3": nn.GELU()}

    def saved(name: str, nbytes: int, dtype: torch.dtype | None = torch.bfloat16) -> Account:
        account = Account(Site(name, 0), dtype)
        account.saved = nbytes
        return account

    part = [
        saved("0", 100),
        saved("0", 200),
        saved("0", 2 * 64 * 64),
        saved("0", 400, torch.int64),
        saved("0", 800, None),
        saved("1", 1600),
        saved("2", 3200),
        saved("3", 6400),
        saved("3", 12800, torch.float32),
    ]
    assert _floats(named, part, part[0]) == ((torch.bfloat16, 200 + 6400), (torch.float32, 12800))


@pytest.mark.parametrize(("policy", "levels", "group"), [("int8", 255, 128), ("int4", 16, 32)])
def test_lossy_policies_have_the_levels_that_their_note_states(policy: str, levels: int, group: int) -> None:
    assert out_of_memory.LOSSY[policy][1].startswith(f"one of {levels} levels ")
    assert out_of_memory.LOSSY[policy][1].endswith(f" in its group of {group}")
    groups = torch.randn(64, group)
    decoded = encode(groups, policy).decode()
    assert max(row.unique().numel() for row in decoded) <= levels
    least, most = groups.aminmax(dim=1, keepdim=True)
    step = (2 * groups.abs().amax(1, keepdim=True) if policy == "int8" else most - least) / (levels - 1)
    assert ((decoded - groups).abs() <= 0.51 * step).all()


def test_states_that_an_optimizer_has_made_are_not_to_come() -> None:
    leaf = nn.Parameter(torch.ones(100))
    adam = torch.optim.AdamW([leaf])
    optimizers = {
        adam: 800,
        torch.optim.Adam([leaf], amsgrad=True): 1200,
        torch.optim.SGD([leaf], momentum=0.9): 400,
        torch.optim.SGD([leaf]): 0,
    }
    for optimizer, missing in optimizers.items():
        assert missing_states([optimizer]) == missing
    assert missing_states(optimizers) == 2400
    leaf.grad = torch.ones(100)
    adam.step()
    assert missing_states([adam]) == 0


REFUSED = torch.OutOfMemoryError("CUDA out of memory.")


def test_a_gpu_has_the_figures_that_its_observer_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 75 * MIB)
    refusals.note(1, 20 * MIB, 80 * MIB, 9 * MIB)
    assert shortage_of(MemoryError(), gpu) is None  # of the host
    found = shortage_of(REFUSED, gpu)
    assert found is not None
    assert found.free == 5 * MIB  # the process may have 80
    assert str(found) == (
        "20.0 MiB asked for, 5.0 MiB of 80.0 MiB (cuda:1) free; PyTorch had 70.0 MiB allocated, 75.0 MiB reserved"
    )
    assert shortage_of(REFUSED, gpu) is None


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def note_of(monkeypatch: pytest.MonkeyPatch, free: int, asked: int, runs: int = 4) -> str:
    """Return the note of a forward that failed behind some blocks, with so much memory left."""
    model = Stack()
    shortage = Shortage("a limit", 100 * MIB, free, asked)
    monkeypatch.setattr(out_of_memory, "shortage_of", lambda error, device: shortage)
    store = ActivationStore(model, "keep", min_bytes=0)
    with pytest.raises(MemoryError) as found, store:  # noqa: PT012
        x = torch.ones(4096, 64)
        for block in model.blocks[:runs]:
            x = block(x)
        raise MemoryError
    (note,) = found.value.__notes__
    return str(note)


@pytest.mark.parametrize(
    ("free", "named"), [(5.5, "@blocks[::2] : recompute"), (4.0, "int8"), (3.2, "int4"), (1.0, None)]
)
def test_at_most_one_lossy_policy_is_named_and_only_where_no_exact_one_fits(
    monkeypatch: pytest.MonkeyPatch, free: float, named: str | None
) -> None:
    note = note_of(monkeypatch, int(free * MIB), asked=2 * MIB, runs=3)
    lossy = re.findall(r'"(int\d)" at most', note)
    assert lossy == ([] if named not in out_of_memory.LOSSY else [named])
    found = re.search(r'try next: the policy "(.+?)"', note)
    assert (found[1] if found else None) == named
    assert ("which is lossy" in note) == bool(lossy)


def test_an_error_with_more_memory_than_the_step_needs_has_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    note = note_of(monkeypatch, free=90 * MIB, asked=0)
    assert "predicted" not in note
    assert 'try next: the policy "@blocks : recompute", or' in note


def test_a_forward_that_ended_no_block_has_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    note = note_of(monkeypatch, free=0, asked=MIB, runs=1)
    assert "memory: 1.0 MiB asked for, 0 B of 100.0 MiB (a limit) free" in note
    assert "predicted" not in note


def test_gradients_that_fit_under_no_policy_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held = SimpleNamespace(held=0)
    model = Stack()
    monkeypatch.setattr(out_of_memory, "shortage_of", lambda error, device: Shortage("a limit", 10, 3, 5))
    monkeypatch.setattr(out_of_memory, "_needs", lambda *_: NEEDS)
    found = out_of_memory.outlook_of(REFUSED, out_of_memory.FailedForward.of(held, None, model))  # type: ignore[arg-type]
    assert found is not None
    assert found.hopeless == (
        "a smaller model, or an optimizer with smaller states: gradients and optimizer states that are still to come "
        "need 25 B, where there are 3 B. No policy changes that"
    )
