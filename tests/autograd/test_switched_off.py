"""Each mechanism that keeps a step exact, switched off: its test then fails."""

import pytest
import torch

from actstore.autograd import hooks, tracker, verdict
from actstore.autograd.handles import Stored
from actstore.autograd.hooks import Scope
from actstore.autograd.protect import is_cast_parameter
from actstore.autograd.storages import Storages
from actstore.autograd.tracker import Tracker
from actstore.base import compiler
from actstore.base.ledger import Claim, Ledger
from actstore.base.spec import Spec
from actstore.errors import ActstoreError
from actstore.model import generators
from actstore.model.generators import GeneratorStates
from actstore.model.weights import Weights
from actstore.recompute import recomputed_module as recompute
from actstore.recompute import replay
from actstore.session import activation_store as session
from actstore.store.store import Store
from tests.autograd import test_compile as compiled
from tests.autograd import test_composite as composite
from tests.autograd import test_failures as failures
from tests.autograd import test_fresh as fresh
from tests.autograd import test_kinds as kinds
from tests.autograd import test_lifetime as lifetime
from tests.autograd import test_modes as modes
from tests.autograd import test_mutation as mutation
from tests.autograd import test_never_lossy as never_lossy
from tests.autograd import test_rounding as rounding
from tests.autograd import test_values as values
from tests.recompute import test_changed_inside as changed
from tests.recompute import test_checkpoint as checkpoints
from tests.recompute import test_recompute as recomputed
from tests.recompute import test_region_state as state
from tests.rerun import test_state as checked


def nothing(*_, **__):
    """Do nothing."""


def no_tracers(patch):
    patch.setattr(compiler, "_TRACING", compiler._TRACING[:1])


def no_fake_modes(patch):
    patch.setattr(compiler, "_get_dispatch_mode", nothing)


def no_bounds(patch):
    patch.setattr(verdict, "_fits", lambda *_: True)


def only_parameters(patch):
    patch.setattr(Storages, "adopt", nothing)


def only_casts_of_parameters(patch):
    patch.setattr(verdict, "is_cast_parameter", lambda tensor, _: is_cast_parameter(tensor, set()))


def no_rewind(patch):
    patch.setattr(GeneratorStates, "rewind", lambda *_: [])


def no_resume(patch):
    patch.setattr(generators, "resume", nothing)


def a_new_estimate(patch):
    patch.setattr(Weights, "_watch", nothing)


def no_names_in_errors(patch):
    patch.setattr("actstore.recompute.hooks._add_name", nothing)


def no_names_of_compiled_calls(patch):
    patch.setattr("actstore.session.applied_policy.compiled.wrap", nothing)


def unnoticed_regions(patch):
    patch.setattr(Ledger, "read_compiled", nothing)


def no_protection_of_values(patch):
    patch.setattr(verdict, "lossy_reason", lambda *_: "")


def no_form_check(patch):
    patch.setattr(Spec, "check", nothing)


def whole_storages(patch):
    patch.setattr("actstore.autograd.regions.MAX_STORAGE_RATIO", 10**9)


def no_parts(patch):
    patch.setattr(hooks, "parts_of", nothing)


def parameters_like_others(patch):
    patch.setattr(hooks, "Parameter", type(None))
    patch.setattr(hooks, "is_parameter", nothing)
    patch.setattr(verdict, "is_cast_parameter", lambda *_: False)


def nothing_known_of_the_model(patch):
    patch.setattr(Storages, "adopt", nothing)


def one_key(patch):
    patch.setattr(Store, "_next_key", lambda *_: 0)


def released_too_late(patch):
    patch.setattr("actstore.store.store.Finalizer", nothing)
    patch.setattr("actstore.store.store.Claim", lambda owner, _release: Claim(owner))


def nobody_holds_claims(patch):
    patch.setattr(Store, "remember", nothing)


def no_look_at_regions(patch):
    patch.setattr(session, "refuse_checkpointed_region", nothing)


def no_look_at_reentrant_checkpoints(patch):
    for module in (hooks, tracker):
        patch.setattr(module, "in_reentrant", lambda: False)


def no_verdict_on_second_runs(patch):
    patch.setattr("actstore.recompute.hooks.check_unchanged", nothing)


def copies_of_parameters(patch):
    patch.setattr(torch.Tensor, "is_leaf", False)


def mutation_is_never_allowed(patch):
    patch.setattr(Scope, "allows_mutation", lambda _: False)


def default_types(patch):
    def read(self, shape, stride):
        tensor = torch.empty_strided(shape, stride)
        self.store.get(self, tensor)
        return tensor

    patch.setattr(Stored, "_read", read)


def reads_with_a_graph(patch):
    get = Stored.get
    patch.setattr(Stored, "get", lambda self: get(self).requires_grad_().exp().log())


def only_arguments_by_position(patch):
    patch.setattr(recompute, "flatten", lambda args, kwargs: ([*args, kwargs], len(args)))
    patch.setattr(replay, "unflatten", lambda leaves, count: (leaves[:count], leaves[count]))


def torchscript_like_others(patch):
    patch.setattr(recompute, "ScriptModule", type(None))


def no_call_ends(patch):
    patch.setattr(Tracker, "unwind", nothing)


def never_settled(patch):
    patch.setattr(Scope, "settle", nothing)


def no_containers(patch):
    patch.setattr("actstore.rerun.state.contents", lambda _: ([], []))


def no_optimizers(patch):
    patch.setattr("actstore.rerun.state.live_optimizers", list)


def with_patch(test, *args):
    with pytest.MonkeyPatch.context() as patch:
        test(*args, patch)


SWITCHES = {
    "no_tracers": (
        no_tracers,
        lambda: kinds.test_a_trace_of_forward_and_backward_is_that_without_a_store("raw"),
    ),
    "no_protection_of_values": (
        no_protection_of_values,
        lambda: never_lossy.test_what_is_never_lossy("softmax", "int8"),
    ),
    "no_protection_of_statistics": (
        no_protection_of_values,
        lambda: values.test_no_codec_loses_anything_of_what_is_no_activation("statistic", "int4"),
    ),
    "no_form_check": (
        no_form_check,
        lambda: [with_patch(values.test_a_tensor_of_another_form_is_refused, how) for how in values.WRONG],
    ),
    "whole_storages": (
        whole_storages,
        lambda: fresh.test_a_slice_of_a_large_storage_stores_what_it_needs("big[7]", 100),
    ),
    "no_parts": (no_parts, lambda: composite.test_the_parts_of_a_wrapper_are_moved_exactly(None, "two", "raw")),
    "parameters_like_others": (
        parameters_like_others,
        lambda: never_lossy.test_parameters_are_never_moved("view_of_parameter", "raw"),
    ),
    "nothing_known_of_the_model": (
        nothing_known_of_the_model,
        lambda: never_lossy.test_buffers_are_never_moved("raw"),
    ),
    "one_key": (one_key, lambda: rounding.test_the_seed_decides_the_gradients("int8(round=stochastic)")),
    "released_too_late": (
        released_too_late,
        lambda: failures.test_a_save_that_fails_frees_what_was_saved_before_it(failures.Encode(failures.Raw())),
    ),
    "nobody_holds_claims": (
        nobody_holds_claims,
        lambda: lifetime.test_a_handle_in_a_cycle_is_freed_by_the_collector("raw"),
    ),
    "no_look_at_regions": (
        no_look_at_regions,
        checkpoints.test_a_store_inside_a_checkpointed_region_is_refused,
    ),
    "no_look_at_reentrant_checkpoints": (
        no_look_at_reentrant_checkpoints,
        lambda: checkpoints.test_what_a_reentrant_checkpoint_runs_again_is_no_part_of_the_forward("raw"),
    ),
    "no_verdict_on_second_runs": (
        no_verdict_on_second_runs,
        lambda: changed.test_it_is_refused_as_without_a_store("recompute(raw)"),
    ),
    "copies_of_parameters": (
        copies_of_parameters,
        lambda: never_lossy.test_a_parameter_that_gets_new_data_frees_the_old_and_shows_the_new("keep", False),
    ),
    "mutation_is_never_allowed": (
        mutation_is_never_allowed,
        lambda: mutation.test_inside_allow_mutation_on_saved_tensors("device"),
    ),
    "default_types": (default_types, lambda: modes.test_defaults_at_backward_do_not_matter("raw")),
    "reads_with_a_graph": (reads_with_a_graph, lambda: modes.test_unpacking_records_no_graph("raw")),
    "only_arguments_by_position": (
        only_arguments_by_position,
        lambda: recomputed.test_tensors_by_name_and_in_containers_reach_the_store("recompute(raw)"),
    ),
    "torchscript_like_others": (
        torchscript_like_others,
        lambda: kinds.test_recomputed_torchscript_is_refused_with_its_name("0 : recompute(raw)", torch.jit.script),
    ),
    "no_call_ends": (
        no_call_ends,
        lambda: lifetime.test_an_interrupt_that_forward_itself_catches_ends_what_was_recomputed("recompute(int8)"),
    ),
    "never_settled": (
        never_settled,
        lambda: lifetime.test_what_requires_no_gradient_dies_one_node_later("raw"),
    ),
    "no_containers": (no_containers, checked.test_containers_in_containers_are_put_back),
    "no_optimizers": (
        no_optimizers,
        lambda: checked.test_gradients_outside_of_the_model_are_put_back("not at all", True),
    ),
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


MISSED = (AssertionError, RuntimeError, AttributeError, ActstoreError, pytest.fail.Exception)


@pytest.mark.filterwarnings("ignore")  # the compiler about itself
@pytest.mark.parametrize("mechanism", SWITCHES)
def test_a_mechanism_that_is_switched_off_is_missed(mechanism, monkeypatch):
    switch, check = SWITCHES[mechanism]
    check()
    with monkeypatch.context() as patch:
        switch(patch)
        with pytest.raises(
            (AssertionError, RuntimeError, AttributeError, ActstoreError, pytest.fail.Exception)
        ) as info:
            check()
    del info
