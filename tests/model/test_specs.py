"""Device and model rows: sizes that are published elsewhere, names as people spell them, configs as they come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import CapacityError, InputError, UsageError
from plait.model.rows import DEVICES, MODEL_CONFIGS
from plait.model.specs import device, kv_bytes_per_token, kv_tokens_that_fit, model, peak_flops

PUBLISHED_BILLIONS = {
    "Llama-2-7B": (6.74, 6.74),
    "Llama-2-13B": (13.02, 13.02),
    "Llama-2-70B": (68.98, 68.98),
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3.1-70B": (70.55, 70.55),
    "Qwen-2.5-7B": (7.62, 7.62),
    "Qwen-2.5-72B": (72.71, 72.71),
    "Qwen-3-8B": (8.19, 8.19),
    "Qwen-3-32B": (32.76, 32.76),
    "Qwen-3-30B-A3B": (30.53, 3.35),
    "Mistral-7B": (7.25, 7.25),
    "Mixtral-8x7B": (46.70, 12.88),
    "DeepSeek-67B": (67.42, 67.42),
    "DeepSeek-V2-Lite": (15.71, 2.66),
    "DeepSeek-V3": (671.03, 37.55),
    "SmolLM2-135M": (0.1345, 0.1345),
}
"""All and active parameters as the model cards give them (active ones with embeddings)."""


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    found = model(name)
    assert found.params / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name][0], rel=2e-3)
    assert found.active_params / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name][1], rel=2e-3)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("Llama-3.1-8B", 131_072),
        ("Llama-2-7B", 524_288),
        ("Llama-3.1-70B", 327_680),
        ("Qwen-2.5-7B", 57_344),
        ("DeepSeek-V3", 70_272),
        ("SmolLM2-135M", 23_040),
    ],
)
def test_kv_bytes_of_a_token(name: str, kv_bytes: int) -> None:
    assert kv_bytes_per_token(model(name)) == kv_bytes
    assert kv_bytes_per_token(model(name, kv="fp8")) == kv_bytes / 2


@pytest.mark.parametrize(
    ("spelled", "row"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("qwen2.5-7b", "Qwen-2.5-7B"),
        ("Qwen/Qwen3-30B-A3B-Instruct", "Qwen-3-30B-A3B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "DeepSeek-V2-Lite"),
        ("mixtral 8x7b", "Mixtral-8x7B"),
    ],
)
def test_a_model_is_found_however_it_is_spelled(spelled: str, row: str) -> None:
    assert model(spelled).name == row


@pytest.mark.parametrize(
    ("spelled", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("a100", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a10", "A10"),
        ("mi300x", "MI300X"),
        ("cpu", "CPU"),
    ],
)
def test_a_device_is_found_however_it_is_spelled(spelled: str, row: str) -> None:
    assert device(spelled).name == row


def test_an_unknown_name_is_answered_with_the_nearest_one_and_all_others() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'lama-3.1-8b'; did you mean 'Llama-3.1-8B'\?.*config.json"):
        model("lama-3.1-8b")
    with pytest.raises(UsageError, match=r"unknown device 'h1000'; did you mean 'H100'\? known: A100-80"):
        device("h1000")
    with pytest.raises(UsageError, match="unknown data type 'fp7'"):
        model("Llama-3.1-8B", weights="fp7")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_positive_figures_and_a_plausible_balance_point(name: str) -> None:
    row = DEVICES[name]
    assert row.flops > 0 and row.memory_bytes > 0 and row.link_bytes_s > 0
    assert 5 < row.flops / row.bandwidth_bytes_s < 600
    assert all(0 < share <= 1 for share in row.efficiency[:2])


def test_a_config_from_disk_equals_the_row(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, **MODEL_CONFIGS["Llama-3.1-8B"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = model("Llama-3.1-8B")
    for given in (tmp_path, tmp_path / "config.json", config):
        found = model(given)
        assert (found.params, found.layers, kv_bytes_per_token(found)) == (row.params, row.layers, 131_072)
    assert model({"text_config": config, "vision_config": {}}).params == row.params


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is needed"),
        ('{"hidden_size": 64}', "num_hidden_layers is None; a whole number >= 1"),
        ('{"hidden_size": "64"}', "hidden_size is '64'"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        model(path)
    assert str(path) in str(caught.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read"):
        model(tmp_path / "nowhere.json")


def test_kv_that_fits_grows_with_devices_until_the_kv_heads_are_used_up() -> None:
    a100, llama = device("A100-80"), model("Llama-3.1-70B")
    fit = {tp: kv_tokens_that_fit(a100, llama, tp) for tp in (4, 8, 16)}
    assert fit[8] > 2 * fit[4]
    per_rank = 81920 * 2**20 * 0.9 - llama.params * 2 / 16
    assert fit[16] == int(per_rank / (327_680 / 8))  # 8 KV heads: 16 ranks hold each one twice


def test_the_papers_60_gb_of_kv_are_about_what_fits_beside_llama_8b() -> None:
    assert kv_tokens_that_fit(device("A100-80"), model("Llama-3.1-8B")) == pytest.approx(457_763, rel=0.05)


def test_weights_that_do_not_fit_are_refused_with_advice() -> None:
    with pytest.raises(CapacityError, match=r"Llama-3.1-70B needs 131.4 GiB.*A100-80.*higher TP degree"):
        kv_tokens_that_fit(device("A100-80"), model("Llama-3.1-70B"))
    assert kv_tokens_that_fit(device("A100-80"), model("Llama-3.1-70B", weights="int4")) > 50_000


def test_8_bit_weights_run_at_the_8_bit_rate_where_there_is_one() -> None:
    assert peak_flops(device("H100"), model("Llama-3.1-8B", weights="fp8")) == device("H100").flops_8bit
    assert peak_flops(device("H100"), model("Llama-3.1-8B", weights="int4")) == device("H100").flops
    assert peak_flops(device("CPU"), model("Llama-3.1-8B", weights="int8")) == device("CPU").flops
