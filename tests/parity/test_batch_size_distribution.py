"""The same random arrivals on NVIDIA Triton and on the local runtime make batches of the same sizes, within noise.

The trace is bursts: a random number of requests with exponential gaps (a Poisson process that ends). The model takes no
time, so the batching delay alone makes the batches, and whether a request catches one is decided by milliseconds that
differ from run to run: only the distribution can be the same. Every request goes to all servers at the same instant.
A burst begins when all of the one before has been answered, so bursts are independent.

The test: if both servers batch by the same law, the two labels of a burst can be swapped without changing the
probability of what was seen. So each statistic is compared with its values under random swaps, burst by burst (a paired
permutation test, exact for any noise that both share):

- the difference in the number of batches, hence in the mean batch size;
- the distance of the two histograms of batch sizes: the sum over sizes of (a - b)^2 / (a + b), as in chi-square.

Either statistic rejects when at most 5e-5 of the swaps are as extreme: together less than one false alarm in 10^4. That
the test can see a difference is shown on local models with half the delay and half the batch size: both are rejected.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.kit.servers import Server

from .player import Case, Player, player

BURSTS = 64
LANES = 2  # bursts at the same time, each on models of its own
GAP_MS = 12.0
SWAPS = 100_000
ALPHA = 5e-5
SIZES = 8

# The queue policy bounds nothing here: with one, NVIDIA's batcher takes no requests ahead for a busy instance.
CONFIG = """backend: "python"
max_batch_size: {max_batch}
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 2 ] }} ]
output [ {{ name: "INFO" data_type: TYPE_INT64 dims: [ 12 ] }} ]
instance_group [ {{ count: 2 kind: KIND_CPU }} ]
dynamic_batching {{
  max_queue_delay_microseconds: {delay_us}
  default_queue_policy {{ max_queue_size: 1000 }}
}}
"""
SAME = {"max_batch": 8, "delay_us": 60_000}
# Contender: the server and the settings of its model.
CONTENDERS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "triton": ("triton", SAME),
    "local": ("local", SAME),
    "half the delay": ("local", SAME | {"delay_us": 30_000}),
    "half the batch": ("local", SAME | {"max_batch": 4}),
}


def bursts() -> list[np.ndarray]:
    """Arrival times in ms from the start of each burst; the same ones in every run."""
    rng = np.random.default_rng(20260)
    return [np.cumsum(rng.exponential(GAP_MS, 5 + rng.poisson(9))) for _ in range(BURSTS)]


@pytest.fixture(scope="module")
def histograms(serving: Callable[[str], Server]) -> Mapping[str, np.ndarray]:
    """For each contender, how many batches of each size 1..8 every burst made: INT64 [bursts, 8]."""
    servers = {server: serving(server) for server, _ in CONTENDERS.values()}
    return asyncio.run(play_bursts(servers))


async def play_bursts(servers: Mapping[str, Server]) -> Mapping[str, np.ndarray]:
    counts = {contender: np.zeros((BURSTS, SIZES), np.int64) for contender in CONTENDERS}
    async with player(servers["triton"]) as triton, player(servers["local"]) as local:
        players = {"triton": triton, "local": local}
        await asyncio.gather(
            *(
                load(servers[server], players[server], contender, lane)
                for contender, (server, _) in CONTENDERS.items()
                for lane in range(LANES)
            )
        )

        async def run(lane: int) -> None:
            for burst, arrivals in list(enumerate(bursts()))[lane::LANES]:
                case = [
                    {"id": number, "at_ms": at_ms, "sleep_ms": 0, "rows": 1} for number, at_ms in enumerate(arrivals)
                ]
                plays = await asyncio.gather(
                    *(
                        players[server].play({"model": model_name(contender, lane), "requests": case})
                        for contender, (server, _) in CONTENDERS.items()
                    )
                )
                for contender, play in zip(CONTENDERS, plays, strict=True):
                    for size, times in Counter(batch.rows for batch in play.batches).items():
                        counts[contender][burst, size - 1] = times

        await asyncio.gather(*(run(lane) for lane in range(LANES)))
    return counts


def model_name(contender: str, lane: int) -> str:
    return f"{contender.replace(' ', '_')}_{lane}"


async def load(server: Server, made: Player, contender: str, lane: int) -> None:
    config = CONFIG.format(**CONTENDERS[contender][1])
    name = model_name(contender, lane)
    server.add_model(name, config=config, model=Path(__file__).with_name("model.py"))
    await made.grpc.load_model(name)
    case: Case = {"model": name, "config_pbtxt": config}
    await made.warm_up(case)


def p_values(one: np.ndarray, other: np.ndarray, swaps: int = SWAPS) -> tuple[float, float]:
    """How often random swaps are as extreme as what was seen: by the number of batches, by the histogram."""
    rng = np.random.default_rng(1)
    # +1 leaves a burst as it is, -1 swaps its labels; the first row is what was seen.
    signs = np.vstack([np.ones(BURSTS), rng.choice([-1.0, 1.0], (swaps, BURSTS))])
    differences = signs @ (one - other)
    numbers = np.abs(differences.sum(axis=1))
    distances = (differences**2 / np.maximum((one + other).sum(axis=0), 1)).sum(axis=1)
    # The tolerance: equal values must count as equal whatever the order of the additions.
    return tuple(float(np.mean(values >= values[0] - 1e-9)) for values in (numbers, distances))


def rejected(one: np.ndarray, other: np.ndarray) -> bool:
    return min(p_values(one, other)) < ALPHA


def test_every_request_is_in_a_batch(histograms: Mapping[str, np.ndarray]):
    requests = [len(arrivals) for arrivals in bursts()]
    for contender, counts in histograms.items():
        assert (counts @ np.arange(1, SIZES + 1)).tolist() == requests, contender


def test_the_trace_makes_batches_of_many_sizes(histograms: Mapping[str, np.ndarray]):
    assert np.count_nonzero(histograms["triton"].sum(axis=0) >= 5) >= 6


def test_the_local_runtime_batches_like_triton(histograms: Mapping[str, np.ndarray]):
    triton, local = histograms["triton"], histograms["local"]
    print("triton", triton.sum(axis=0), "local", local.sum(axis=0), "p", p_values(triton, local))
    assert not rejected(triton, local)


@pytest.mark.parametrize("other", ["half the delay", "half the batch"])
def test_another_way_to_batch_is_noticed(other: str, histograms: Mapping[str, np.ndarray]):
    print(other, histograms[other].sum(axis=0), "p", p_values(histograms["triton"], histograms[other]))
    assert rejected(histograms["triton"], histograms[other])


def test_what_differs_by_chance_alone_is_as_rare_as_its_p_value_says():
    """Of 400 pairs of the same law about 20 have a p below 0.05: the test is neither blind nor does it cry wolf."""
    rng = np.random.default_rng(2)
    pairs = [rng.poisson(0.4, (2, BURSTS, SIZES)) for _ in range(400)]
    for statistic in range(2):
        low = sum(p_values(one, other, swaps=1000)[statistic] < 0.05 for one, other in pairs)
        assert 5 <= low <= 40
