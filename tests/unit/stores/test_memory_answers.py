"""Answers kept by one of several workers: what the others do not see is not promised."""

import pytest

from gateway.core.answers import Claim, Slot
from gateway.core.errors import IdempotencyUnavailable
from gateway.stores.memory_answers import MemoryAnswers


async def test_several_workers_without_redis_take_no_idempotency_keys_and_cache_by_themselves():
    answers = MemoryAnswers(lambda: 1, max_bytes=100, stands_alone=False)
    with pytest.raises(IdempotencyUnavailable, match="several workers need Redis"):
        await answers.claim(Claim(slot=Slot(kind="once", owner="t", name="n"), by="b", fingerprint=""), lease_us=9)
    found = await answers.claim(Claim(slot=Slot(kind="cache", owner="t", name="n"), by="b", fingerprint=""), lease_us=9)
    assert found.state == "fresh"
