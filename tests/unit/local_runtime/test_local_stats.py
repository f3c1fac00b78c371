from local_runtime.scheduling.stats import Compute, Duration, FailureReason, StatsRecorder


def test_counts_rows_executions_and_sizes():
    recorder = StatsRecorder(name="m", version="1")
    first, second = Compute(input_us=1, infer_us=8, output_us=1), Compute(infer_us=7)
    recorder.executed(rows=3, compute=first)
    recorder.answered(rows=1, queue_us=4, compute=first, at_ms=1000)
    recorder.answered(rows=2, queue_us=5, compute=first, at_ms=1000)
    recorder.executed(rows=1, compute=second)
    recorder.failed(FailureReason.BACKEND, after_us=30)
    recorder.loaded(load_us=9)
    snapshot = recorder.snapshot(pending_count=6)
    recorder.failed(FailureReason.REJECTED)
    assert (snapshot.success, snapshot.fail) == (Duration(count=2, total_us=29), Duration(count=1, total_us=30))
    assert (snapshot.inference_count, snapshot.execution_count) == (3, 2)
    assert (snapshot.queue, snapshot.compute_infer) == (Duration(count=2, total_us=9), Duration(count=2, total_us=16))
    assert snapshot.batch_sizes == {1: 1, 3: 1}
    assert snapshot.batch_stats[3].compute_input == Duration(count=1, total_us=1)
    assert snapshot.failures[FailureReason.BACKEND] == 1
    assert snapshot.failures[FailureReason.REJECTED] == 0
    assert (snapshot.last_inference_ms, snapshot.pending_count, snapshot.load_us) == (1000, 6, 9)


def test_requests_of_one_batch_are_counted_at_once():
    compute = Compute(input_us=1, infer_us=8, output_us=2)
    together, one_by_one = StatsRecorder(name="m", version="1"), StatsRecorder(name="m", version="1")
    together.answered(requests=3, rows=4, queue_us=60, compute=compute, at_ms=5)
    for rows, queue_us in ((1, 10), (1, 20), (2, 30)):
        one_by_one.answered(rows=rows, queue_us=queue_us, compute=compute, at_ms=5)
    assert together.snapshot() == one_by_one.snapshot()


def test_a_cached_answer_is_a_success_and_no_inference():
    recorder = StatsRecorder(name="m", version="1")
    recorder.missed(lookup_us=3)
    recorder.hit(lookup_us=2)
    snapshot = recorder.snapshot()
    assert (snapshot.success, snapshot.inference_count) == (Duration(count=1, total_us=2), 0)
    assert (snapshot.cache_hit, snapshot.cache_miss) == (Duration(count=1, total_us=2), Duration(count=1, total_us=3))
