from local_runtime.scheduling.stats import StatsRecorder


def test_counts_rows_executions_and_sizes():
    recorder = StatsRecorder(name="m", version="1")
    recorder.executed(rows=3, compute_us=10)
    recorder.answered(rows=1, queue_us=4)
    recorder.answered(rows=2, queue_us=5)
    recorder.executed(rows=1, compute_us=7)
    recorder.failed()
    snapshot = recorder.snapshot()
    recorder.failed()
    assert (snapshot.success_count, snapshot.fail_count) == (2, 1)
    assert (snapshot.inference_count, snapshot.execution_count) == (3, 2)
    assert (snapshot.queue_us, snapshot.compute_us) == (9, 17)
    assert snapshot.batch_sizes == {1: 1, 3: 1}
