"""The composition root's part for the control plane: settings -> what it works on, and away again."""

import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from fastapi import FastAPI

from gateway.admin.access.opening import open_entry
from gateway.admin.app import create_admin_app
from gateway.admin.models.deploys import Deploys
from gateway.admin.models.fleet import ModelBackend, Servers
from gateway.admin.models.model_routes import ModelPlane
from gateway.admin.plane import Plane
from gateway.admin.rollouts.rollouts import rolling
from gateway.backends.triton.backend import TritonBackend
from gateway.settings import BackendSettings, ConfigError, LLMSettings, LocalSettings, Settings
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.figures import RedisFigureSource
from gateway.stores.control.requests import RedisRequestLog
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.control.sessions import RedisSessions
from gateway.stores.control.shadows import RedisShadowSource
from gateway.stores.redis_deploys import ROLLOUTS, RedisDeployStore
from gateway.stores.redis_events import RedisEvents
from gateway.stores.redis_key_store import RedisKeyStore
from gateway.stores.redis_outcomes import RedisOutcomes
from gateway.stores.redis_usage import RedisUsageSource
from gateway.tasks import SPEAKS
from gateway.wiring import callers_of, prices_of, rule_check
from gateway.wiring_stores import open_redis


@contextlib.asynccontextmanager
async def control_plane(settings: Settings) -> AsyncGenerator[FastAPI, None]:
    """The control plane over the same Redis. Raises `ConfigError` where there is none or nobody could enter."""
    if not settings.redis.url:
        raise ConfigError("redis.url: the control plane needs the Redis that the workers share")
    check, prefix = rule_check(settings), settings.redis.prefix
    async with AsyncExitStack() as stack:
        entry = open_entry(settings, stack)
        client = open_redis(settings)
        stack.push_async_callback(client.aclose)
        rules = RedisRuleStore(client, prefix)
        servers = await _model_servers(settings, stack)
        deploys = Deploys(
            servers=servers,
            rules=rules,
            store=RedisDeployStore(client, prefix),
            outcomes=RedisOutcomes(client, prefix),
            check=check,
        )
        stack.push_async_callback(deploys.close)
        figures = RedisFigureSource(client, prefix)
        audit = RedisAuditLog(client, prefix)
        rollouts = await stack.enter_async_context(
            rolling(
                rules=rules,
                check=check,
                store=RedisDeployStore(client, prefix, kind=ROLLOUTS),
                figures=figures,
                audit=audit,
            )
        )
        plane = Plane(
            rules=rules,
            check=check,
            tasks=tuple(settings.tasks),
            callers={caller.key_id: caller for caller in callers_of(settings).values()},
            key_limits=tuple(limit.limit() for limit in settings.limits),
            llm_tasks=[name for name, task in settings.tasks.items() if "openai" in SPEAKS.get(task.contract, ())],
            prices=prices_of(settings),
            models=ModelPlane(servers=servers, deploys=deploys, events=RedisEvents(client, prefix)),
            usage=RedisUsageSource(client, prefix),
            keys=RedisKeyStore(client, prefix),
            audit=audit,
            sessions=RedisSessions(client, prefix),
            figures=figures,
            requests=RedisRequestLog(client, prefix),
            shadows=RedisShadowSource(client, prefix),
            rollouts=rollouts,
        )
        yield create_admin_app(plane, entry)


async def _model_servers(settings: Settings, stack: AsyncExitStack) -> Servers:
    """The backends with models as this process reaches them: Triton by its address, a worker's runtime not at all."""
    reachable: dict[str, ModelBackend] = {}
    unreachable: dict[str, str] = {}
    repositories: dict[str, str] = {}
    kinds = {name: backend.kind for name, backend in settings.backends.items()}
    why_off = {name: why for name, backend in settings.backends.items() if (why := _why_off(backend))}
    for name, backend in settings.backends.items():
        if isinstance(backend, LLMSettings):
            continue
        if not backend.enabled:
            unreachable[name] = why_off[name]
        elif isinstance(backend, LocalSettings):
            unreachable[name] = "it runs inside the data plane and cannot be reached from the control plane"
        else:
            try:
                reachable[name] = await TritonBackend.open(name, backend.url, tls=backend.tls)
            except ValueError as error:
                raise ConfigError(f"backends.{name}: {error}") from error
            stack.push_async_callback(reachable[name].close)
            if backend.repository is not None:
                repositories[name] = str(backend.repository)
    return Servers(
        reachable=reachable, unreachable=unreachable, kinds=kinds, repositories=repositories, why_off=why_off
    )


def _why_off(backend: BackendSettings) -> str:
    """Why no worker would have it on, as far as the configuration tells; empty where nothing in it would keep it off.

    Whether a key is set is known to the workers alone: the control plane need not have any.
    """
    if not backend.enabled:
        return "it is switched off in the configuration"
    if isinstance(backend, LLMSettings) and backend.api_key_env:
        return f"no key: {backend.api_key_env} is not set where the workers run"
    return ""
