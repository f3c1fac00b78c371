"""`gateway plan` with the real simulator, on worlds that are small and known."""

import itertools
import json
import math

import pytest
import yaml
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.tuning.planning import FULLEST, Setting
from gateway.tuning.planning_worlds import PART, document_of, extent_of, is_cut, situation_of
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.servers import SimulatedServers
from gateway.tuning.simulation.world import WorldError, load_document, parse_world
from gateway.tuning.slo import Slo

TEN_MS = {"model": "fixed", "compute_us": {"1": 10_000, "4": 12_000}}
SINGLE = ("--max-batch-size", "1", "--delay-us", "0", "--count", "1")


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))


SHORT = ("--delay-us", "0", "--count", "1", "--json")


@pytest.fixture
def curve(tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(TEN_MS))
    return str(path)


def planned(curve, *more, rate=300, slo="p90=60ms"):
    """A plan's JSON."""
    result = run("plan", "--slo", slo, "--rate", str(rate), "--curve", curve, "--json", *more)
    assert result.exit_code in {0, 1}, result.output
    return json.loads(result.stdout), result.exit_code


def test_no_fewer_replicas_than_the_load_needs_and_no_more_than_lighten_it(curve):
    # 300 requests/s of 10 ms each keep 3 busy; on 4, the queue M/D/4 at 75 % leaves nine of ten within 60 ms by far
    found, code = planned(curve, *SINGLE, "--headroom", "0", "--usd-per-hour", "2")
    assert code == 0
    assert found["chosen"]["replicas"] == 4
    assert found["chosen"]["holds"]
    assert found["one_less"] is None  # 3 are ruled out without a run
    assert found["chosen"]["usd_per_hour"] == 8
    assert found["chosen"]["usd_per_million_requests"] == pytest.approx(8 / (300 * 3600) * 1e6)
    for one in found["chosen"]["runs"]:
        assert one["holds"]
        assert one["replicas"] == 4
        assert one["mean_batch"] == 1
        assert one["busy"] == pytest.approx(0.75, abs=0.06)
        assert one["goodput"] == pytest.approx(300, rel=0.06)
        assert 10 <= one["p50_ms"] <= one["p99_ms"]


def test_a_tighter_slo_takes_more_replicas_and_one_less_was_run(curve):
    found, _ = planned(curve, *SINGLE, "--headroom", "0", slo="p90=11ms")
    assert found["chosen"]["replicas"] > 4
    assert not found["one_less"]["holds"]
    assert found["one_less"]["replicas"] == found["chosen"]["replicas"] - 1


def test_more_headroom_never_takes_fewer_replicas(curve):
    needed = [planned(curve, *SINGLE, "--headroom", str(room))[0]["chosen"]["replicas"] for room in (0, 0.3, 1)]
    assert needed == sorted(needed)
    assert all(n * 100 * FULLEST >= 300 * (1 + room) for n, room in zip(needed, (0, 0.3, 1), strict=True))


def test_larger_batches_take_fewer_replicas_and_are_written_as_configuration(curve):
    found, _ = planned(curve, "--max-batch-size", "1,4", "--delay-us", "0,2000", "--count", "1")
    assert found["chosen"]["setting"]["max_batch_size"] == 4
    assert found["chosen"]["replicas"] < math.ceil(360 / 95)
    assert found["config_pbtxt"][0] == "max_batch_size: 4"
    assert [one["setting"]["max_batch_size"] for one in found["ruled_out"]] == [1]
    assert found["front"][0]["replicas"] == found["chosen"]["replicas"]


def test_the_same_seed_gives_the_same_plan(curve):
    once, again = planned(curve, *SINGLE)[0], planned(curve, *SINGLE)[0]
    other = planned(curve, *SINGLE, "--seed", "7")[0]
    assert once == again
    assert once["chosen"]["runs"] != other["chosen"]["runs"]
    assert other["seeds"] == [7, 8, 9]


def test_the_world_that_it_writes_gives_the_same_figures(curve, tmp_path):
    path = tmp_path / "planned.yaml"
    found, _ = planned(curve, *SINGLE, "--output", str(path))
    world = parse_world(load_document(path), folder=tmp_path)
    for seed, told in zip(found["seeds"], found["chosen"]["runs"], strict=True):
        report = simulate(world, seed=seed)
        assert (report.whole.latency.p50, report.whole.latency.p99) == (told["p50_ms"], told["p99_ms"])
        assert report.whole.goodput == told["goodput"]
        assert report.servers[0].busy == told["busy"]


def test_the_slo_holds_with_one_replica_dead(curve, tmp_path):
    path = tmp_path / "planned.yaml"
    without, _ = planned(curve, *SINGLE, "--headroom", "0")
    found, code = planned(curve, *SINGLE, "--headroom", "0", "--survive", "1", "--output", str(path))
    assert code == 0
    assert found["chosen"]["replicas"] >= without["chosen"]["replicas"] + 1
    assert all(one["good"] >= 0.9 for one in found["chosen"]["runs"])
    world = parse_world(load_document(path))
    assert [(one.kind, one.at_s) for one in world.failures] == [("dead", 0)]


def test_a_batch_that_is_too_slow_by_itself_holds_nothing(curve):
    found, code = planned(curve, *SINGLE, slo="p90=9ms")
    assert code == 1
    assert found["chosen"] is None
    assert found["runs"] == 0
    assert "computing alone takes 10 ms at p90" in found["why"]


def test_where_too_few_replicas_are_allowed_it_says_how_many_it_takes(curve):
    found, code = planned(curve, *SINGLE, "--max-replicas", "3")
    assert code == 1
    assert "need 4 replicas at least" in found["why"]


def test_the_closest_is_told_where_waiting_is_what_takes_too_long(curve):
    result = run("plan", "--slo", "p90=10.001ms", "--rate", "300", "--curve", curve, *SINGLE, "--max-replicas", "5")
    assert result.exit_code == 1
    assert "no setting holds p90=10.001ms: the closest is max_batch_size 1" in result.output
    assert "on 5 replicas" in result.output
    assert "waiting" in result.output


def test_a_plan_in_words(curve):
    result = run("plan", "--slo", "p90=60ms", "--rate", "300", "--curve", curve, *SINGLE, "--usd-per-hour", "1.5")
    assert result.exit_code == 0, result.output
    for words in (
        "4 replicas of 'servers'",
        "6.00 USD/h",
        "config.pbtxt of 'fixed'",
        "instance_group [ { count: 1 } ]",
        "held at 360 requests/s, 20 % above",
        "checked with all 4 replicas",
        "ruled out by the curve alone",
    ):
        assert words in result.output


def test_one_replica_is_one(curve):
    result = run("plan", "--slo", "p90=60ms", "--rate", "10", "--curve", curve, *SINGLE)
    assert result.exit_code == 0, result.output
    assert "1 replica of 'servers'" in result.output
    assert "checked with the one replica" in result.output
    assert "1 replicas" not in result.output


def world_with(**more):
    return {
        "models": {"m": {"curve": TEN_MS, "max_batch_size": 4}},
        "backends": {"b": {}},
        "traffic": [{"rate": 100, "slo_ms": 60}],
        **more,
    }


def test_a_world_with_two_classes_holds_the_slo_of_the_one_that_has_one(tmp_path):
    path = tmp_path / "world.yaml"
    traffic = [
        {"name": "chat", "rate": 60, "slo_ms": 60},
        {"name": "bulk", "rate": 100, "rows": 2, "priority": "batch"},
    ]
    path.write_text(yaml.safe_dump(world_with(traffic=traffic)))
    result = run("plan", "--world", str(path), "--slo", "p90=60ms", "--max-batch-size", "4", *SHORT)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["model"], found["backend"]) == ("m", "b")
    assert found["chosen"]["replicas"] >= 1


def test_a_world_that_breaks_is_run_as_it_is(tmp_path):
    path = tmp_path / "world.yaml"
    failures = [{"at_s": 2, "for_s": 0.5, "backend": "b", "kind": "slow", "times": 3}]
    path.write_text(yaml.safe_dump(world_with(failures=failures, duration_s=5)))
    result = run("plan", "--world", str(path), "--max-batch-size", "4", *SHORT)
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["chosen"]["runs"]
    assert all(one["requests"] == pytest.approx(120 * 5, rel=0.15) for one in runs)


CONFIG = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 7 default_queue_policy { max_queue_size: 5 } priority_levels: 2
  default_priority_level: 1 }
"""


def test_what_is_not_planned_stays_as_the_configuration_has_it(tmp_path):
    (tmp_path / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "curve.json").write_text(json.dumps(TEN_MS))
    models = {"m": {"curve": "curve.json", "config": "config.pbtxt"}}
    situation = situation_of(world_with(models=models), folder=tmp_path)
    setting = Setting(max_batch_size=4, max_queue_delay_microseconds=500, preferred_batch_size=(2,), count=3)
    world = parse_world(document_of(situation, setting, 2, whole=True))
    batching = world.models["m"].config.dynamic_batching
    assert (world.models["m"].config.max_batch_size, world.models["m"].instances) == (4, 3)
    assert (batching.max_queue_delay_microseconds, tuple(batching.preferred_batch_size)) == (500, (2,))
    assert (batching.priority_levels, batching.default_queue_policy.max_queue_size) == (2, 5)


def test_a_part_has_the_load_of_each_replica_of_the_whole():
    situation = situation_of(world_with(traffic=[{"rate": 50_000, "slo_ms": 100}]))
    setting = Setting(max_batch_size=4, max_queue_delay_microseconds=0)
    for replicas, whole in itertools.product((8, 40, 700), (True, False)):
        document = document_of(situation, setting, replicas, whole=whole)
        world = parse_world(document)
        simulated = world.backends["b"].replicas
        assert world.traffic[0].traffic.rate / simulated == pytest.approx(50_000 / replicas)
        assert min(replicas, PART) <= simulated <= replicas
        counted = (world.duration_s - world.warmup_s) * world.traffic[0].traffic.rate
        assert 9_999 <= counted <= 200_000
    assert simulated < 700
    assert parse_world(document_of(situation, setting, 40, whole=True)).backends["b"].replicas == 40


@pytest.mark.parametrize(
    "more",
    [
        {"traffic": [{"concurrency": 4, "slo_ms": 60}]},
        {"traffic": [{"rate": 100, "ramp_to": 200, "slo_ms": 60}]},
        {"traffic": [{"trace": [0.1, 0.2], "slo_ms": 60}]},
        {"traffic": [{"rate": 100, "slo_ms": 60, "ordering_keys": 5}]},
        {"backends": {"b": {}, "c": {}}},
        {"limits": {"load": [{"per": "second", "requests": 5}]}},
    ],
)
def test_what_a_part_cannot_stand_for_is_run_as_it_is(more):
    situation = situation_of(world_with(duration_s=7, **more), backend="b", headroom=0.5)
    for whole in (True, False):
        world = parse_world(
            document_of(situation, Setting(max_batch_size=4, max_queue_delay_microseconds=0), 99, whole=whole)
        )
        assert (world.backends["b"].replicas, world.duration_s) == (99, 7)


def test_replicas_that_fail_are_always_there():
    failures = [{"at_s": 1, "backend": "b", "replica": 2}]
    situation = situation_of(world_with(failures=failures, backends={"b": {"replicas": 3}}))
    assert situation.candidate(Setting(max_batch_size=4, max_queue_delay_microseconds=0)).least == 3


def test_headroom_is_more_of_whatever_comes():
    traffic = [
        {"name": "open", "rate": 100, "ramp_to": 200, "slo_ms": 60},
        {"name": "closed", "concurrency": 3},
        {"name": "traced", "trace": [0.1, 0.2]},
    ]
    situation = situation_of(world_with(traffic=traffic), headroom=0.5)
    made = [one.traffic for one in parse_world(situation.document).traffic]
    assert (made[0].rate, made[0].ramp_to, made[1].concurrency, made[2].speed) == (150, 300, 5, 1.5)


def test_a_run_has_a_hundred_requests_beyond_the_percentile():
    for percent, least in ((50, 200), (99, 10_000), (99.9, 100_000)):
        situation = situation_of(world_with(), slo=Slo(ms=50, percent=percent))
        extent = extent_of(situation, Setting(max_batch_size=1, max_queue_delay_microseconds=0), 2, whole=False)
        assert extent.counted_s * 100 >= least - 1e-6


@pytest.mark.parametrize(("slowdown", "counts"), [({}, {1}), ({"2": 1.3, "3": 1.9}, {1, 2, 3})])
def test_as_many_instances_are_looked_at_as_were_measured(slowdown, counts, tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({**TEN_MS, "slowdown": slowdown}))
    found, _ = planned(str(path), "--max-batch-size", "1", slo="p90=9ms")
    assert {one["setting"]["count"] for one in found["ruled_out"]} == counts


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"traffic": [{"rate": 5}]}, "no class has slo_ms"),
        ({"models": {"m": {"curve": TEN_MS, "max_batch_size": 4, "dynamic_batching": {},
                           "parameters": {"ADAPTIVE_BATCHING": "true"}}}}, "adaptive"),
        ({"traffic": [{"rate": -5}]}, "rate"),
    ],
)  # fmt: skip
def test_worlds_that_are_not_planned(more, words):
    with pytest.raises(WorldError, match=words):
        situation_of(world_with(**more))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --slo, --rate and --curve, or --world"),
        (("--slo", "p99=100ms", "--rate", "5"), "give --slo, --rate and --curve"),
        (("--slo", "soon", "--rate", "5"), "--slo"),
        (("--slo", "p97=10ms", "--rate", "5"), "one of the percentiles"),
        (("--slo", "50ms", "--rate", "5", "--curve", "CURVE", "--delay-us", "soon"), "--delay-us soon"),
        (("--slo", "50ms", "--rate", "5", "--curve", "CURVE", "--max-batch-size", "0"), "from 1 on"),
        (("--slo", "50ms", "--rate", "5", "--curve", "CURVE", "--rows", "9", "--max-batch-size", "4"), "none is so"),
        (("--slo", "50ms", "--rate", "5", "--curve", "/nowhere.json"), "/nowhere.json"),
        (("--slo", "50ms", "--rate", "5", "--curve", "CURVE", "--arrivals", "rarely"), "arrivals"),
        (("--slo", "50ms", "--rate", "5", "--curve", "CURVE", "--count", "2000"), "models.fixed.instances"),
        (("--world", "w.yaml", "--rate", "5"), "--world: says what --rate"),
        (("--world", "w.yaml", "--config-pbtxt", "c.pbtxt"), "--world: says what --rate"),
        (("--world", "/nowhere.yaml"), "/nowhere.yaml"),
    ],
)
def test_usage(arguments, words, curve):
    result = run("plan", *[curve if one == "CURVE" else one for one in arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_a_run_at_a_low_rate_is_long_and_probed_as_often_as_others(monkeypatch):
    probes = []
    monkeypatch.setattr(
        "gateway.tuning.simulation.servers.SimulatedServers.probe", counting(probes, SimulatedServers.probe)
    )
    world = parse_world(world_with(duration_s=200_000, traffic=[{"rate": 0.01, "slo_ms": 60}]))
    report = simulate(world)
    assert report.whole.codes == {"ok": report.whole.sent}
    assert report.whole.sent == pytest.approx(2000, rel=0.1)
    assert 9_000 < len(probes) < 11_000


def counting(seen, probe):
    async def counted(self, place):
        seen.append(place)
        await probe(self, place)

    return counted


def test_where_a_replica_fails_for_a_time_probes_come_every_second(monkeypatch):
    probes = []
    monkeypatch.setattr(
        "gateway.tuning.simulation.servers.SimulatedServers.probe", counting(probes, SimulatedServers.probe)
    )
    failures = [{"at_s": 5, "for_s": 5, "backend": "b"}]
    simulate(parse_world(world_with(duration_s=12_000, traffic=[{"rate": 0.01}], failures=failures)))
    assert len(probes) > 11_000


def test_a_size_in_the_millions_takes_no_more_runs_than_others_and_is_told(curve):
    found, code = planned(
        curve, "--max-batch-size", "1000000", "--delay-us", "0", "--count", "1", rate=50, slo="p50=100ms"
    )
    assert code == 0
    assert all(one["requests"] <= 4000 for one in found["chosen"]["runs"])


def test_what_no_run_is_long_enough_for_is_told():
    situation = situation_of(world_with(traffic=[{"rate": 50_000, "slo_ms": 100}]))
    vast, usual = (Setting(max_batch_size=size, max_queue_delay_microseconds=0) for size in (1_000_000, 32))
    assert is_cut(situation, vast, 5)
    assert not is_cut(situation, usual, 5)
    assert not is_cut(situation_of(world_with(traffic=[{"rate": 50, "slo_ms": 1000}])), vast, 1)
    for whole, most in ((True, 200_000), (False, 40_000)):
        extent = extent_of(situation, vast, 5, whole=whole)
        assert extent.counted_s * extent.share * 50_000 <= most * 1.01


def test_a_long_plan_says_in_lines_how_far_it_is(curve, monkeypatch):
    monkeypatch.setattr("gateway.cli.tuning.progress.EVERY_S", 0.0)
    result = run("plan", "--slo", "p90=60ms", "--rate", "300", "--curve", curve, *SINGLE, "--json")
    assert json.loads(result.stdout)["chosen"]["replicas"] == 4
    lines = result.stderr.splitlines()
    assert any(line.startswith("0 runs made; now 4 replicas, ") for line in lines)
    assert any(line.startswith("1 run made; the last: 4 replicas, ") for line in lines)


def test_a_low_rate_is_not_none(curve):
    result = run("plan", "--slo", "p50=60ms", "--rate", "0.01", "--curve", curve, *SINGLE)
    assert result.exit_code == 0, result.output
    assert "held at 0.012 requests/s, 20 % above" in result.output
    assert "goodput    0 requests/s" not in result.output
