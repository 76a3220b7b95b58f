"""Times of a fit: the work that it counts against PyTorch's own counter, and what the rates of a device make of it."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from actstore import ActivationStore, fit_step
from actstore.errors import ConfigError
from actstore.inspection.fit import work
from actstore.plan.hardware import Hardware
from actstore.plan.solver.chain import Links
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES

ROWS, WIDTH, HIDDEN = 2048, 256, 1024
PRODUCTS = Hardware(flops=1e6, single_flops=1e6)  # no time for anything but products


class Mlp(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make_mlp(blocks=2):
    model, x = Mlp(blocks), torch.ones(ROWS, WIDTH)
    return model, lambda: model(x).square().mean()


def make_attention():
    model, x = nn.TransformerEncoderLayer(WIDTH, 4, 512, dropout=0.0, batch_first=True), torch.ones(8, 64, WIDTH)
    return model, lambda: model(x).square().mean()


def make_convolutions():
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2)), torch.ones(8, 3, 32, 32)
    return model, lambda: model(x).square().mean()


def rows_on(monkeypatch, device, make_step, policies, **options):
    monkeypatch.setattr("actstore.inspection.fit.fit.rates_of", lambda name: device)
    return {row.policy: row for row in fit_step(make_step, policies, device="cpu", **options).rows}


def exact_shares(monkeypatch):
    monkeypatch.setattr(work, "FLOPS_SHARES", (1.0,))
    monkeypatch.setattr(work, "MEMORY_SHARES", (1.0,))


@pytest.mark.parametrize("make_step", [make_mlp, make_convolutions])
def test_products_are_those_that_pytorch_counts(monkeypatch, make_step):
    exact_shares(monkeypatch)
    _, step = make_step()
    with FlopCounterMode(display=False) as counter:
        step().backward()
    row = rows_on(monkeypatch, PRODUCTS, make_step, [])["plain"]
    assert row.ms == pytest.approx([counter.get_total_flops() / 1e6] * 2)


def test_attention_of_a_cpu_is_counted(monkeypatch):
    """Its operators are not in PyTorch's counter: 2 products forward and 5 backward, beside the linear layers."""
    exact_shares(monkeypatch)
    tokens, heads, length = 8 * 64, 4, 64
    linear = 2 * tokens * WIDTH * (4 * WIDTH + 2 * 512)
    product = 2 * 8 * heads * length * length * (WIDTH // heads)
    row = rows_on(monkeypatch, PRODUCTS, make_attention, [])["plain"]
    # the input needs no gradient
    assert row.ms[0] * 1e6 == pytest.approx(3 * linear - 2 * tokens * WIDTH * 3 * WIDTH + 7 * product)


def test_a_recomputed_block_multiplies_once_more_for_what_backward_reads(monkeypatch):
    """Its second layer does not run again: nobody reads what that returns."""
    exact_shares(monkeypatch)
    rows = rows_on(monkeypatch, PRODUCTS, make_mlp, ["recompute", "keep", "int8"])
    first_layers = 2 * ROWS * WIDTH * HIDDEN * 2
    assert (rows["recompute"].ms[0] - rows["plain"].ms[0]) * 1e6 == pytest.approx(first_layers)
    assert rows["keep"].times_plain == rows["int8"].times_plain == (1.0, 1.0)


def test_codecs_read_and_write_at_the_rate_of_memory(monkeypatch):
    exact_shares(monkeypatch)
    device = replace(PRODUCTS, flops=float("inf"), single_flops=float("inf"), memory_rate=1e6)
    rows = rows_on(monkeypatch, device, make_mlp, ["int8"])
    model, step = make_mlp()
    with closing(ActivationStore(model, "int8")) as store:
        with store:
            step()
        stored = [site for site in store.report().sites if site.stored_bytes]
    nbytes = sum(site.saved_bytes + site.stored_bytes for site in stored)
    asked = 4 * ROWS * WIDTH + 2 * 4  # the batch: zeros in a dry step, and all are read for a second value of a mask
    more = (rows["int8"].ms[0] - rows["plain"].ms[0]) * 1e6
    assert more == pytest.approx(2 * nbytes + asked, rel=0.001)  # encode and decode


def test_copies_run_beside_compute_or_not(monkeypatch):
    exact_shares(monkeypatch)
    disk = Links(disk_out=1e6, disk_back=2e6, on_host=True)
    rows = rows_on(monkeypatch, replace(PRODUCTS, links=disk), make_mlp, ["raw @ disk"])
    saved = 4 * ROWS * (WIDTH + HIDDEN + WIDTH + HIDDEN + WIDTH)
    copies = saved / 1e6 + saved / 2e6
    compute = rows["plain"].ms[0]
    assert rows["raw @ disk"].ms == pytest.approx((max(compute, copies), compute + copies), rel=0.01)


def test_bytes_do_not_depend_on_the_time_that_a_dry_step_takes(monkeypatch):
    device = replace(PRODUCTS, links=Links(out=1e6, back=1e6))
    usual = rows_on(monkeypatch, device, make_mlp, ["raw @ disk"], blocks=64)["raw @ disk"]
    monkeypatch.setattr("actstore.transfer.timekeeper.LATE_NS", -1)  # as if other processes had the core in each wait
    assert (
        rows_on(monkeypatch, device, make_mlp, ["raw @ disk"], blocks=64)["raw @ disk"].most_bytes == usual.most_bytes
    )


def test_host_memory_is_outside_of_a_gpu(monkeypatch):
    exact_shares(monkeypatch)
    gpu = replace(PRODUCTS, links=Links(out=1e6, back=1e6))
    cpu = replace(PRODUCTS, links=Links(on_host=True))
    # 640 MiB of activations: more than two windows of a GPU
    on_gpu, on_cpu = (
        rows_on(monkeypatch, device, make_mlp, ["raw @ host", "raw @ disk"], blocks=64) for device in (gpu, cpu)
    )
    plain = on_gpu["plain"]
    assert on_gpu["raw @ host"].most_bytes == on_gpu["raw @ disk"].most_bytes
    left = DEVICE_WINDOW_NBYTES + plain.at_peak["weights"]  # a full window, beside the gradients that are there by then
    assert on_gpu["raw @ host"].most_bytes < plain.peak_bytes - plain.at_peak["activations"] + left
    assert on_cpu["raw @ host"].least_bytes > plain.peak_bytes
    assert on_gpu["raw @ host"].ms[1] == on_gpu["raw @ disk"].ms[1] > plain.ms[1]  # this disk takes no time
    assert on_cpu["raw @ host"].ms == plain.ms


def test_sixteen_bits_have_a_rate_of_their_own(monkeypatch):
    exact_shares(monkeypatch)

    def make_step():
        model, step = make_mlp()

        def run():
            with torch.autocast("cpu", torch.bfloat16):
                return step()

        return model, run

    device = replace(PRODUCTS, flops=4e6)
    single, half = (rows_on(monkeypatch, device, make, [])["plain"].ms[0] for make in (make_mlp, make_step))
    assert half == pytest.approx(single / 4)


def test_shares_of_the_best_rates_give_a_range():
    row = fit_step(make_mlp, ["int8"], device="a100-sxm").rows[1]
    least, most = row.ms
    assert most == pytest.approx(2 * least, rel=0.1)  # 0.9 / 0.45 of the products, 0.95 / 0.5 of the bytes
    low, high = row.times_plain
    assert 1 <= low < high


def test_this_cpu_is_measured_and_the_table_says_what_was_not():
    table = str(fit_step(make_mlp, [], device="cpu"))
    assert "ms" in table.splitlines()[0]
    assert "times plain" in table.splitlines()[0]
    assert "not measured" not in table
    assert "by the data sheet of rtx-4090; not measured" in str(fit_step(make_mlp, [], device="rtx-4090"))
    assert "times plain" not in str(fit_step(make_mlp, []))
    found = work.rates_of("cpu")
    assert all(0 < rate < float("inf") for rate in (found.flops, found.single_flops, found.memory_rate))


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match=r"device='h100': must be one of cpu, h100-sxm, a100-pcie, .*, titan-v"):
        fit_step(make_mlp, [], device="h100")


def test_the_input_of_an_operator_that_is_expanded_counts_its_own_memory(monkeypatch):
    exact_shares(monkeypatch)

    def make_step():
        model = nn.Linear(WIDTH, WIDTH)
        x = torch.ones(1, WIDTH).expand(ROWS, WIDTH)
        return model, lambda: F.relu(x).sum() + model(x[:1]).sum()

    device = Hardware(memory_rate=1e6)
    ms = rows_on(monkeypatch, device, make_step, [], make_optimizer=None)["plain"].ms[0]
    written, weights = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH
    # relu writes it, sum reads it; weights are read, and their gradients written
    assert ms * 1e6 == pytest.approx(2 * written + 2 * weights, rel=0.01)
