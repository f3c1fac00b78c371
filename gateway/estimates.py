"""What a request to an LLM will take, and cost where: asked by limits before it is admitted, and by strategies."""

import contextlib
from collections.abc import Sequence

from gateway.attempt import Plane, Task
from gateway.core import cost, routing, tokens
from gateway.core.errors import BackendError
from gateway.core.rate_limit import Take
from gateway.core.rules import Rule
from gateway.core.strategies import Option
from gateway.core.types import InferenceRequest, OpenAIPayload, Place, Work


class Estimate:
    """One request's. Nothing is estimated before it is asked for, and nothing twice."""

    __slots__ = ("_known", "_plane", "_request", "_task")

    def __init__(self, request: InferenceRequest, task: Task, plane: Plane) -> None:
        self._request = request
        self._task = task
        self._plane = plane
        self._known: Work | None = None

    @property
    def known(self) -> Work | None:
        """The work, if anybody had to know it."""
        return self._known

    def work(self) -> Work:
        """What it will take."""
        if self._known is None:
            self._known = tokens.work_of(self._asked())
        return self._known

    def input_tokens(self) -> int | None:
        """Of its prompt; None for a task that no LLM can answer."""
        return self.work().input_tokens if self._suits_llm else None

    def pool(self) -> routing.Pool | None:
        """What strategies weigh places by; None where no LLM can answer the task."""
        if not self._suits_llm:
            return None
        return routing.Pool(option=self._option, prefix=lambda: tokens.prefix_of(self._asked()))

    def reserved(self, rule: Rule | None, counted: Sequence[Take]) -> tuple[int, int]:
        """Tokens and nano-USD that it may use up, where a limit has to know: at the dearest place of its rule's split.

        One token at least, and one nano-USD where it may come to a place with a price: a limit that is used up lets
        nothing pass that may take of it, whatever it was expected to take.
        """
        kinds = {take.limit.kind for take in counted}
        if not kinds & {"tokens", "usd"} or not self._suits_llm:
            return 1, 0
        costs = self._costs(rule) if rule and "usd" in kinds else []
        work = self.work() if self._may_come_to_llm(rule) else None
        return max(1, work.input_tokens + work.output_tokens) if work else 1, max(costs, default=0)

    @property
    def _suits_llm(self) -> bool:
        """Whether an LLM can answer the task."""
        return "openai" in self._task.contract.speaks

    def _may_come_to_llm(self, rule: Rule | None) -> bool:
        """Whether it may come to an LLM: what tensor models can answer too goes to one only where its rule says so."""
        if len(self._task.contract.speaks) == 1 or rule is None:
            return True
        found = (self._plane.backends.get(target.backend) for target in (*rule.split, *rule.fallback))
        return any(backend is not None and backend.speaks == "openai" for backend in found)

    def _costs(self, rule: Rule) -> list[int]:
        """What it will cost at each place that has a price; one that is fallen back to counts as the least."""
        asked = [self._nano_usd(target.place) for target in rule.split]
        others = [self._nano_usd(target.place) for target in rule.fallback]
        return [max(1, nano) for nano in asked if nano is not None] + [1 for nano in others if nano is not None]

    def _option(self, place: Place) -> Option:
        backend = self._plane.backends[place.backend]
        return Option(
            place=place,
            standing=self._plane.loads.standing(place, now_us=self._plane.clock()),
            engine=backend.engine_load(place.replica),
            expected_nano_usd=self._nano_usd(place),
        )

    def _nano_usd(self, place: Place) -> int | None:
        """What it will cost there: by its price, or by what a token has cost of the server's time so far."""
        plane = self._plane
        if place.backend in plane.usd_per_hour:
            seen = plane.loads.standing(place, now_us=plane.clock()).nano_usd_per_token
            return 0 if seen is None else int(seen * self.work().output_tokens)
        price = plane.prices.of(place.backend, place.model)
        return None if price is None else cost.expected_nano_usd(price, self.work())

    def _asked(self) -> OpenAIPayload:
        form = self._task.contract.forms["openai"]
        with contextlib.suppress(BackendError):  # an LLM cannot be asked this: the attempt at one will meet that
            payload = form.payload(self._request.input)
            if isinstance(payload, OpenAIPayload):
                return payload
        return OpenAIPayload(body={})
