"""Fit of a step: predicted peaks against those that the allocator counts."""

import json
import resource
import sys

import pytest
import torch
from torch import nn

from actstore import ActivationStore, fit_step
from actstore.devices import cpu_memory
from actstore.errors import ConfigError, StateError, UnknownCodecError
from tests.inspection.steps_to_fit import SIZES, Mlp, make_mlp, maker, measured

POLICIES = ("keep", "recompute", "int8", "int4", "raw @ host", "@blocks[::2] : recompute; * : int4")

TOLERANCE, DISK_TOLERANCE = 0.03, 0.08

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")


def errors(name, policies, **sizes):
    make_step = maker(name, **sizes)
    found = fit_step(make_step, policies)
    return {row.policy: row.peak_bytes / measured(make_step, row.policy) - 1 for row in found.rows}


def too_large(found):
    return {policy: error for policy, error in found.items() if abs(error) > TOLERANCE}


@pytest.mark.parametrize(
    ("name", "policies", "sizes"), [("gpt", ["recompute", "int8"], {"layers": 1}), ("resnet", ["int4"], {})]
)
def test_predicted_peaks_are_those_of_the_allocator(name, policies, sizes):
    assert too_large(errors(name, policies, **sizes)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SIZES))
def test_predicted_peaks_of_all_policies_are_those_of_the_allocator(name):
    assert too_large(errors(name, POLICIES)) == {}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt", {"layers": 1}), *(pytest.param(name, {}, marks=pytest.mark.slow) for name in SIZES)],
)
def test_predicted_peak_with_a_disk_is_that_of_steps_whose_copies_were_late(name, sizes):
    make_step = maker(name, **sizes)
    found = measured(make_step, "raw @ disk", is_late=True)
    assert abs(fit_step(make_step, ["raw @ disk"]).rows[1].peak_bytes / found - 1) <= DISK_TOLERANCE


def test_a_reshape_that_copies_counts_one_copy():
    """PyTorch copies, and takes a view of the copy that its schema does not tell."""

    def make_step():
        model, x = Mlp(8), torch.ones(1 << 20, 2, 8)
        return model, lambda: model(x.transpose(0, 1).reshape(2, -1)[:, :8]).mean()

    found = fit_step(make_step, []).rows[0].peak_bytes
    assert found <= (1 + TOLERANCE) * measured(make_step)


def test_memory_that_a_payload_lends_to_a_tensor_counts_once():
    """Tensors over a payload's bytes counted beside them: by 18 % of a step with all payloads on disk."""
    make_step = maker("llama", layers=1)
    row = fit_step(make_step, ["raw @ disk"]).rows[1]
    assert row.least_bytes <= (1 + TOLERANCE) * measured(make_step, "raw @ disk", steps=2)


def test_peak_with_a_disk_lies_between_those_of_the_fastest_and_the_slowest_disk():
    make_step = maker("gpt", layers=1)
    fit = fit_step(make_step, ["raw @ disk"])
    row = fit.rows[1]
    assert any(line.startswith("raw @ disk: ") for line in str(fit).splitlines()[3:])
    assert row.least_bytes < row.peak_bytes <= row.most_bytes
    assert sum(row.at_peak.values()) == row.peak_bytes
    found = measured(make_step, "raw @ disk", steps=4)
    assert (1 - TOLERANCE) * row.least_bytes <= found <= (1 + TOLERANCE) * row.most_bytes


def test_a_step_on_meta_tensors_has_the_figures_of_one_on_the_cpu():
    def on_cpu(batch=2048):
        return make_mlp(batch, device="cpu")

    assert fit_step(make_mlp, ["int8"]).rows == fit_step(on_cpu, ["int8"]).rows


def test_lengths_and_masks_have_their_values():
    seen = []

    def make_step():
        model = Mlp()
        lengths = torch.tensor([300, 212])

        def step():
            seen.append((int(lengths.sum()), torch.arange(5).tolist(), bool((lengths > 212).all())))
            return model(torch.ones(int(lengths.sum()), 512)).mean()

        return model, step

    fit_step(make_step, [])
    assert set(map(str, seen)) == {"(512, [0, 1, 2, 3, 4], False)"}


def test_float_masks_of_dropout_are_bits():
    def make_step():
        model, x = nn.Sequential(nn.Linear(512, 512), *(nn.Dropout(0.1) for _ in range(8))), torch.randn(1024, 512)
        return model, lambda: model(x).mean()

    plain, *rows = (row.peak_bytes for row in fit_step(make_step, ["derive", "int8"], make_optimizer=None).rows)
    mask = 4 * 1024 * 512
    assert all(6 * mask < plain - peak < 8 * mask for peak in rows)


def test_shapes_that_depend_on_values_are_computed():
    def make_step():
        model = Mlp()
        chosen = torch.zeros(100_000).bernoulli_(0.5) == 0  # a dry one is all zeros

        def step():
            return model(torch.ones(100_000, 1)[chosen][:64].expand(-1, 512)).mean()

        return model, step

    assert fit_step(make_step, []).rows[0].peak_bytes > 0


def test_operators_that_must_run_see_autocast():
    found = []

    torch.library.define("actstore_tests::shapeless", "(Tensor x) -> Tensor")
    torch.library.impl("actstore_tests::shapeless", "CPU", lambda x: x @ x.mT)

    def make_step():
        model = Mlp()

        def step():
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.ones(64, 512)
                found.append(torch.ops.actstore_tests.shapeless(x).dtype)
                return model(x).mean()

        return model, step

    fit_step(make_step, [])
    assert set(found) == {torch.bfloat16}


def test_generators_are_as_before():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    fit_step(make_mlp, ["recompute"])
    assert torch.equal(torch.rand(2), expected)


def test_no_memory_of_the_model_is_taken():
    def make_step():
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(16)))
        x = torch.ones(8192, 8192)
        return model, lambda: model(x).square().mean()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = fit_step(make_step, ["int8"]).rows[0]
    assert row.peak_bytes > 16 << 30
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_tensor_or_a_payload_may_be_larger_than_all_memory():
    def make_step():
        model = nn.Linear(8, 1)
        return model, lambda: model(torch.ones(1 << 33, 8)).mean()

    plain, *rows = fit_step(make_step, ["raw @ host", "raw @ disk", "raw @ device", "int8"]).rows
    assert plain.peak_bytes > 256 << 30
    assert all(row.most_bytes > 256 << 30 for row in rows)


def test_the_table_and_the_json_have_a_row_for_each_policy():
    found = fit_step(lambda batch: make_mlp(batch, context=1), ["int8"], memory="100MiB", batch=1024)
    lines = str(found).splitlines()
    assert lines[0].startswith("policy ")
    assert lines[0].endswith("working  fits  largest batch  largest part  peak at")
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["plain", "int8"]
    assert lines[-1] == "fits: whether 100.0 MiB are enough; largest batch"
    values = json.loads(found.to_json())
    assert values["sizes"] == {"batch": 1024}
    assert values["memory_bytes"] == 100 << 20
    assert values["largest"] == found.largest
    assert [row["policy"] for row in values["rows"]] == ["plain", "int8"]
    assert found.largest["plain"]["batch"] > 1024
    assert values["parts"] == {
        policy: {"batch": fit_step(make_mlp, [policy], batch=each["batch"] + 1).rows[-1].largest}
        for policy, each in found.largest.items()
    }


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(UnknownCodecError):
        fit_step(make_mlp, ["int9"])
    with pytest.raises(ConfigError, match="batch='many': must be an int"):
        fit_step(lambda batch="many": make_mlp(), [], memory="1GiB")
    with pytest.raises(ConfigError, match="neither"):
        fit_step(lambda: 3, [])
    with pytest.raises(ConfigError, match="device='xla:0': must be cpu or meta"):
        fit_step(lambda: make_mlp(device="xla:0"), [])
    with ActivationStore(), pytest.raises(StateError):
        fit_step(make_mlp, [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_llama_of_8_billion_weights_takes_little_memory_and_time():
    transformers = pytest.importorskip("transformers")

    def make_step():
        config = transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128_256,
            use_cache=False,
        )
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, 4096, dtype=torch.long)
        return model, lambda: model(input_ids=ids, labels=ids).loss

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = fit_step(make_step).rows
    weights = 8_030_261_248
    assert all(2 * weights < row.at_peak["weights"] < 2.001 * weights for row in rows)
    assert rows[0].peak_bytes > 8 * weights
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20  # KiB
