"""Bytes counted in the code that Inductor writes."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from actstore.compiled.generated_code import GraphFacts, itemsizes_of, peak_of

ALONE = GraphFacts(0, frozenset(), {}, lambda nbytes: nbytes, {}, {}, {}, int)


def peak(body: str, around: GraphFacts = ALONE, **inputs: int) -> int | None:
    lines = dedent(body).strip().splitlines()
    source = "class Runner:\n    def call(self, args):\n" + "".join(f"        {line}\n" for line in lines)
    return peak_of(source, inputs, around)


def test_tensors_exist_until_their_last_name_goes() -> None:
    body = """
        a, b = args
        args.clear()
        buf0 = empty_strided_cpu((4, 5), (5, 1), torch.float32)
        cpp_fused_0(a, buf0)
        del a
        buf1 = reinterpret_tensor(buf0, (20, ), (1, ), 0)
        del buf0
        buf2 = empty_strided_cuda((10, ), (1, ), torch.float64)
        del buf1
        buf3 = empty_strided_cpu((10, ), (1, ), torch.bool)
        return (buf2, buf3, )
    """
    assert peak(body) == 160
    assert peak(body, a=1000) == 1080, "an input is there before all"
    assert peak(body, a=30, b=7) == 80 + 80 + 7, "one that is not deleted stays"
    both = {"a": ("c", 70), "b": ("c", 70)}
    assert peak(body, ALONE._replace(owners=both), a=30, b=40) == 70 + 160, "two views of one tensor"
    assert peak(body, ALONE._replace(kept=9, lasting={"a"}), a=30) == 9 + 30 + 160
    assert peak(body, ALONE._replace(lasting={"a"}).of_forward(), a=1000) == 1080
    assert peak(body, ALONE._replace(nbytes_of=lambda nbytes: -(-nbytes // 64) * 64)) == 256


def test_a_size_that_the_run_alone_knows_is_asked_for_results_alone() -> None:
    """The state of a generator is such an input, where attention runs again."""
    body = """
        assert_size_stride(a, (s14, ), (1, ), 'input')
        buf0 = torch.ops.aten.one.default(a)
        assert_size_stride(buf0, (5, ), (1, ), 'torch.ops.aten.one.default')
        del a
        buf1 = empty_strided_cpu((10, ), (1, ), torch.float32)
    """
    assert peak(body, a=70) == 70 + 5 * 8
    assert peak(body.replace("(5, )", "(s14, )"), a=70) is None
    assert peak(body.replace("(10, )", "(s14, )"), a=70) is None


def test_memory_that_is_used_again_counts_once() -> None:
    body = """
        buf0 = empty_strided_cpu((10, ), (1, ), torch.float32)
        buf1 = buf0; del buf0  # reuse
        buf2 = reinterpret_tensor(buf1, (5, 2), (2, 1), 0); del buf1  # reuse
        cpp_fused_0(buf2)
        del buf2
        buf3 = empty_strided_cpu((11, ), (1, ), torch.float32)
    """
    assert peak(body) == 44


def test_an_operator_of_several_results_holds_them_until_it_goes() -> None:
    body = """
        with torch.cuda._DeviceGuard(0):
            buf0 = torch.ops.aten.two.default(a, None)
            buf1 = buf0[0]
            assert_size_stride(buf1, (10, ), (1, ), 'two')
            buf2 = buf0[1]
            assert_size_stride(buf2, (5, ), (1, ), 'two')
            del buf1
            {delete}
            buf3 = empty_strided_cuda((100, ), (1, ), torch.int8)
    """
    around = ALONE._replace(itemsizes={(10,): 4})  # an unknown one has the largest
    assert peak(body.format(delete="pass"), around) == 40 + 40 + 100
    assert peak(body.format(delete="del buf0"), around) == 40 + 100


def test_a_result_under_a_second_name() -> None:
    body = """
        buf0 = torch.ops.aten.cumsum.default(a)
        buf1 = buf0
        assert_size_stride(buf1, (10, ), (1, ), 'cumsum')
        del buf0
    """
    assert peak(body, ALONE._replace(itemsizes={(10,): 4}), a=5) == 45


def test_an_operator_needs_its_workspace_while_it_runs() -> None:
    body = """
        buf0 = extern_kernels.convolution(a, w, None)
        buf1 = buf0[0]
        assert_size_stride(buf1, (2, ), (1, ), 'convolution')
        assert_alignment(buf1, 16, 'convolution')
        buf2 = buf0[1]
        assert_size_stride(buf2, (3, ), (1, ), 'convolution')
        del a
        buf1 = empty_strided_cpu((10, ), (1, ), torch.float32)
    """
    known = {("convolution", 40): 10, ("convolution", 50): 2000, ("mm", 40): 5000}
    around = ALONE._replace(itemsizes={(2,): 4, (3,): 4}, workspaces=known)
    assert peak(body, around, a=40) == 40 + 20 + 10
    assert peak(body, around, a=41) == 41 + 20 + 2000, "of inputs that nobody has measured: the most"


@pytest.mark.parametrize(
    "source",
    [
        "def other(args): pass",
        "def call(args): pass\ndef call(args): pass",
        "def call(args):\n    buf0 = empty_strided_cpu((s0, 2), (2, 1), torch.float32)",
        "def call(args):\n    buf0 = empty_strided_cpu((1, 2), (2, 1), torch.other)",
    ],
)
def test_code_of_another_form_is_not_counted(source: str) -> None:
    assert peak_of(source, {}, ALONE) is None


def test_a_copy_of_a_weight_does_not_hide_the_workspace_of_a_convolution() -> None:
    """It is known by its image; other convolutions need more."""
    body = """
        weight = empty_strided_cpu((5, ), (1, ), torch.float32)
        found = extern_kernels.convolution(image, weight, stride=(1, 1))
    """
    around = ALONE._replace(workspaces={("convolution", 40): 7, ("convolution", 60): 1000, ("convolution", 20): 500})
    assert peak(body, around, image=40) == 40 + 20 + 7


def test_what_forward_has_laid_out_anew_of_the_callers_counts() -> None:
    body = "found = empty_strided_cpu((4, ), (1, ), torch.float32)"
    around = ALONE._replace(owners={"primals_1": ("primals_1", 0)})  # the caller holds its own
    assert peak(body, around, primals_1=36, gradient=8) == 8 + 16
    assert peak(body, around.of_graph({}, {"primals_1"}), primals_1=36, gradient=8) == 36 + 8 + 16


def test_results_have_the_types_of_the_graph() -> None:
    body = """
        buf0 = torch.ops.aten.cat.default([a], 1)
        buf1 = buf0
        assert_size_stride(buf1, (3, ), (1, ), 'cat')
    """
    module = make_fx(lambda x: (x > 0, x.half()), tracing_mode="fake")(torch.randn(3))
    assert peak(body, a=5) == 5 + 3 * 8, "unknown"
    assert peak(body, ALONE.of_graph(itemsizes_of(module.graph), set()), a=5) == 5 + 3 * 4, "the largest of that shape"
    module = make_fx(lambda x: (x.view(-1) > 0, x.half()), tracing_mode="fake")(torch.randn(1, 3))
    assert peak(body, ALONE.of_graph(itemsizes_of(module.graph), set()), a=5) == 5 + 3 * 4, "a view has that shape, too"


def test_what_moves_waits_in_buffers() -> None:
    around = ALONE._replace(away={"mm_1": 40, "mm": 64}, buffers=lambda nbytes: min(nbytes, 50))
    forward = """
        buf0 = empty_strided_cpu((16, ), (1, ), torch.float32)
        buf1 = torch.ops.actstore.put.default(reinterpret_tensor(buf0, (4, 4), (4, 1), 0), 'raw @ disk', 'a', 0, 1)
        buf2 = buf1
        del buf0
        del buf1
        buf3 = empty_strided_cpu((100, ), (1, ), torch.bool)
        return (buf3, buf2, )
    """
    assert peak(forward, around) == 100 + 50
    assert peak(forward, around._replace(buffers=lambda nbytes: 0)) == 100
    backward = """
        mm_payload_put, mm_1_payload_put_2 = args
        buf0 = torch.ops.actstore.ahead.default(mm_1_payload_put_2)
        buf1 = torch.ops.actstore.read.default(mm_1_payload_put_2, buf0, device(type='cpu'))
        del mm_1_payload_put_2
        buf2 = buf1
        assert_size_stride(buf2, (3, 3), (3, 1), 'torch.ops.actstore.read.default')
        del buf1
        buf3 = empty_strided_cpu((70, ), (1, ), torch.bool)
        del buf2
        buf4 = torch.ops.actstore.read.default(mm_payload_put, buf0, device(type='cpu'))
        del buf4
    """
    assert peak(backward, around) == 40 + 70 + 50, "the other payload is fetched ahead"
    assert peak(backward, around._replace(buffers=lambda nbytes: 0)) == 70 + 64
    assert peak(backward, ALONE) is None, "an unknown payload"
