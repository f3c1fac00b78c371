"""What LLM servers say of their load; the pages are as the real ones write them, cut to what is near the point."""

import pytest

from gateway.backends.llm.engine_metrics import load_in
from gateway.core.types import EngineLoad

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 8.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="deferred"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.0440771349862259
"""
LLAMA_CPP = b"""# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 2
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2826.0
sglang:token_usage{model_name="m"} 0.28
"""
TRTLLM = b"""trtllm_num_requests_running{model_name="m"} 1.0
trtllm_num_requests_waiting{model_name="m"} 2.0
trtllm_kv_cache_utilization{model_name="m"} 0.5
"""
TRITON = b"""nv_inference_pending_request_count{model="tensorrt_llm",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.6
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 60
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (VLLM, EngineLoad(running=8, waiting=4, kv_used=0.0440771349862259)),
        (
            VLLM.replace(b"kv_cache_usage", b"gpu_cache_usage"),
            EngineLoad(running=8, waiting=4, kv_used=0.0440771349862259),
        ),
        (LLAMA_CPP, EngineLoad(running=3, waiting=2)),
        (
            LLAMA_CPP + b"llamacpp:kv_cache_usage_ratio 0.25\n",
            EngineLoad(running=3, waiting=2, kv_used=0.25),
        ),
        (SGLANG, EngineLoad(running=5, waiting=2826, kv_used=0.28)),
        (TRTLLM, EngineLoad(running=1, waiting=2, kv_used=0.5)),
        (TRITON, EngineLoad(running=4, waiting=3, kv_used=0.6)),
        (VLLM.rstrip(b"\n"), EngineLoad(running=8, waiting=4, kv_used=0.0440771349862259)),
    ],
)
def test_engines(page, load):
    assert load_in(page) == load


def test_several_engines_are_summed_and_the_fullest_cache_counts():
    page = VLLM + VLLM.replace(b'engine="0"', b'engine="1"').replace(b"0.044", b"0.944")
    assert load_in(page) == EngineLoad(running=16, waiting=8, kv_used=0.9440771349862259)


def test_values_that_are_no_load_are_left_out():
    page = b"vllm:num_requests_running 1e1 1796013856000\nvllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n"
    assert load_in(page + b"vllm:kv_cache_usage_perc +Inf\n") == EngineLoad(running=10, waiting=0)
    assert load_in(b"vllm:num_requests_running 1e308\n" * 2 + b"vllm:num_requests_running 3\n") == EngineLoad(
        running=3, waiting=0
    )
    assert load_in(b"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 1.5\n") == EngineLoad(
        running=1, waiting=0, kv_used=1.0
    )


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>vllm:num_requests_running 1</html>",
        b"# TYPE vllm:num_requests_running gauge\n",
        b"vllm:num_requests_running\n",
        b"vllm:num_requests_running x\n",
        b"vllm:num_requests_running_total 4\n",
        b'nv_trt_llm_request_metrics{request_type="max"} 5\n',
        b"process_cpu_seconds_total 4\n",
    ],
)
def test_a_page_of_no_engine(page):
    assert load_in(page) is None
