"""Each mechanism for unusual tensors, compiled regions and recomputation, switched off: its test then fails."""

import pytest

from actstore import hooks
from actstore.generators import Generators
from actstore.ledger import Ledger
from actstore.modules import Tracker
from actstore.protect import is_cast_parameter
from actstore.recompute import _CountSaved
from tests.autograd import test_compile as compiled
from tests.autograd import test_kinds as kinds
from tests.recompute import test_state as state


def nothing(*_, **__):
    """Do nothing."""


def no_fake_modes(patch):
    patch.setattr(hooks, "_get_dispatch_mode", nothing)


def no_bounds(patch):
    patch.setattr(hooks, "_fits", lambda *_: True)


def only_parameters(patch):
    patch.setattr(Tracker, "adopt", nothing)


def only_casts_of_parameters(patch):
    patch.setattr(hooks, "is_cast_parameter", lambda tensor, _: is_cast_parameter(tensor, set()))


def no_rewind(patch):
    patch.setattr(Generators, "rewind", nothing)


def no_resume(patch):
    patch.setattr(Generators, "resume", nothing)


def a_new_estimate(patch):
    patch.setattr("actstore.weights._SpectralNorm", type(None))


def no_names_in_errors(patch):
    patch.setattr(_CountSaved, "reading", lambda _, unpack: unpack)


def no_names_of_compiled_calls(patch):
    patch.setattr("actstore.session.compiled.wrap", lambda _: [])


def unnoticed_regions(patch):
    patch.setattr(Ledger, "read_compiled", nothing)


SWITCHES = {
    "no_fake_modes": (
        no_fake_modes,
        lambda: kinds.test_a_real_tensor_that_is_saved_under_a_fake_mode_comes_back("keep"),
    ),
    "no_bounds": (no_bounds, lambda: kinds.test_a_storage_that_is_too_small_for_its_tensor_is_kept(100, "raw")),
    "functional_call": (
        only_parameters,
        lambda: kinds.test_weights_of_a_functional_call_are_parameters("raw", True, False),
    ),
    "computed_weights": (only_parameters, kinds.test_weights_that_are_computed_are_activations_and_exact),
    "parametrized_weights": (only_parameters, lambda: kinds.test_parametrized_weights("int8", "weight_norm")),
    "casts": (
        only_casts_of_parameters,
        lambda: kinds.test_weights_of_a_functional_call_are_parameters("raw", True, True),
    ),
    "no_rewind": (no_rewind, lambda: state.test_what_was_drawn_is_drawn_again("python", "recompute")),
    "no_resume": (no_resume, lambda: state.test_what_was_drawn_is_drawn_again("numpy", "recompute")),
    "a_new_estimate": (a_new_estimate, lambda: state.test_spectral_norm_goes_on_from_the_same_estimate("recompute")),
    "no_names_in_errors": (
        no_names_in_errors,
        lambda: state.test_a_recomputation_that_goes_another_way_is_an_error_with_the_module_named(
            "fails", ZeroDivisionError, "division"
        ),
    ),
    "no_names_of_compiled_calls": (no_names_of_compiled_calls, compiled.test_rules_reach_compiled_blocks),
    "unnoticed_regions": (unnoticed_regions, compiled.test_what_a_compiled_region_reads_at_once_is_told),
}


@pytest.mark.filterwarnings("ignore")  # the compiler about itself
@pytest.mark.parametrize("mechanism", SWITCHES)
def test_a_mechanism_that_is_switched_off_is_missed(mechanism, monkeypatch):
    switch, check = SWITCHES[mechanism]
    check()
    with monkeypatch.context() as patch:
        switch(patch)
        with pytest.raises((AssertionError, RuntimeError, AttributeError)) as info:
            check()
    del info
