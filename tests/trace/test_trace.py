"""Events, their file, the export and the figures from them."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Barrier, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

import actstore
from actstore.base.spec import Site
from actstore.errors import ConfigError, PayloadError
from actstore.trace import KINDS, Event, Trace
from actstore.trace.summary import Summary, union

MS = 1_000_000

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def events(draw: st.DrawFn) -> Event:
    begin = draw(st.integers(0, 60))
    tier = draw(st.sampled_from(["", "host", "disk"]))
    return Event(
        draw(st.sampled_from(KINDS)), begin, begin + draw(st.integers(0, 30)), draw(texts), draw(st.integers(0, 3)),
        tier, draw(st.integers(0, 2**62)), draw(texts),
    )  # fmt: skip


def trace_of(rows: list[Event], **options: object) -> Trace:
    trace = Trace(**options)  # type: ignore[arg-type]
    for row in rows:
        trace.add(*row)
    return trace


def a_step() -> list[Event]:
    """Forward 0 to 40 ms, backward 40 to 100, and a stall at 60; the fetch from disk runs on into the end of it."""
    return [
        Event("forward", 0, 40 * MS),
        Event("encode", 5 * MS, 6 * MS, "a[0]", nbytes=8),
        Event("offload", 10 * MS, 30 * MS, "a[0]", 0, "host", 40 * MS),
        Event("offload", 20 * MS, 50 * MS, "b[0]", 0, "host", 20 * MS),
        Event("keep", 7 * MS, 7 * MS, "c[0]", 0, "", 5, "small"),
        Event("fetch", 50 * MS, 70 * MS, "a[0]", 0, "disk", 10 * MS),
        Event("stall", 60 * MS, 70 * MS, "a[0]", 0, "disk"),
        Event("backward", 40 * MS, 100 * MS),
    ]


# -- recording --------------------------------------------------------------------------------------------------------


def test_an_event_reads_as_it_was_recorded() -> None:
    trace = Trace()
    trace.add("offload", 5, 9, Site("blocks.0.attn", 1), 3, "disk", 4096, "late")
    assert trace.events() == [Event("offload", 5, 9, "blocks.0.attn[1]", 3, "disk", 4096, "late")]
    assert trace.events()[0].lane == "offload disk"
    assert trace.events()[0].duration_ns == 4


@pytest.mark.parametrize(("kind", "lane"), [("forward", "compute"), ("stall", "compute"), ("keep", "host")])
def test_lanes(kind: str, lane: str) -> None:
    assert Event(kind, 0, 1, tier="disk").lane == lane  # type: ignore[arg-type]


def test_beyond_the_limit_the_oldest_go_and_are_counted() -> None:
    trace = Trace(limit=3)
    for moment in range(5):
        assert trace.lost == max(0, moment - 3)
        trace.add("stall", moment, moment + 1)
    assert [event.begin_ns for event in trace.events()] == [2, 3, 4]
    assert (len(trace), trace.lost) == (3, 2)


def test_a_limit_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"limit=0\): must be 1 or more"):
        Trace(limit=0)


def test_threads_record_and_read_at_once() -> None:
    trace, barrier = Trace(limit=500), Barrier(4)

    def record(number: int) -> None:
        barrier.wait()
        for moment in range(1000):
            trace.add("fetch", moment, moment, step=number)
            if moment % 50 == 0:
                assert len(trace.events()) <= 500

    threads = [Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(trace), trace.lost) == (500, 3500)


def test_recording_while_the_trace_is_read() -> None:
    trace = Trace()

    class Busy:
        def __str__(self) -> str:
            trace.add("keep", 2, 2)
            return "busy"

    for _ in range(3):
        trace.add("stall", 0, 1, Busy())
    assert [event.site for event in trace.events()] == ["busy"] * 3
    assert len(trace) == 6


def test_the_last_whole_step() -> None:
    assert Trace().last_step() is None
    assert trace_of([Event("fetch", 0, 1, step=4)]).last_step() == 4
    halves = [Event("forward", 0, 1, step=2), Event("backward", 1, 2, step=2), Event("forward", 2, 3, step=3)]
    assert trace_of(halves).last_step() == 2
    assert trace_of(halves).steps() == [2, 3]
    assert [event.kind for event in trace_of(halves).events(3)] == ["forward"]


# -- the file ---------------------------------------------------------------------------------------------------------


@given(rows=st.lists(events(), max_size=5), device=texts)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Event], device: str) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.ndjson"
    trace_of(rows, device=device).write(path)
    read = Trace.read(path)
    assert read.events() == rows
    assert read.device == device


def test_the_first_line_says_what_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    trace = trace_of([Event("stall", 0, 1)] * 5, limit=3, device="cpu")
    trace.write(path)
    first, *rest = path.read_text().splitlines()
    header = json.loads(first)
    assert header.pop("torch")
    assert header == {
        "format": "actstore-trace", "version": 1, "clock": "time.perf_counter_ns", "events": 3, "lost": 2,
        "device": "cpu", "actstore": actstore.__version__,
    }  # fmt: skip
    assert json.loads(rest[0]) == {"kind": "stall", "begin_ns": 0, "end_ns": 1}
    assert Trace.read(path).lost == 2


HEADER = {"format": "actstore-trace", "version": 1, "events": 1, "lost": 0, "device": ""}
EVENT = {"kind": "stall", "begin_ns": 3, "end_ns": 4}


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        ([], 1, "the file is empty"),
        (["{"], 1, "not JSON"),
        (["[" * 100_000], 1, "not JSON"),
        (["[]"], 1, "is not a JSON object"),
        ([{}], 1, 'no "format": "actstore-trace"'),
        ([HEADER | {"version": 2, "actstore": "9.9"}], 1, "version 2, and this is 1. Read it with actstore '9.9'"),
        ([HEADER | {"events": "1"}, EVENT], 1, "events '1' is not a whole number"),
        ([HEADER | {"lost": -1}, EVENT], 1, "lost -1 is not from 0"),
        ([HEADER | {"device": 1}, EVENT], 1, "device 1 is not text"),
        ([HEADER], 1, "promises 1 events and 0 follow: the file was cut"),
        ([HEADER, EVENT, EVENT], 3, "promises 1 events and 2 follow"),
        ([HEADER, '{"kind": "sta'], 2, "not JSON"),
        ([HEADER, "3"], 2, "3 is not a JSON object"),
        ([HEADER, {"kind": "stall"}], 2, "no begin_ns and no end_ns"),
        ([HEADER, EVENT | {"kind": "nap"}], 2, "kind 'nap' is not one of forward,"),
        ([HEADER, EVENT | {"kind": ["stall"]}], 2, "is not text"),
        ([HEADER, EVENT | {"end_ns": 2}], 2, "end_ns 2 is before begin_ns 3"),
        ([HEADER, EVENT | {"begin_ns": 3.5}], 2, "begin_ns 3.5 is not a whole number"),
        ([HEADER, EVENT | {"step": True}], 2, "step True is not a whole number"),
        ([HEADER, EVENT | {"nbytes": -1}], 2, "nbytes -1 is not from 0"),
        ([HEADER, EVENT | {"end_ns": 2**63}], 2, "end_ns 9223372036854775808 is not from 0 to"),
        ([HEADER, EVENT | {"colour": "red"}], 2, "an event has no 'colour'"),
        ([HEADER, EVENT | {"site": "x" * 10**6, "step": "x" * 10**6}], 2, "is not a whole number"),
    ],
)
def test_other_files_are_refused_with_the_place(tmp_path: Path, lines: list[object], line: int, message: str) -> None:
    path = tmp_path / "t.ndjson"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in lines))
    with pytest.raises(PayloadError) as caught:
        Trace.read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert caught.value.facts == {"path": path, "line": line}
    assert len(str(caught.value)) < 500


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PayloadError, match="not text in UTF-8"):
        Trace.read(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory. Give a file"):
        Trace.read(tmp_path / "none")
    for write in (Trace().write, Trace().to_chrome):
        with pytest.raises(ConfigError, match=r"Is a directory. Choose a file that can be written"):
            write(tmp_path)


# -- for ui.perfetto.dev ----------------------------------------------------------------------------------------------


def test_chrome_records(tmp_path: Path) -> None:
    trace_of(a_step(), device="cuda:0").to_chrome(tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {record["tid"]: record["args"]["name"] for record in records if record["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "offload host", "offload host 2", "fetch disk", "host"]
    assert records[0] == {
        "ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "actstore on cuda:0"},
    }  # fmt: skip
    offload = next(record for record in records if record.get("cat") == "offload")
    assert offload == {
        "name": "offload a[0]", "cat": "offload", "ph": "X", "pid": 1, "tid": 2, "ts": 10_000.0, "dur": 20_000.0,
        "args": {"step": 0, "site": "a[0]", "tier": "host", "bytes": 40 * MS, "GB/s": 2.0},
    }  # fmt: skip
    keep = next(record for record in records if record.get("cat") == "keep")
    assert (keep["ph"], keep["s"], keep["args"]["note"]) == ("i", "t", "small")


def test_in_chrome_what_begins_together_shares_a_thread(tmp_path: Path) -> None:
    trace_of([Event("encode", 0, 1), Event("forward", 0, 3), Event("backward", 3, 5)]).to_chrome(tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [record["cat"] for record in records if record["ph"] == "X"] == ["forward", "encode", "backward"]
    assert {record["tid"] for record in records if record["ph"] == "X"} == {1}


@given(rows=st.lists(events(), max_size=12))
def test_in_chrome_every_event_is_there_and_those_of_a_thread_nest(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Event]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    trace_of(rows).to_chrome(path)
    records = [record for record in json.loads(path.read_text())["traceEvents"] if record["ph"] in "Xi"]
    zero = min((row.begin_ns for row in rows), default=0)
    found = sorted((r["cat"], round(1000 * r["ts"]) + zero, round(1000 * r.get("dur", 0))) for r in records)
    assert found == sorted((row.kind, row.begin_ns, 0 if row.kind == "keep" else row.duration_ns) for row in rows)
    spans = [(r["tid"], round(1000 * r["ts"]), round(1000 * (r["ts"] + r["dur"]))) for r in records if r["ph"] == "X"]
    for thread, begin, end in spans:
        assert not any(other == thread and begin < b < end < e for other, b, e in spans)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_summary_of_a_step() -> None:
    summary = trace_of(a_step()).summary(0)
    assert (summary.steps, summary.begin_ns, summary.span_ns) == (1, 0, 100 * MS)
    assert (summary.compute_ns, summary.stall_ns, summary.stalls) == (90 * MS, 10 * MS, 1)
    assert (summary.copy_ns, summary.exposed_ns, summary.kept_nbytes) == (60 * MS, 10 * MS, 5)
    compute, offload, fetch, host = summary.lanes
    assert (compute.name, compute.busy_ns, compute.gbps) == ("compute", 90 * MS, None)
    assert (offload.name, offload.events, offload.nbytes) == ("offload host", 2, 60 * MS)
    assert (offload.busy_ns, offload.overlap_ns, offload.exposed_ns, offload.gbps) == (40 * MS, 40 * MS, 0, 1.5)
    assert (fetch.name, fetch.busy_ns, fetch.overlap_ns, fetch.exposed_ns) == ("fetch disk", 20 * MS, 10 * MS, 10 * MS)
    assert (host.name, host.busy_ns, host.events) == ("host", 0, 1)
    assert summary.words == "copies hidden: 83 %, stall 10.0 ms of 100.0 ms"
    assert summary.bound == "compute 90 % busy"


@pytest.mark.parametrize(
    ("stall_ns", "words"),
    [
        (0, "copies hidden: 100 %, stall 0.0 ms of 100.0 ms"),
        (30_000, "copies hidden: > 99 %, stall 0.03 ms of 100.0 ms"),
        (100 * MS - 1, "copies hidden: < 1 %, stall 100.0 ms of 100.0 ms"),
        (100 * MS, "copies hidden: 0 %, stall 100.0 ms of 100.0 ms"),
    ],
)
def test_words_do_not_round_a_stall_away(stall_ns: int, words: str) -> None:
    rows = [Event("backward", 0, 100 * MS), Event("fetch", 0, 100 * MS, tier="host"), Event("stall", 0, stall_ns)]
    assert Summary.of(rows).words == words


def test_the_links_bound_a_step_that_waits_for_them() -> None:
    rows = [Event("backward", 0, 100 * MS), Event("fetch", 0, 81 * MS, tier="host"), Event("stall", 0, 60 * MS)]
    assert Summary.of(rows).bound == "links 81 % busy"


def test_a_copy_that_runs_on_after_backward_does_not_lengthen_the_step() -> None:
    rows = [Event("backward", 2, 10), Event("offload", 0, 30)]
    assert Summary.of(rows).span_ns == 8
    assert Summary.of(rows[1:]).span_ns == 30


def test_spans_that_touch_become_one_and_empty_ones_go() -> None:
    assert union([(9, 9), (5, 5), (1, 2), (0, 1), (4, 7), (5, 6)]) == [(0, 2), (4, 7)]
    assert union([(0, 1), (3, 4), (7, 8)], gap=2) == [(0, 4), (7, 8)]


def test_the_summary_of_nothing() -> None:
    summary = Trace().summary()
    assert (summary.span_ns, summary.lanes, summary.hidden) == (0, (), None)
    assert summary.words == "nothing copied, stall 0.0 ms of 0.0 ms"
    assert summary.bound == ""


@given(rows=st.lists(events(), max_size=20))
def test_figures_equal_those_counted_moment_by_moment(rows: list[Event]) -> None:
    """The oracle looks at each nanosecond alone."""
    summary = Summary.of(rows)

    def moments(*kinds: str, lane: str = "") -> set[int]:
        mine = [row for row in rows if row.kind in kinds and (not lane or row.lane == lane)]
        return {moment for row in mine for moment in range(row.begin_ns, row.end_ns)}

    waiting = moments("stall")
    working = moments("forward", "backward", "recompute", "encode", "decode", "measure") - waiting
    copying = moments("offload", "fetch")
    assert summary.stall_ns == len(waiting)
    assert summary.compute_ns == len(working)
    assert summary.copy_ns == len(copying)
    assert summary.exposed_ns == len(copying & waiting)
    for lane in summary.lanes:
        if lane.is_link:
            busy = moments("offload", "fetch", lane=lane.name)
            assert (lane.busy_ns, lane.overlap_ns, lane.exposed_ns) == (
                len(busy), len(busy & working), len(busy & waiting),
            )  # fmt: skip
            assert lane.nbytes == sum(row.nbytes for row in rows if row.lane == lane.name)
