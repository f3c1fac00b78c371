from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core import memory_plan
from gateway.core.memory_plan import GIB, MIB, Model, kv_token_bytes, parts, plan, tokens_that_fit

GPU = 100 * GIB  # 85 GiB weights, 10 GiB batching, 5 GiB runtime


def model(name: str = "m", *, weights: int = 1, row: int = 0, **fields: int) -> Model:
    """Weights and rows in GiB."""
    return Model(name=name, weight_bytes=weights * GIB, row_bytes=row * GIB, **fields)


@pytest.mark.parametrize(
    ("one", "weights", "batching"),
    [
        (model(weights=2), 2, 0),
        (model(weights=2, instances=3), 6, 0),
        (model(weights=2, instances=3, copies=2), 12, 0),
        (model(weights=2, row=1, max_batch_size=4), 2, 4),
        (model(weights=2, row=1, max_batch_size=4, instances=2), 4, 8),
        (model(weights=2, row=1, max_batch_size=4, instances=2, copies=2), 8, 16),
        (model(weights=2, kv_token_bytes=GIB, tokens=3), 2, 3),
        (model(weights=2, row=1, max_batch_size=2, kv_token_bytes=GIB, tokens=3, instances=2), 4, 10),
        (model(weights=0), 0, 0),
    ],
)
def test_what_a_model_needs(one: Model, weights: int, batching: int):
    got = {part.name: part.needed // GIB for part in parts([one], gpu_bytes=GPU, runtime_bytes=0)}
    assert got == {"weights": weights, "batching": batching, "runtime": 0}


def test_the_memory_is_divided_in_three():
    budgets = {part.name: part.budget for part in parts([], gpu_bytes=GPU)}
    assert budgets == {"weights": 85 * GIB, "batching": 10 * GIB, "runtime": 5 * GIB}
    assert memory_plan.WEIGHTS_PERCENT + memory_plan.BATCHING_PERCENT + memory_plan.RUNTIME_PERCENT == 100


@pytest.mark.parametrize(
    ("models", "runtime", "over"),
    [
        ([], 0, []),
        ([model(weights=85, row=10)], 5 * GIB, []),
        ([model(weights=85), replace(model("n", weights=0), weight_bytes=1)], 0, ["weights"]),
        ([model(row=10), replace(model("n"), row_bytes=1)], 0, ["batching"]),
        ([model()], 5 * GIB + 1, ["runtime"]),
        ([model(weights=86, row=11)], 6 * GIB, ["weights", "batching", "runtime"]),
        ([model(weights=43, instances=2)], 0, ["weights"]),
        ([model(weights=43, copies=2)], 0, ["weights"]),
        ([model(kv_token_bytes=MIB, tokens=10_240)], 0, []),
        ([model(kv_token_bytes=MIB, tokens=10_241)], 0, ["batching"]),
    ],
)
def test_each_part_has_to_hold_to_the_byte(models: list[Model], runtime: int, over: list[str]):
    made = plan(models, gpu_bytes=GPU, runtime_bytes=runtime)
    assert [part.name for part in made.parts if not part.fits] == over
    assert made.fits == (not over)
    assert not (made.fits and made.suggestions)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([model(weights=30, instances=4, bits=16)], {"fewer instances": ["m: instances 4 -> 2"]}),
        (
            [model("a", weights=50, instances=2, bits=16), model("b", weights=10, instances=2, bits=16)],
            {"fewer instances": ["a: instances 2 -> 1"]},
        ),
        (
            [model(weights=100)],
            {"16-bit weights (export anew in half precision)": ["m: bits 32 -> 16"], "another GPU": None},
        ),
        (
            [model(row=1, max_batch_size=32, bits=16)],
            {"smaller batches": ["m: max_batch_size 32 -> 8"]},
        ),
        (
            [model(row=1, max_batch_size=16)],
            {
                "16-bit weights (export anew in half precision)": ["m: bits 32 -> 16"],
                "smaller batches": ["m: max_batch_size 16 -> 8"],
            },
        ),
        (
            [model(kv_token_bytes=MIB, tokens=20_000, bits=16)],
            {"fewer tokens in the KV cache": ["m: tokens 20000 -> 10240"]},
        ),
        (
            # Neither is enough alone; the instances are reduced for the weights only.
            [model("a", weights=50, instances=2, bits=16), model("b", row=1, max_batch_size=16, bits=16)],
            {"fewer instances and smaller batches": ["a: instances 2 -> 1", "b: max_batch_size 16 -> 8"]},
        ),
        ([model(weights=200, bits=16)], {}),
    ],
)
def test_what_to_change(models: list[Model], expected: dict[str, list[str] | None]):
    made = plan(models, gpu_bytes=GPU)
    told = {one.title: list(one.changes) for one in made.suggestions}
    assert {title: changes for title, changes in told.items() if title != "another GPU"} == {
        title: changes for title, changes in expected.items() if changes is not None
    }


def test_the_smallest_gpu_that_takes_it():
    [suggestion] = plan([model(weights=36, bits=16)], gpu_bytes=24 * GIB).suggestions
    assert (suggestion.title, suggestion.gpu_bytes) == ("another GPU", 46068 * MIB)
    assert suggestion.changes == ("L40S: 45.0 GiB instead of 24.0 GiB",)


def test_a_runtime_that_does_not_fit_wants_another_gpu_alone():
    made = plan([model()], gpu_bytes=8 * GIB)
    assert [part.name for part in made.parts if not part.fits] == ["runtime"]
    assert [suggestion.title for suggestion in made.suggestions] == ["another GPU"]


MODELS = st.lists(
    st.builds(
        Model,
        name=st.just("m"),
        weight_bytes=st.integers(0, 60 * GIB),
        bits=st.sampled_from([8, 16, 32, 64]),
        instances=st.integers(1, 5),
        copies=st.integers(1, 2),
        max_batch_size=st.integers(1, 64),
        row_bytes=st.integers(0, GIB),
        kv_token_bytes=st.integers(0, MIB),
        tokens=st.integers(0, 100_000),
    ),
    max_size=4,
).map(lambda models: [replace(one, name=f"m{place}") for place, one in enumerate(models)])


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(models=MODELS, gpu_gib=st.integers(8, 200))
def test_every_suggestion_fits_and_says_what_it_changes(models: list[Model], gpu_gib: int):
    made = plan(models, gpu_bytes=gpu_gib * GIB)
    assert made.models == tuple(models)
    for suggestion in made.suggestions:
        assert plan(suggestion.models, gpu_bytes=suggestion.gpu_bytes).fits
        assert suggestion.changes
        assert [one.name for one in suggestion.models] == [one.name for one in models]
        assert all(one.instances >= 1 and one.max_batch_size >= 1 for one in suggestion.models)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"layers": 32, "kv_heads": 8, "head_dim": 128}, 131_072),  # Llama 3 8B
        ({"layers": 80, "kv_heads": 8, "head_dim": 128}, 327_680),  # Llama 3 70B
        ({"layers": 30, "kv_heads": 3, "head_dim": 64}, 23_040),  # SmolLM2 135M
        ({"layers": 32, "kv_heads": 8, "head_dim": 128, "value_bytes": 1}, 65_536),  # a cache in FP8
    ],
)
def test_a_token_of_kv_cache(shape: dict[str, int], expected: int):
    assert kv_token_bytes(**shape) == expected


def test_tokens_that_fit_leave_the_others_their_batches():
    llm = model("llm", kv_token_bytes=MIB, tokens=1)
    other = model("other", row=1, max_batch_size=4)
    assert tokens_that_fit(llm, [llm, other], gpu_bytes=GPU) == 6 * 1024
    assert tokens_that_fit(replace(llm, instances=2), [llm, other], gpu_bytes=GPU) == 3 * 1024
    assert tokens_that_fit(llm, [llm, replace(other, max_batch_size=11)], gpu_bytes=GPU) == 0
    assert tokens_that_fit(other, [llm, other], gpu_bytes=GPU) == 0
