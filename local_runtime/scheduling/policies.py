"""Which policy a model's configuration asks for. Pure."""

from local_runtime.repository.model_config import ModelConfig, OldestStrategy
from local_runtime.scheduling.adaptive import AdaptiveSizing
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.decisions import Policy
from local_runtime.scheduling.sequencing import Sequencer


def policy_of(config: ModelConfig, *, instances: int, max_queue_size: int) -> Policy:
    """A new policy for so many instances; `max_queue_size` as in `RuntimeOptions`."""
    if config.sequence_batching is not None:
        return Sequencer(
            max_batch_size=config.max_batch_size,
            config=config.sequence_batching,
            instances=instances,
            max_queue_size=max_queue_size,
        )
    batching = config.dynamic_batching
    adaptive = batching.adaptive if batching else None
    sizing = (
        AdaptiveSizing(max_batch_size=config.max_batch_size, latency_target_us=adaptive.latency_target_us)
        if adaptive
        else None
    )
    return Batcher(max_batch_size=config.max_batch_size, config=batching, max_queue_size=max_queue_size, sizing=sizing)


def preserves_ordering(config: ModelConfig) -> bool:
    """Whether answers have to leave in the order in which requests came."""
    if config.sequence_batching is not None:
        strategy = config.sequence_batching.strategy
        return isinstance(strategy, OldestStrategy) and strategy.preserve_ordering
    return config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
