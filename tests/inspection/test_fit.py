"""Fit of a step: predicted peaks against those that the allocator counts."""

import gc
import json
import logging
import resource
import sys
from contextlib import closing, nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, fit_step
from actstore.bench import workloads
from actstore.devices import cpu_memory
from actstore.errors import ConfigError, StateError, UnknownCodecError
from actstore.inspection.fit.largest import largest

POLICIES = ("keep", "recompute", "int8", "int4", "raw @ host", "@blocks[::2] : recompute; * : int4")
TOLERANCE = 0.03
SIZES = {
    "gpt": {"layers": 2, "batch": 8},
    "llama": {"layers": 2, "batch": 8},
    "vit": {"layers": 2, "batch": 32},
    "resnet": {"batch": 16},
    "lora": {"layers": 2, "batch": 8},
}

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")


def maker(name, **sizes):
    def make_step(batch=SIZES[name]["batch"]):
        job = workloads.make(workloads.sized(name, **{**SIZES[name], **sizes, "batch": batch}, threads=1))
        data = job.batch(0)
        return job.model, lambda: job.loss(*data)

    return make_step


def measured(make_step, policy="plain", steps=3, **sizes):
    """Return the allocator's peak in the last step, above the bytes before the model was made."""
    gc.collect()
    before = cpu_memory.memory_allocated()
    model, step = make_step(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    with nullcontext() if policy == "plain" else closing(ActivationStore(model, policy)) as store:
        for _ in range(steps):
            gc.collect()
            cpu_memory.reset_peak()
            with store or nullcontext():
                loss = step()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return cpu_memory.max_memory_allocated() - before


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


def test_peak_with_a_disk_lies_between_those_of_the_fastest_and_the_slowest_disk():
    make_step = maker("gpt", layers=1)
    fit = fit_step(make_step, ["raw @ disk"])
    row = fit.rows[1]
    assert str(fit).splitlines()[-1].startswith("raw @ disk: ")
    assert row.least_bytes < row.peak_bytes < row.most_bytes
    found = measured(make_step, "raw @ disk", steps=4)
    assert (1 - TOLERANCE) * row.least_bytes <= found <= (1 + TOLERANCE) * row.most_bytes


@pytest.mark.parametrize("policy", ["plain", "int8"])
def test_largest_batch_is_within_one_step_of_the_true_one(policy):
    make_step = maker("gpt", layers=1)
    limit = measured(make_step, policy, batch=7) + 100_000
    found = fit_step(make_step, [policy], memory=limit).largest[policy]["batch"]
    assert 6 <= found <= 8


class Mlp(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def make_mlp(batch=2048, context=1, device="meta"):
    with torch.device(device):
        model, x = Mlp(), torch.ones(batch, context, 512)
    return model, lambda: model(x).square().mean()


def test_a_step_on_meta_tensors_has_the_figures_of_one_on_the_cpu():
    def on_cpu(batch=2048):
        return make_mlp(batch, device="cpu")

    assert fit_step(make_mlp, ["int8"]).rows == fit_step(on_cpu, ["int8"]).rows


def test_bytes_at_the_peak_have_names():
    row = fit_step(make_mlp, []).rows[0]
    weights = 4 * (2 * 512 * 2048 + 512 + 2048)
    assert row.at_peak["weights"] == weights
    assert row.at_peak["optimizer"] == 2 * weights + 4 * 4  # and a counter for each weight
    assert row.at_peak["activations"] == 4 * 2048 * (512 + 2 * 2048)  # the input, and the hidden values twice
    assert sum(row.at_peak.values()) == row.peak_bytes
    assert row.largest == "activations"
    assert "optimizer" not in fit_step(make_mlp, [], make_optimizer=None).rows[0].at_peak


def test_logits_have_a_name_of_their_own():
    def make_step():
        head = nn.Linear(64, 50_000)
        x, y = torch.ones(512, 64), torch.zeros(512, dtype=torch.long)
        return head, lambda: F.cross_entropy(head(x), y)

    row = fit_step(make_step, []).rows[0]
    assert row.largest == "logits"
    assert row.at_peak["logits"] >= 2 * 4 * 512 * 50_000  # the logarithms of the probabilities, and their gradient


def test_a_step_may_train_by_itself_and_enter_the_store():
    def make_step(batch=2048):
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        x = torch.ones(batch, 512)

        def step(store):
            optimizer.zero_grad()
            with store:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return model, step

    rows = fit_step(make_step, ["int8"]).rows
    weights = rows[0].at_peak["weights"]
    assert all(row.at_peak["optimizer"] == weights for row in rows)
    assert 0 < rows[1].at_peak["payloads"] < (512 + 2 * 2048) * 2048 * 1.1  # a byte for each saved value, and scales


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
    assert lines[0].endswith("working  fits  largest batch  largest part")
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["plain", "int8"]
    assert lines[-1] == "fits: in 100.0 MiB; largest batch"
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


def test_the_part_that_grows_too_large_is_named():
    found = fit_step(make_mlp, [], memory="200MiB", batch=1)
    assert found.rows[0].largest == "optimizer"
    assert found.parts["plain"] == {"batch": "activations", "context": "activations"}
    assert f"  {found.largest['plain']['batch']} (activations)  " in str(found)


def test_nothing_fits_into_a_memory_that_is_smaller_than_the_weights():
    found = fit_step(make_mlp, [], memory="1MiB")
    assert found.largest == {"plain": {"batch": 0, "context": 0}}
    assert " no " in str(found)
    assert str(found).splitlines()[-1] == (
        "fits: in 1.0 MiB; largest batch: with context=1; largest context: with batch=2048"
    )


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True), nn.Linear(64, 256)

    def forward(self, x):
        return self.up(self.attention(x, x, x)[0]).relu()


def make_attends(batch=8, context=128):
    model, x = Attends(), torch.ones(batch, context, 64)
    return model, lambda: model(x).mean()


@pytest.mark.parametrize(
    ("size", "tried", "start", "policies"),
    [
        ("batch", range(25, 28), 20, ["recompute"]),
        ("context", range(305, 308), 256, []),
        pytest.param("batch", range(8, 24), 3, ["keep", "int8", "recompute"], marks=pytest.mark.slow),
        pytest.param("context", range(295, 311), 64, ["keep", "int8", "recompute"], marks=pytest.mark.slow),
    ],
)
def test_largest_sizes_are_those_of_a_trial_of_each_size(size, tried, start, policies):
    """The bytes are linear in the batch, and quadratic in the context."""
    rows = {value: fit_step(make_attends, policies, **{size: value}).rows for value in tried}
    for i, policy in enumerate(["plain", *policies]):
        limit = rows[tried[len(tried) // 2]][i].most_bytes + 1
        fits = [value for value in tried if rows[value][i].most_bytes <= limit]
        assert 0 < len(fits) < len(tried)
        found = fit_step(make_attends, [policy], memory=limit, **{"batch": 8, "context": 128, size: start})
        assert found.largest[policy][size] == fits[-1]


SHAPES = {
    "linear, with noise": lambda size: 1_000_000 + 100 * size + 40 * (size % 2),
    "quadratic": lambda size: 1_000_000 + 1000 * size + 30 * size**2,
    "linear, then steeper": lambda size: 1_000_000 + max(100 * size, 5000 * size - 10_000_000),
    "cubic": lambda size: 1_000_000 + size**3,
    "in steps": lambda size: 1_000_000 + 1000 * -(-size // 64),
}


@pytest.mark.parametrize(("shape", "most"), list(zip(SHAPES, [8, 8, 12, 19, 42], strict=True)))
def test_search_finds_the_largest_size_in_few_steps(shape, most):
    needed = SHAPES[shape]
    for true, start, fixed in product([1, 2, 7, 64, 1000, 123_456], [1, 8, 512, 5000], [0, 1_000_000]):
        asked = []

        def count(size, asked=asked):
            asked.append(size)
            return needed(size)

        found = largest(count, needed(true), start, needed(start), fixed)
        assert needed(found) <= needed(true) < needed(found + 1)
        assert found >= true
        assert len(asked) <= most


class Placed(nn.Module):
    """Layer with a table of 100 places."""

    def __init__(self):
        super().__init__()
        self.places, self.up = nn.Parameter(torch.zeros(100, 256)), nn.Linear(256, 1024)

    def forward(self, x):
        return self.up(x + self.places[: x.shape[1]]).relu()


def test_an_error_of_the_step_ends_the_search_and_is_named(monkeypatch):
    contexts, logged = [], []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)

    def make_step(context=50):
        contexts.append(context)
        model, x = Placed(), torch.ones(64, context, 256)
        return model, lambda: model(x).mean()

    found = fit_step(make_step, ["int8"], memory="1GiB")
    assert [sizes["context"] for sizes in found.largest.values()] == [100, 100]
    assert [contexts.count(each) for each in (100, 101)] == [2, 1]
    assert list(found.errors) == ["plain", "int8"]
    assert found.errors["int8"]["context"].startswith("RuntimeError: ")
    assert str(found).splitlines()[-2] == "fits: in 1.0 GiB; largest context"
    assert str(found).splitlines()[-1].startswith("plain, int8: the step fails at context=101: RuntimeError: ")
    assert logged == []
    assert fit_step(make_step, [], memory="24MiB").errors == {}


def test_an_error_under_one_policy_ends_its_search_alone():
    def make_step(batch=8):
        model, x = Mlp(), torch.ones(batch, 64, 512)

        def step(store):
            if batch > 20 and "int8" in str(getattr(store, "policy", "")):
                raise ValueError(batch)
            with store:
                return model(x).mean()

        return model, step

    found = fit_step(make_step, ["int8", "keep"], memory="256MiB")
    assert found.largest["int8"]["batch"] == 20
    assert found.errors == {"int8": {"batch": "ValueError: 21"}}
    assert found.largest["keep"] == found.largest["plain"]
    assert found.largest["keep"]["batch"] > 100


def test_context_is_found_in_few_dry_steps():
    """A search once went down by one size at a time, from a guess that was eight times too large."""
    asked = []

    def make_step(batch=8, context=64):
        asked.append(context)
        return make_attends(batch, context)

    fit_step(make_step, [], memory="2GiB")
    assert len(asked) <= 16


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ConfigError, match="measures no steps"):
        fit_step(make_mlp, ["auto(1GiB)"])
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


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden.sin() * hidden.cos()


@pytest.mark.parametrize("policy", ["nf4", "int8"])  # in nf4, zeros are other bytes than those of an unwritten payload
def test_payloads_that_serve_twice_count_once(policy):
    def make_step():
        model, x = Twice(), torch.ones(2048, 512)
        return model, lambda: model(x).sum()

    assert fit_step(make_step, [policy]).rows[1].at_peak["payloads"] == measured_payloads(make_step, policy)


def measured_payloads(make_step, policy):
    model, step = make_step()
    with closing(ActivationStore(model, policy)) as store:
        for _ in range(2):
            with store:
                loss = step()
            stored = store.report().stored_bytes
            loss.backward()
        return stored
