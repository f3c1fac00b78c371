"""One chat at a time through the gateway and through others' gateways, at 32 in flight and at 1.

The upstream is nginx with a fixed answer: what is measured is the relay alone. All gateways run for the whole row, on
the same core, and are loaded in turns. Ours checks keys, limits and rules, counts and prices usage, keeps metrics and
logs; what the others do is in docs/benchmarks.md.
"""

from contextlib import AsyncExitStack

from tests.bench.suite.bench import Bench, Failed, Measure, Row
from tests.bench.suite.goals import OURS, Goal
from tests.bench.suite.load import wrk
from tests.bench.suite.routers import BEARER, JSON, PATH, ROUTERS, router
from tests.bench.suite.servers import Target, chat_gateway, nginx

MANY = 32
BODY = b'{"model":"general_llm","messages":[{"role":"user","content":"hello"}]}'
SLOW = ("portkey", "litellm")  # not in the quick form: they take longest to start, and their goals are the widest
PATIENT = 2  # times as long are the runs of these: LiteLLM may need a second for an answer
ALONE = "{}, 1 in flight".format
STRAIGHT = "straight"
LEASTS = {"sglang-router": 1.0, "sglang-router, quiet": 0.6, "vllm-router": 0.5, "portkey": 8.0, "litellm": 60.0}
GOALS = (
    *(Goal(figure="rps", at="least", bound=bound, against=peer) for peer, bound in LEASTS.items()),
    Goal(figure="p99 ms", at="most", bound=1.0, against="sglang-router"),
    Goal(figure="p50 ms", at="most", bound=0.35, subject=ALONE(OURS), against=ALONE(STRAIGHT), by="difference"),
)


async def measure(bench: Bench) -> None:
    """All at 32 in flight, then the fast ones at 1."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(nginx(bench))
        ours = await stack.enter_async_context(chat_gateway(bench, upstream))
        targets = {
            STRAIGHT: Target(name=STRAIGHT, url=f"{upstream}{PATH}", body=BODY, headers=JSON),
            OURS: Target(name=OURS, url=f"{ours.url}{PATH}", body=BODY, headers=BEARER, pid=ours.pid),
        }
        for name in ROUTERS:
            if bench.is_quick and name in SLOW:
                bench.note(f"{name} is left out of the quick form")
                continue
            try:
                target = await stack.enter_async_context(router(bench, name, upstream, BODY))
            except Failed as error:
                bench.failed(f"{name}: {error}")
                continue
            if target is not None:
                targets[name] = target
        await bench.in_turns({name: _loaded(bench, target, MANY) for name, target in targets.items()})
        shown = (STRAIGHT, OURS) if bench.is_quick else tuple(set(targets) - set(SLOW))
        few = {name: target for name, target in targets.items() if name in shown}
        await bench.in_turns({ALONE(name): _loaded(bench, target, 1) for name, target in few.items()})


def _loaded(bench: Bench, target: Target, in_flight: int) -> Measure:
    return lambda: wrk(bench, target, in_flight, bench.seconds * (PATIENT if target.name in SLOW else 1))


ROW = Row(name="relay", title="chat relay, 32 and 1 in flight", goals=GOALS, measure=measure)
