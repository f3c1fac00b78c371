"""The walk: one run after the other, as `search` says, until there is no next one."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gateway.tuning.report import OK, Report, class_report, timeline
from gateway.tuning.sweep.callers import AskFailed, Times, offer
from gateway.tuning.sweep.record import Record, Run, failed
from gateway.tuning.sweep.search import Goal, Step, budget, next_step
from gateway.tuning.sweep.servers import Counters, Server
from gateway.tuning.sweep.settings import Cell, Setting, SweepError
from local_runtime.bench.variants import config_text

SHORT: Final = 1 / 3  # of the length of a long run
WARM_ASKS: Final = 2  # rounds of all callers after a model was loaded: libraries get warm


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall be swept.

    Attributes:
        cells: see `settings.space`.
        seconds: the length of a long run.
        is_brute_force: measure every cell, for the whole length.
        seed: of the arrivals of an open load.
    """

    cells: Sequence[Cell]
    goal: Goal
    seconds: float
    is_brute_force: bool = False
    seed: int = 0

    @property
    def runs(self) -> int:
        """How many there will be at most."""
        return len(self.cells) if self.is_brute_force else budget(len(self.cells))

    def identity(self, server: Server, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """What a record is of: runs of another one do not belong to it."""
        return {
            "model": server.message.name,
            "place": server.place,
            "config": config_text(server.message),
            "files": server.files,
            "shapes": {name: list(dims) for name, dims in sorted(shapes.items())},
            "settings": [cell.as_json() for cell in self.cells],
            "goal": asdict(self.goal),
            "seconds": self.seconds,
            "brute_force": self.is_brute_force,
        }


async def sweep(
    server: Server, plan: Plan, record: Record, *, on_step: Callable[[Step], None], on_run: Callable[[Run], None]
) -> None:
    """Measure until there is nothing left to measure, and keep each run in `record`.

    A setting that cannot be served is a run that failed. Raises Unreachable where the server has gone, and SweepError
    where it does not even serve the model as it was found.
    """
    serving: Setting | None = None
    while step := next_step(
        plan.cells, [run.seen() for run in record.runs], goal=plan.goal, is_brute_force=plan.is_brute_force
    ):
        on_step(step)
        try:
            if serving != step.cell.setting:
                serving = None
                await server.load(step.cell.setting)
                await _warm(server, step.cell)
                serving = step.cell.setting
            run = await measured(server, step, plan)
        except SweepError as error:
            await server.answers()  # where the server itself is the fault, that is what is told
            if step.cell.setting == plan.cells[0].setting:
                raise
            run = failed(step, str(error))
        record.add(run)
        on_run(run)


async def measured(server: Server, step: Step, plan: Plan) -> Run:
    """One run of the setting that is served now. Raises SweepError where nothing is answered at all."""
    counted: list[Counters] = []

    async def count() -> None:
        counted.append(await server.counters())

    cell = step.cell
    seconds = plan.seconds if step.is_long else plan.seconds * SHORT
    seed = random.Random(plan.seed).randrange(2**31)
    offered = await offer(
        server.ask,
        cell.load,
        seconds=seconds,
        slo_ms=plan.goal.p99_ms,
        seed=seed,
        times=Times(on_begin=count, on_end=count),
    )
    whole = class_report([offered.tally], name=str(cell.load), seconds=offered.seconds)
    if not whole.codes.get(OK):
        raise SweepError(f"{server.message.name}: no answer to made-up inputs with '{cell.setting}': {offered.failure}")
    before, after = counted
    report = Report(
        kind="load",
        title=f"{server.message.name}: {cell.setting}",
        setting={"setting": str(cell.setting), "load": str(cell.load), "server": server.place},
        seconds=offered.seconds,
        whole=whole,
        servers=(
            after.since(before).report(
                backend=server.name,
                model=server.message.name,
                seconds=offered.seconds,
                instances=cell.setting.count,
            ),
        ),
        timeline=timeline([offered.tally]),
    )
    return Run(cell=cell, is_long=step.is_long, why=step.why, report=report, memory_bytes=server.memory_bytes() or 0)


async def _warm(server: Server, cell: Cell) -> None:
    """Uncounted. What fails here fails again where it is counted."""
    callers = max(1, cell.load.concurrency, cell.setting.count * cell.setting.max_batch_size if cell.load.rate else 1)

    async def caller() -> None:
        for _ in range(WARM_ASKS):
            try:
                await server.ask()
            except AskFailed:
                return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
