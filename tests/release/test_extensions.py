"""Codecs and tiers of other packages: the example package, and packages that are wrong."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import actstore
from actstore.base import extensions
from actstore.base.compiler import tell_compiler
from actstore.codecs import Bit1, Codec, E5m6, Exact, Int8, Raw, Zmask, check_dtype
from actstore.errors import ChainError, ConfigError, UnknownCodecError
from actstore.policy import Encode, Offload, parse_decision
from actstore.policy.options import codec_text
from actstore.testing import check_codec
from tests.release.distributions import offer

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).parent / "example_codec"


@pytest.fixture(autouse=True)
def nothing_remembered():
    extensions._load.cache_clear()
    yield
    extensions._load.cache_clear()


def test_the_example_imports_public_rooms_only():
    rooms = {
        room
        for path in EXAMPLE.rglob("*.py")
        for room in re.findall(r"^from (actstore\S*) import", path.read_text(), re.MULTILINE)
    }
    assert rooms == {"actstore.codecs", "actstore.tiers", "actstore.errors"}


@pytest.fixture
def example(tmp_path, monkeypatch) -> ModuleType:
    """The example package as pip would install it."""
    monkeypatch.syspath_prepend(EXAMPLE)
    offer(
        tmp_path,
        monkeypatch,
        "example-codec",
        {extensions.CODECS: {"bf16": "example_codec:Bf16"}, extensions.TIERS: {"shelf": "example_codec:Shelf"}},
    )
    yield import_module("example_codec")
    for name in [name for name in sys.modules if name.partition(".")[0] == "example_codec"]:
        del sys.modules[name]


def train(policy: str | None, steps: int = 5) -> tuple[list[float], torch.Tensor, actstore.Report | None]:
    """Losses, the last gradient of the first weight, and the report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(128, 32), torch.randn(128, 1)
    store = None if policy is None else actstore.ActivationStore(model, policy, min_bytes=0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if store is None:
            loss = nn.functional.mse_loss(model(x), y)
        else:
            with store:
                loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model[0].weight.grad, store and store.report()


def test_a_codec_and_a_tier_of_another_package_train(example):
    plain, gradient, _ = train(None)
    exact, same, report = train("raw @ shelf")
    assert exact == plain
    assert torch.equal(same, gradient)
    assert [medium.tier for medium in report.media] == ["shelf"]
    assert report.media[0].peak_bytes > 50_000
    assert report.live_bytes == 0
    lossy, near, report = train("1 : keep; * : bf16(round=zero) @ shelf > host")
    assert lossy != plain
    assert (near - gradient).norm() / gradient.norm() < 0.01
    assert {site.decision for site in report.sites} >= {"bf16(round=zero) @ shelf > host"}


def test_they_are_words_of_the_policy_text(example):
    assert parse_decision("bf16(round=zero)") == Encode(example.Bf16(round="zero"))
    offload = parse_decision("bf16 @ shelf > disk")
    assert offload == Offload(example.Bf16(), ("shelf", "disk"))
    assert parse_decision(str(offload)) == offload
    assert parse_decision("zstd(bf16) @ host").codec.inner == example.Bf16()
    assert actstore.encode(torch.ones(64), "bf16").ratio == 2


def test_the_bound_of_the_example_is_tight(example):
    """Half of it holds to nearest, but not toward zero."""
    check_codec(example.Bf16(), lambda x: example.error(x) / 2)
    check_codec(example.Bf16("zero"), example.error)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_codec(example.Bf16("zero"), lambda x: example.error(x) / 2)


def test_what_contributing_says_of_their_tests_runs(example):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for code in blocks:
        names = {}
        exec(code, names)
        names["test_promises"]()


def test_the_compiler_leaves_their_modules_alone(tmp_path, monkeypatch):
    """Their code runs between compiled regions, and is none of the model's."""
    rules = import_module("torch._dynamo.trace_rules")
    (tmp_path / "late_codec.py").write_text(
        "from actstore.codecs import Raw\n\n\nclass Late(Raw):\n    name = 'late'\n\n"
        "    def encode(self, src, out, key=0):\n        return super().encode(src, out, key)\n"
    )
    offer(tmp_path, monkeypatch, "late-codec", {extensions.CODECS: {"late": "late_codec:Late"}})
    late = import_module("late_codec")
    tell_compiler()
    assert not rules.check(late.Late.encode)
    parse_decision("late")
    tell_compiler()
    assert rules.check(late.Late.encode)


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        (Raw(), None),
        (Bit1(), None),
        (Zmask(Raw()), None),
        (E5m6(), lambda x: (x.double().abs() / 128).clamp(min=2.0**-21)),
        (Int8(), lambda x: x.double().abs().amax() / 127 if x.numel() else x.double()),
        (Int8(round="stochastic"), lambda x: x.double().abs().amax() / 63 if x.numel() else x.double()),
    ],
    ids=lambda value: codec_text(value) if isinstance(value, Codec) else "",
)
def test_our_own_keep_them_too(codec, error):
    check_codec(codec, error)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("bf61", UnknownCodecError, "Did you mean 'bf16'"),
        ("int8 @ shell", actstore.errors.PolicyError, "Did you mean 'shelf'"),
        ("bf16 @ shelf > shelf", ChainError, "names a tier twice.*: 'shelf'"),
        ("bf16 @ disk > shelf > host", ChainError, "goes up.*: 'host > shelf > disk'"),
    ],
)
def test_near_words_know_of_them(example, text, kind, words):
    with pytest.raises(kind, match=words):
        parse_decision(text)


def test_our_own_names_win(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, "thief", {extensions.CODECS: {"int8": "nowhere:Int8"}})
    assert parse_decision("int8") == Encode(Int8())


WRONG = {
    "crash": ("raise OSError('no library')", "thing", "OSError: no library"),
    "missing": ("", "thing", "AttributeError: .*no attribute 'thing'"),
    "instance": ("thing = 3", "thing", "3 must be a subclass of actstore.codecs.base.Codec"),
    "half": (
        "from actstore.codecs import Codec\nclass thing(Codec): name = 'odd'",
        "thing",
        "does not define .*decode, encode",
    ),
    "other": ("from actstore.codecs import Raw as thing", "thing", "Raw.name is 'raw', and must be 'odd'"),
}


@pytest.mark.parametrize(("code", "attribute", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_used_names_the_package(tmp_path, monkeypatch, code, attribute, words):
    (tmp_path / "oddly.py").write_text(code)
    monkeypatch.delitem(sys.modules, "oddly", raising=False)
    offer(tmp_path, monkeypatch, "odd-package", {extensions.CODECS: {"odd": f"oddly:{attribute}"}})
    source = f"the entry point 'odd = oddly:{attribute}' in the group actstore.codecs of odd-package 1.0"
    with pytest.raises(ConfigError, match=f"(?s)line 1, column 5: 'odd' cannot be .*{words}.*{source}"):
        parse_decision("* : odd")


def test_two_packages_of_one_name(tmp_path, monkeypatch):
    for package in ("first", "second"):
        offer(tmp_path, monkeypatch, package, {extensions.CODECS: {"odd": "oddly:thing"}})
    with pytest.raises(ConfigError, match=r"of first 1\.0 and by .* of second 1\.0. Uninstall all but one"):
        parse_decision("odd")


def test_a_tier_that_does_not_open_is_told_when_the_store_is_built(tmp_path, monkeypatch):
    (tmp_path / "oddtier.py").write_text(
        "from example_codec import Shelf\n"
        "class Far(Shelf):\n    name = 'far'\n    def __init__(self, device): raise TimeoutError('no server')\n"
    )
    monkeypatch.syspath_prepend(EXAMPLE)
    offer(tmp_path, monkeypatch, "far-tier", {extensions.TIERS: {"far": "oddtier:Far"}})
    with pytest.raises(
        ConfigError,
        match=r"tier 'far' cannot be opened: TimeoutError: no server. Repair or uninstall its package: .*far-tier",
    ):
        actstore.ActivationStore(nn.Linear(1, 1), "raw @ far")


# -- the checks see codecs that are wrong -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy(Codec):
    """A right one, of which each below breaks one promise."""

    name = "odd"
    lossless = False

    def accepts(self, dtype):
        return dtype is torch.float32

    def size(self, spec):
        check_dtype(self, spec.dtype)
        return Raw().size(spec)

    def encode(self, src, out, key=0):
        return Raw().encode(src, out, key)

    def decode(self, buf, out, key=0):
        Raw().decode(buf, out, key)


class _Rounds(_Copy):
    def decode(self, buf, out, key=0):
        super().decode(buf, out, key)
        out.round_()


class _Exactly(_Rounds):
    lossless = True


class _Hides(_Copy):
    def decode(self, buf, out, key=0):
        super().decode(buf, out, key)
        out.nan_to_num_()


class _WritesBeyond(_Copy):
    def encode(self, src, out, key=0):
        out.as_strided((out.numel() + 1,), (1,), out.storage_offset())[-1] = 0
        return super().encode(src, out, key)


class _SaysLess(_Copy):
    def encode(self, src, out, key=0):
        return max(0, super().encode(src, out, key) - 4)


class _LeavesHoles(_Copy):
    def size(self, spec):
        return Exact(super().size(spec).nbytes + 16)

    def encode(self, src, out, key=0):
        return super().encode(src, out, key) + 16


class _ChangesSource(_Copy):
    def encode(self, src, out, key=0):
        used = super().encode(src, out, key)
        src.zero_()
        return used


class _Trusts(_Copy):
    def decode(self, buf, out, key=0):
        room = torch.zeros(out.numel() * 4, dtype=torch.uint8)
        room[: buf.numel()] = buf[: room.numel()]
        super().decode(room, out, key)


class _TakesAll(_Copy):
    def size(self, spec):
        return Raw().size(spec)


class _Changes(_Copy):
    pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_Changes, "Decorate its class"),
        (_Rounds, "beyond the bound"),
        (_Exactly, "not bit for bit"),
        (_Hides, "which hides it"),
        (_WritesBeyond, "wrote beyond"),
        (_SaysLess, "encode returns"),
        (_LeavesHoles, "gave other bytes"),
        (_ChangesSource, "changed the tensor"),
        (_Trusts, "a payload that is cut does not raise PayloadError"),
        (_TakesAll, r"size of torch\.\w+ does not raise SpecError"),
    ],
)
def test_the_checks_see_a_codec_that_is_wrong(tmp_path, monkeypatch, kind, words):
    monkeypatch.setitem(sys.modules, "planted", ModuleType("planted"))
    sys.modules["planted"].kind = kind
    kind.__module__, kind.__qualname__ = "planted", "kind"  # as pickle finds it
    if kind is not _Changes:
        dataclass(frozen=True)(kind)
    offer(tmp_path, monkeypatch, "planted", {extensions.CODECS: {"odd": "planted:kind"}})
    with pytest.raises(AssertionError, match=words):
        check_codec(kind(), torch.zeros_like)


def test_the_checks_want_an_error_bound_and_a_name():
    with pytest.raises(AssertionError, match="give check_codec the error bound"):
        check_codec(_Copy())
    with pytest.raises(UnknownCodecError, match="no codec is called 'odd'"):
        check_codec(_Copy(), torch.zeros_like)
