"""A worker process of its own with one ordered admission, for tests that stop it in its tracks.

    python -m tests.kit.order_worker REDIS_URL PREFIX LEASE_US RENEW_US ORDERING_KEY

It says, a line each: its ticket; `turn`, or the code of the error that it had instead; and then, asked with a line
whether it may send its request, `sent` or `lost`.
"""

import asyncio
import sys
import time

from gateway.core.admissions import Wanted
from gateway.core.errors import GatewayError
from gateway.ports import Admission
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect

WITHIN_US = 60_000_000


async def main(url: str, prefix: str, lease_us: int, renew_us: int, key: str) -> None:
    """One admission, from its ask to its end."""
    client = connect(url)
    local = MemoryAdmissions(lambda: time.time_ns() // 1000, is_degraded=True)
    worker = RedisAdmissions(client, prefix, local, timeout_s=5.0, lease_us=lease_us, renew_us=renew_us)
    worker.start()
    admission = await worker.admit(Wanted(tenant="t", ordering_key=key, queue_bound=100))
    say(str(admission.verdict.ticket))
    say(await turn_of(admission))
    while await asyncio.to_thread(sys.stdin.readline):
        say("lost" if admission.is_lost else "sent")
    admission.settle(tokens=0, nano_usd=0)
    await worker.close()
    await client.aclose()


async def turn_of(admission: Admission) -> str:
    """`turn`, or why it has none."""
    try:
        await admission.turn(within_us=WITHIN_US)
    except GatewayError as error:
        return error.code
    return "turn"


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
