"""Bugs that stores have had, planted one at a time: the sweeps over PyTorch's operators must find each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from actstore.autograd.handles import Stored
from tests.autograd.test_planted import (
    a_held_output,
    contiguous_restore,
    forgotten_slots,
    lost_conjugation,
    lost_offsets,
    no_verdict,
    nothing_waits,
    one_wrong_bit,
    read_once,
    stale_payloads,
)
from tests.operators.calls import operators, samples
from tests.operators.derivatives import changed_inputs, changed_outputs, gradients, second_order
from tests.operators.sweep import KEPT, LENT, leaks, sweep
from tests.operators.test_gradcheck import calls_of as checked_calls
from tests.operators.test_gradcheck import sweep as check_numerically
from tests.transfer.test_loans import back_at_once, never_back


def lost_negation(patch):
    get = Stored.get

    def without(self):
        self.neg = False
        return get(self)

    patch.setattr(Stored, "get", without)


def another_type(patch):
    get = Stored.get
    patch.setattr(Stored, "get", lambda self: get(self) * 1)


class Case(NamedTuple):
    """A bug, and a sweep that finds it."""

    plant: Callable[[pytest.MonkeyPatch], None]
    operators: tuple[str, ...]
    derive: Any = gradients  # None: what is left; the name of a numerical check
    policy: str = "raw"
    variant: str = ""
    dtype: torch.dtype = torch.float64

    def check(self):
        if isinstance(self.derive, str):
            _, findings = check_numerically(self.derive, checked_calls(self.derive, 1, only=self.operators))
            assert findings == []
            return
        calls = (call for op in operators(self.dtype, only=self.operators) for call in self.calls(op))
        if self.derive is None:
            _, findings = leaks(calls, [self.policy])
        else:
            _, findings = sweep(calls, self.derive, [self.policy])
        assert findings == []

    def calls(self, op):
        return samples(op, self.dtype, 3, self.variant)


FOUND = {
    "another_type": Case(another_type, ("masked_scatter",), second_order),
    "a_held_output": Case(a_held_output, ("exp",), None, KEPT),
    "back_at_once": Case(back_at_once, ("nn.functional.batch_norm", "addcdiv"), policy=LENT),
    "contiguous_restore": Case(contiguous_restore, ("addmv", "matmul", "cosh"), variant="not contiguous"),
    "forgotten_slots": Case(forgotten_slots, ("exp",), None),
    "lost_conjugation": Case(lost_conjugation, ("addcmul", "cosh"), variant="lazy", dtype=torch.complex128),
    "lost_offsets": Case(lost_offsets, ("nn.functional.multi_head_attention_forward",)),
    "lost_negation": Case(lost_negation, ("addcmul", "abs"), variant="lazy"),
    "never_back": Case(never_back, ("mul",), policy=LENT),
    "no_verdict_kept": Case(no_verdict, ("cholesky", "exp"), changed_outputs, KEPT),
    "no_verdict_stored": Case(no_verdict, ("addcmul",), changed_inputs, LENT),
    "nothing_waits": Case(nothing_waits, ("nn.functional.rrelu",)),
    "one_wrong_bit": Case(one_wrong_bit, ("addcmul",), dtype=torch.float32),
    "read_once": Case(read_once, ("mul",)),
    "stale_payloads": Case(stale_payloads, ("mul", "square", "nn.functional.linear"), "gradgradcheck"),
}


@pytest.mark.parametrize("bug", FOUND)
def test_a_planted_bug_is_found(bug, monkeypatch):
    case = FOUND[bug]
    case.check()
    with monkeypatch.context() as patch:
        case.plant(patch)
        with pytest.raises(AssertionError) as info:
            case.check()
    del info
