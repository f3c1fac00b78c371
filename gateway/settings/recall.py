"""The section `recall`: how long, and how much of it, answers are kept to be given again."""

from pydantic import Field

from gateway.settings.section import Section


class RecallSettings(Section):
    """For requests with an idempotency key, and for the caches of rules, which say themselves how long."""

    idempotency_ttl_s: int = Field(default=86_400, ge=1, le=30 * 86_400, description="an idempotency key is remembered")
    max_bytes: int = Field(
        default=64 * 2**20, ge=2**20, description="of one tenant, and once more in its caches; what ends first goes"
    )
