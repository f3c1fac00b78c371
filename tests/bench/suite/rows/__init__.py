"""The rows, in the order in which they are measured."""

from tests.bench.suite.rows import decisions, image, local, overload, processes, relay, stream, tensors

ROWS = {
    row.name: row
    for row in (
        relay.ROW,
        stream.ROW,
        local.ROW,
        tensors.ROW,
        image.ROW,
        decisions.ADMISSION,
        decisions.ROUTING,
        processes.WORKERS,
        processes.MEMORY,
        processes.START,
        overload.ROW,
    )
}
