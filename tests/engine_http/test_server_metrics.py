"""Metrics pages and info pages, as servers write them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.engine.http_settings import endpoint_name, target
from plait.engine.server_metrics import (
    Load,
    ServerInfo,
    parse_metrics,
    read_load,
    with_metrics,
    with_models,
    with_props,
    with_server_info,
)

VLLM = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 9.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="100"} 1.0
"""


def test_vllm_metrics_are_summed_over_engines_and_tell_the_kv_size() -> None:
    samples = parse_metrics(VLLM)
    assert read_load(samples) == Load("vllm", 7, 2, 0.5, 1100, 1)
    info = with_metrics(ServerInfo(), samples)
    assert (info.kind, info.kv_tokens, info.block_tokens) == ("vllm", 3200, 16)
    assert info.shares_within_a_batch


def test_the_other_servers_names_are_known_too() -> None:
    assert read_load(parse_metrics('sglang:num_running_reqs{a="b"} 5\nsglang:num_queue_reqs{a="b"} 1\n')) == Load(
        "sglang", 5, 1, 0, 0, 0
    )
    assert read_load(parse_metrics("llamacpp:requests_processing 2\nllamacpp:requests_deferred 3")) == Load(
        "llama.cpp", 2, 3, 0, 0, 0
    )
    assert read_load(parse_metrics("tgi_batch_current_size 4\ntgi_queue_size 7")) == Load("tgi", 4, 7, 0, 0, 0)
    assert read_load(parse_metrics("process_cpu_seconds_total 4")) is None


@given(st.text(max_size=300))
def test_no_metrics_page_breaks_the_reader(text: str) -> None:
    read_load(parse_metrics(text))
    parse_metrics(f"vllm:num_requests_running{text}")


def test_info_pages_fill_in_what_metrics_leave_open() -> None:
    models = {"data": [{"id": "a", "max_model_len": 4096}, {"id": "b", "max_model_len": 2048}]}
    info = with_models(ServerInfo(), models)
    assert (info.models, info.max_context_tokens) == (("a", "b"), 2048)
    llama = with_props(ServerInfo(), {"total_slots": 4, "default_generation_settings": {"n_ctx": 1024}})
    assert (llama.kind, llama.max_num_seqs, llama.kv_tokens, llama.block_tokens) == ("llama.cpp", 4, 1024, 1)
    sglang = with_server_info(ServerInfo(), {"max_total_num_tokens": 9000, "page_size": 16, "max_running_requests": 32})
    assert (sglang.kv_tokens, sglang.block_tokens, sglang.max_num_seqs) == (9000, 16, 32)
    for page in ({}, {"data": None}, {"data": [1, {"id": 2, "max_model_len": "x"}]}):
        with_models(ServerInfo(), page)
        assert with_props(ServerInfo(), page) == ServerInfo() == with_server_info(ServerInfo(), page)


def test_urls_of_lines_meet_endpoints_of_every_form() -> None:
    assert target("http://a:1/v1", "/v1/chat/completions") == "http://a:1/v1/chat/completions"
    assert target("http://a:1/v1/", "/v2/rerank") == "http://a:1/v2/rerank"
    assert target("http://a:1/v1", "/score") == "http://a:1/score"
    assert target("http://a:1", "/v1/embeddings") == "http://a:1/v1/embeddings"
    assert target("https://h/api/v3", "/v1/chat/completions") == "https://h/api/v3/chat/completions"
    assert target("https://h/openai/v1", "/v1/responses") == "https://h/openai/v1/responses"
    assert endpoint_name("http://user:secret@a:1/v1?key=secret") == "http://a:1/v1"
