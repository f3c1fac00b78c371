"""`gateway load` over the whole stack: real Triton and a real LLM server, several kinds of traffic at once."""

import json
from pathlib import Path

import skimage
import yaml

from gateway.tuning.report import parse_report
from tests.kit.stack import Stack

CHELSEA = Path(skimage.__file__).parent / "data" / "chelsea.png"
SHAPE = {"INPUT__0": [16], "INPUT__1": [16]}
CLASSES = [
    {"name": "people", "rate": 10, "slo_ms": 60_000, "task": "text-embedding", "input": {"text": "a cat"}},
    {"name": "images", "rate": 2, "task": "image-classification", "image": "cat.png"},
    {"name": "bulk", "concurrency": 1, "rows": 4, "priority": "batch", "tensor": "text_encoder", "shape": SHAPE},
    {"name": "talk", "concurrency": 1, "chat": "Say hello.", "max_tokens": 8},
]


def test_every_kind_of_traffic_is_answered_and_told(stack: Stack, tmp_path):
    (tmp_path / "cat.png").write_bytes(CHELSEA.read_bytes())
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump({"classes": CLASSES}))
    whom = ("--url", stack.data_url, "--key", stack.key, "--ops-url", stack.ops_urls[0])
    page = tmp_path / "report.html"
    done = stack.cli(
        *("load", "--traffic", str(tmp_path / "mixed.yaml"), *whom, "--duration", "3s", "--grace", "60s"),
        *("--html", str(page), "--json"),
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = parse_report(json.loads(done.stdout))
    by_name = {one.name: one for one in report.classes}
    for one in by_name.values():
        assert one.codes == {"ok": one.sent}, one
    assert by_name["talk"].tokens_per_s > 0
    assert by_name["talk"].first_token.p50 < by_name["talk"].latency.p50
    counted = {(one.backend, one.model): one for one in report.servers}
    assert counted["triton", "text_encoder"].executions > 0
    assert counted["triton", "image_classification"].executions > 0
    assert "Batches of triton/text_encoder" in page.read_text()
