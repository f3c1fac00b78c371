"""What the benchmark makes of what its tools say."""

import asyncio
from pathlib import Path

import pytest

from tests.bench.suite import peers
from tests.bench.suite.bench import Bench, Failed
from tests.bench.suite.load import read
from tests.bench.suite.paced import EVENTS, MARK
from tests.bench.suite.readers import Reader, Tally, request_of
from tests.bench.suite.rows import ROWS
from tests.bench.suite.rows.image import BYTES, jpeg
from tests.bench.suite.rows.processes import grown
from tests.bench.suite.servers import ANSWER_BYTES, Target, chat_answer
from tests.kit.upstream import DONE, delta, event, sse_head

SAID = """Running 1s test @ http://127.0.0.1:1/
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     4.05ms    1.10ms  15.11ms   85.25%
    Req/Sec     7.95k   304.07     8.31k    90.00%
  Latency Distribution
     50%  950.00us
     75%    4.40ms
     90%    5.20ms
     99%    1.25s
  7912 requests in 1.00s, 3.20MB read
Requests/sec:   7905.12
Transfer/sec:      3.20MB
"""


def test_wrk_is_read():
    assert read(SAID) == (7912, {"rps": 7905.12, "p50 ms": pytest.approx(0.95), "p99 ms": pytest.approx(1250)})


@pytest.mark.parametrize(
    "said",
    [
        f"{SAID}  Non-2xx or 3xx responses: 3\n",
        f"{SAID}  Socket errors: connect 0, read 0, write 0, timeout 2\n",
        "unable to connect to 127.0.0.1:1 Connection refused",
        SAID.replace("7912 requests", "0 requests"),
    ],
)
def test_a_run_in_which_not_all_was_answered_is_none(said):
    with pytest.raises(Failed):
        read(said)


def bench(folder: Path, rounds: int = 2) -> Bench:
    said: list[str] = []
    return Bench(folder=folder, peers=folder, rounds=rounds, seconds=1, is_quick=True, cores=(0, 1), say=said.append)


def measured(values, order: list[str], name: str):
    async def run():
        order.append(name)
        value = next(values)
        if value is None:
            raise Failed("it fell over")
        return {"rps": value}

    return run


async def test_subjects_take_turns_and_what_warms_up_is_not_kept(tmp_path):
    order: list[str] = []
    row = bench(tmp_path)
    await row.in_turns({name: measured(iter((1, 2, 3)), order, name) for name in "ab"})
    assert order == list("ababab")
    assert [(one.subject, one.round, one.figures["rps"]) for one in row.runs] == [
        ("a", 0, 2),
        ("b", 0, 2),
        ("a", 1, 3),
        ("b", 1, 3),
    ]


async def test_a_subject_that_fails_is_told_and_left_out(tmp_path):
    order: list[str] = []
    row = bench(tmp_path)
    fails, goes_on = measured(iter((1, None)), order, "a"), measured(iter((1, 2, 3)), order, "b")
    await row.in_turns({"a": fails, "b": goes_on})
    assert order == list("ababb")
    assert row.errors == ["a: it fell over"]
    assert [one.subject for one in row.runs] == ["b", "b"]


def test_memory_is_held_to_what_it_is_once_it_is_warm():
    samples = [(0.0, 80.0), (50.0, 88.0), (100.0, 90.0), (500.0, 90.5), (1000.0, 91.0)]
    assert grown(samples, 100) == {"MiB at start": 80.0, "MiB": 91.0, "MiB grown": 1.0, "requests": 1000.0}


def test_rows_have_goals_and_know_their_names():
    assert all(row.goals and row.name == name for name, row in ROWS.items())
    assert len(ROWS) == 11


def test_the_upstreams_answer_and_the_picture_have_their_sizes():
    assert len(chat_answer()) == ANSWER_BYTES
    assert 0.9 * BYTES < len(jpeg(BYTES)) <= BYTES


def test_a_peer_of_another_version_is_not_there(tmp_path):
    assert peers.installed(tmp_path, "mosec") is None
    mark = tmp_path / "mosec" / peers.MARK
    mark.parent.mkdir()
    mark.write_text("mosec==0.0.1")
    assert peers.installed(tmp_path, "mosec") is None
    mark.write_text(peers.PEERS["mosec"].requirement)
    assert peers.installed(tmp_path, "mosec") == tmp_path / "mosec"
    assert "make bench-peers" in peers.missing("mosec")


class Transport(asyncio.Transport):
    """What a reader writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    abort = close


STREAM = sse_head() + event(delta("word")) * EVENTS + DONE


async def test_a_reader_counts_each_event_once_however_they_are_cut():
    target = Target(name="t", url="http://127.0.0.1:1/v1/chat/completions", body=b"{}")
    for size in (1, 3, 7, 100, len(STREAM)):
        tally, transport = Tally(is_counting=True), Transport()
        reader = Reader(request_of(target), tally)
        reader.connection_made(transport)
        pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
        if size < len(b"HTTP/1.1 200"):
            pieces = [STREAM[:20], *(STREAM[at : at + size] for at in range(20, len(STREAM), size))]
        for piece in pieces:
            reader.data_received(piece)
        assert (tally.events, tally.faults, len(tally.first_s)) == (STREAM.count(MARK), [], 1)
        assert transport.written == [request_of(target)] * 2


async def test_a_reader_tells_of_a_stream_with_too_few_events_and_of_a_refusal():
    cut = sse_head() + event(delta("word")) + DONE
    for answer, words in ((cut, "1 of 100"), (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503")):
        tally, transport = Tally(), Transport()
        reader = Reader(b"request", tally)
        reader.connection_made(transport)
        reader.data_received(answer)
        assert words in tally.faults[0]
        assert transport.is_closed
        reader.connection_lost(None)
        assert tally.none_reads.is_set()
