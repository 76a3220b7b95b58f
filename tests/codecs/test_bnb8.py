"""bnb8: its error, elements that are not finite, and what it needs of bitsandbytes."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Bnb8
from actstore.errors import PayloadError, SpecError
from actstore.kernels.torch import bnb8
from actstore.policy import parse_decision
from tests.codecs.contract import aligned, check_codec, tensor_of
from tests.oracles.samples import DTYPES, random_bits

pytest.importorskip("bitsandbytes")


def roundtrip(x):
    _, payload = aligned(Bnb8().size(Spec.of(x)).nbytes)
    Bnb8().encode(x, payload)
    back = torch.empty_like(x)
    Bnb8().decode(payload, back)
    return payload, back


@given(
    st.sampled_from(["normal", "heavy", "one-sided", "sparse", "constant"]),
    st.sampled_from(DTYPES),
    st.integers(1, 900),
    st.integers(-12, 12),
)
def test_error_bound(kind, dtype, numel, exponent):
    rng = np.random.default_rng(numel)
    values = {
        "normal": rng.standard_normal,
        "heavy": lambda n: rng.standard_t(3, n).clip(-15, 15),
        "one-sided": rng.random,
        "sparse": lambda n: rng.standard_normal(n) * (rng.random(n) < 0.1),
        "constant": lambda n: np.full(n, -3.7),
    }[kind](numel)
    x = torch.tensor(values * 2.0**exponent).to(getattr(torch, dtype))
    _, back = roundtrip(x)
    info = torch.finfo(x.dtype)
    for block, found in zip(x.double().split(256), back.double().split(256), strict=True):
        largest = block.abs().max()
        half_ulp = found.abs().clamp(min=info.smallest_normal) * info.eps
        assert ((block - found).abs() <= largest / 128 + half_ulp).all()
        assert (found[block == 0].abs() <= largest / 40_000 + info.smallest_normal).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_not_finite_comes_back_as_nan(dtype, bad):
    x = torch.linspace(-1, 1, 600).to(getattr(torch, dtype))
    clean = roundtrip(x)[1]
    for place in (0, 300, 599):
        spoiled = x.clone()
        spoiled[place] = bad
        back = roundtrip(spoiled)[1]
        block = torch.arange(600) // 256 == place // 256
        assert back[block].isnan().all()
        assert torch.equal(back[~block], clean[~block])


def test_the_documented_example():
    payload, back = roundtrip(torch.tensor([1.0, -0.5, 0.25, 0.0]))
    assert bytes(payload.tolist()) == bytes.fromhex("ff23c983" + "00" * 12 + "0000803f")
    assert back.tolist() == pytest.approx([1, -0.50078124, 0.24765624, 0.00002125], rel=1e-6)


@pytest.mark.parametrize("numel", [1, 256, 600, 1024, 1500])
def test_in_several_calls(numel, monkeypatch):
    monkeypatch.setattr(bnb8, "CALL_NUMEL", 512)
    check_codec(Bnb8(), tensor_of(random_bits(numel, "bfloat16", seed=1), torch.bfloat16))


def test_other_dtypes_and_short_payloads_are_refused():
    with pytest.raises(SpecError, match="Use 'raw'"):
        Bnb8().size(Spec.of(torch.ones(4, dtype=torch.int64)))
    x = torch.ones(300)
    payload, _ = roundtrip(x)
    with pytest.raises(PayloadError, match="are needed"):
        Bnb8().decode(payload[:-1], x)


def test_policy_text():
    assert parse_decision("bnb8").codec == Bnb8()
    assert (Bnb8().lossless, Bnb8().keyed, Bnb8().reproducible) == (False, False, False)


@pytest.mark.parametrize("missing", [False, True])
def test_the_library_is_loaded_by_the_first_encode(missing):
    code = f"""
        import sys, torch, actstore
        from actstore.codecs import Bnb8
        from actstore.errors import KernelUnavailable
        from actstore.base.spec import Spec
        x, out = torch.ones(64), torch.empty(512, dtype=torch.uint8)
        Bnb8().size(Spec.of(x))
        assert "bitsandbytes" not in sys.modules
        if {missing}:
            sys.modules["bitsandbytes"] = None
        try:
            Bnb8().encode(x, out)
        except KernelUnavailable as error:
            assert {missing} and "pip install 'actstore[bnb]'" in str(error) and error.package == "bitsandbytes"
        else:
            assert not {missing} and "bitsandbytes" in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_the_legacy_stream_is_ordered_into_the_current_one(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current", log))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("legacy", log))
    with bnb8._legacy_stream(torch.device("cuda", 0)):
        log.append("work")
    assert log == ["legacy waits for current", "work", "current waits for legacy"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_another_stream(dtype):
    x = torch.zeros(1 << 20, dtype=getattr(torch, dtype), device="cuda")
    payload = torch.empty(Bnb8().size(Spec.of(x)).nbytes, dtype=torch.uint8, device="cuda")
    back = torch.empty_like(x)
    Bnb8().encode(x, payload)
    Bnb8().decode(payload, back)
    torch.cuda.synchronize()
    values = torch.linspace(-2, 2, len(x)).to(x.dtype)
    values[5] = torch.nan
    source = values.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # whoever does not wait for this stream sees the zeros
        x.copy_(source)
        Bnb8().encode(x, payload)
        x.zero_()
        Bnb8().decode(payload, back)
    assert not stream.query()
    stream.synchronize()
    assert back[:256].isnan().all()
    assert ((back[256:].cpu() - values[256:]).abs() <= 2 / 128 + 2.0**-6).all()
