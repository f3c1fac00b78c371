"""What NVIDIA Triton 24.10 was recorded doing (cases.json), asked of that server and of the local runtime.

The cases of one target are played together, when the first test of that target asks; each test then judges its own.
"""

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.kit.servers import TARGETS, Server

from .player import CONTROLS, Batch, Case, Play, Player, player

FOLDER = Path(__file__).parent
CASES: Mapping[str, Case] = {case["id"]: case for case in json.loads((FOLDER / "cases.json").read_text())["cases"]}

SIDE_BY_SIDE = 14
# The scripts leave 10 ms and more between what must come in order: a client later than this did not play the case.
LATE_MS = 5.0
# NVIDIA's batcher looks at its queue every 500 ms where it has a queue policy or priorities, and misses wake-ups
# between: what it does then depends on where in that interval a case starts. Other starts are tried, and a case is
# played again where the client was late, as on a busy machine.
STARTS = 10
SHIFT_S = 0.13
TOGETHER_S = 0.005  # answers sent one right after the other can change places on their way through the client

# Where the local runtime means to differ: why, and what holds instead.
DIFFERENCES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "can-03-queued-prefetched": (
        "the local runtime forms a batch when an instance is free for it: what was cancelled while waiting is in none",
        {
            "batches_any_of": [
                [
                    {"ids": [0], "rows": 1, "null_slots": 0, "extra": 0},
                    {"ids": [1, 3], "rows": 2, "null_slots": 0, "extra": 0},
                ]
            ]
        },
    ),
}

Verdicts = Mapping[str, Sequence[str]]


@pytest.fixture(scope="module")
def verdicts(serving: Callable[[str], Server], request: pytest.FixtureRequest) -> Callable[[str], Verdicts]:
    """`verdicts(target)`: for each case that this run asks for, what differed from the expectation."""
    known: dict[str, Verdicts] = {}

    def judge(target: str) -> Verdicts:
        if target not in known:
            items = [item for item in request.session.items if item.path == Path(__file__)]
            asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
            cases = [CASES[params["case"]] for params in asked if params["target"] == target]
            known[target] = asyncio.run(judge_all(serving(target), cases))
        return known[target]

    return judge


@pytest.mark.timeout(300)  # the first test of a target plays all of its cases
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_server_does_what_triton_was_seen_doing(target: str, case: str, verdicts: Callable[[str], Verdicts]):
    differences = verdicts(target)[case]
    assert not differences, "\n".join([CASES[case]["title"], *differences])


def test_every_difference_names_a_case():
    assert set(DIFFERENCES) <= set(CASES)


async def judge_all(server: Server, cases: Sequence[Case]) -> Verdicts:
    """Play the cases, some side by side; for each id what differed, empty when nothing did."""
    found: dict[str, Sequence[str]] = {}
    async with player(server) as made:
        for start in range(0, len(cases), SIDE_BY_SIDE):
            group = cases[start : start + SIDE_BY_SIDE]
            for case in group:
                server.add_model(case["model"], config=case["config_pbtxt"], model=FOLDER / "model.py")
            judged = await asyncio.gather(*(judge(server, made, case) for case in group))
            found |= {case["id"]: verdict for case, verdict in zip(group, judged, strict=True)}
    return found


async def judge(server: Server, made: Player, case: Case) -> list[str]:
    """Load the case's model, play, unload; what differed."""
    if case["kind"] == "config":
        return await judge_refused_load(server, made, case)
    try:
        await made.grpc.load_model(case["model"])
    except InferenceServerException as error:
        return [f"the model could not be loaded: {error}"]
    await made.warm_up(case)
    differences = await judge_played(server, made, case)
    await made.grpc.unload_model(case["model"])
    return differences


async def judge_refused_load(server: Server, made: Player, case: Case) -> list[str]:
    """Load a model whose configuration is wrong: both protocols refuse, and the log has the reason."""
    expect = case["expect"]
    reply = await made.http.post(f"/v2/repository/models/{case['model']}/load", json={})
    seen = [("HTTP status", reply.status_code, expect["load_http"]), ("HTTP body", reply.json(), expect["load_body"])]
    try:
        await made.grpc.load_model(case["model"])
    except InferenceServerException as error:
        seen.append(("gRPC code", error.status(), "StatusCode.INTERNAL"))
        seen.append(("gRPC text", error.message(), expect["load_body"]["error"]))
    else:
        seen.append(("gRPC load", "went through", "refused"))
    differences = [f"{what}: {value!r}, not {wanted!r}" for what, value, wanted in seen if value != wanted]
    for reason in expect["log_reason"]:
        pattern = re.escape(reason.replace("<MODEL>", case["model"])).replace("<REPO>/", r"\S*")
        if not re.search(pattern, server.log):
            differences.append(f"the log does not say: {reason}")
    return differences


async def judge_played(server: Server, made: Player, case: Case) -> list[str]:
    """Play by gRPC, then with the requests to be refused by HTTP where the case has such."""
    expect = dict(case["expect"])
    if server.name == "local" and case["id"] in DIFFERENCES:
        expect |= DIFFERENCES[case["id"]][1]
    by_http = [int(number) for number, end in expect["status"].items() if end != "OK" and end["http"]]
    differences: list[str] = []
    for refusals in ((), by_http) if by_http else ((),):
        for attempt in range(STARTS):
            await asyncio.sleep(attempt * SHIFT_S)
            play = await made.play(case, by_http=refusals)
            found = compare(case, expect, play, by_http=refusals)
            if not found or not (play.late_ms > LATE_MS or may_stall(server, case)):
                break
        way = "by HTTP" if refusals else "by gRPC"
        differences += [f"{way} (client late by {play.late_ms:.1f} ms): {difference}" for difference in found]
    return differences


def may_stall(server: Server, case: Case) -> bool:
    return server.name == "triton" and any(word in case["config_pbtxt"] for word in ("queue_policy", "priority_levels"))


def compare(case: Case, expect: Mapping[str, Any], play: Play, *, by_http: Sequence[int]) -> list[str]:
    """Where `play` is not what `expect` says, in words."""
    return [
        *compare_ends(case, expect, play, by_http=by_http),
        *compare_batches(case, expect, play),
        *compare_controls(case, expect, play),
        *([] if by_http else compare_times(expect, play)),  # the bounds were recorded by gRPC
    ]


def compare_ends(case: Case, expect: Mapping[str, Any], play: Play, *, by_http: Sequence[int]) -> Iterator[str]:
    for number, end in expect["status"].items():
        answer = play.answers[int(number)]
        wanted = ("OK", "")
        if end != "OK":
            code = str(end["http"]) if int(number) in by_http else end["grpc"]
            wanted = (code, end["text"].replace("<MODEL>", case["model"]))
        if (answer.status, answer.text) != wanted:
            yield f"request {number} ended {(answer.status, answer.text)}, not {wanted}"
    if len(expect["status"]) != len(play.answers):
        yield f"{len(play.answers)} requests, {len(expect['status'])} ends expected"


def compare_batches(case: Case, expect: Mapping[str, Any], play: Play) -> Iterator[str]:
    accepted = [[Batch(**batch | {"ids": tuple(batch["ids"])}) for batch in run] for run in expect["batches_any_of"]]
    if case.get("ordered", True):
        fits = play.batches in accepted
    else:
        fits = Counter(play.batches) in [Counter(run) for run in accepted]
    if not fits:
        yield f"ran {play.batches}, not one of {accepted}"
    for numbers in case.get("same_instance", ()):
        instances = {play.answers[number].info[4:5] for number in numbers}
        if len(instances) > 1:
            yield f"requests {numbers} of one sequence ran on instances {instances}"


def compare_controls(case: Case, expect: Mapping[str, Any], play: Play) -> Iterator[str]:
    seen = {number: list(answer.info[CONTROLS]) for number, answer in play.answers.items() if answer.info}
    for number, wanted in expect.get("controls", {}).items():
        if case.get("no_corrid_check"):
            seen[int(number)][3] = wanted[3]
        if seen.get(int(number)) != wanted:
            yield f"request {number} came with {seen.get(int(number))} as START, READY, END, CORRID, not {wanted}"


def compare_times(expect: Mapping[str, Any], play: Play) -> Iterator[str]:
    for number, bounds in expect.get("latency_ms", {}).items():
        took = play.answers[int(number)].latency_ms
        if not bounds["min"] <= took <= bounds["max"]:
            yield f"request {number} took {took:.1f} ms, not {bounds['min']} to {bounds['max']}"
    order = expect.get("response_order", ())
    for earlier, later in itertools.pairwise(order):
        if play.answers[earlier].ended_s > play.answers[later].ended_s + TOGETHER_S:
            yield f"{later} was answered before {earlier}"
