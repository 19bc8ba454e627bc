"""Fit the devices' efficiencies (``plait.model.rows.Efficiency``) to measured kernel times and print how good they are.

    python benchmarks/steptime_fit.py [--profiles ../shared/data/profiles] [--refit]

Without ``--refit`` the constants in the source are judged; with it they are fitted anew and printed. Writes
``out/steptime_fit.json``; exits with 1 if a median error is above 10 %.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plait.model.rows import Device, Efficiency
from plait.model.specs import Model, device, model, model_from_config
from plait.model.steptime import LayerTime, layer_time
from plait.table import F64

LIMIT = 0.10
DEVICES = {"a100": "A100-80", "h100": "H100", "a40": "A40", "a30": "A30"}
CLUSTERS = {"a100_dgx": "A100-80", "h100_dgx": "H100"}
NOISY = "a30 tp>1: the profile contradicts itself (128 tokens faster than 64) and is left out of the fit"
TABLE_1 = {"batch": (512, 768, 1024), "gemm_ms": (1.087, 1.537, 2.005), "attention_ms": (1.317, 1.913, 2.515)}
"""BlendServe, table 1: A100, Llama-3.1-8B, per layer, sequences of 1 024 tokens."""

Rows = dict[tuple[str, ...], F64]
Predict = Callable[[LayerTime, F64], F64]
"""(constants, measured rows [k, c]) -> seconds [k]."""


def read(path: Path, keys: Sequence[str], values: Sequence[str], kind: str | None = None) -> Rows:
    """Rows of a profile grouped by ``keys``: float64 [k, len(values)]; ``kind`` picks one value of is_prefill."""
    groups: dict[tuple[str, ...], list[list[float]]] = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            if kind is None or row["is_prefill"] == kind:
                groups[tuple(row[key] for key in keys)].append([float(row[value]) for value in values])
    return {key: np.array(rows) for key, rows in groups.items()}


def shapes(profiles: Path) -> dict[str, Model]:
    """The profiled models, with the shapes they were profiled in."""
    found = {}
    with (profiles / "models.csv").open() as file:
        for row in csv.DictReader(file):
            config: dict[str, Any] = {
                "hidden_size": int(row["n_embd"]),
                "num_hidden_layers": 1,
                "num_attention_heads": int(row["n_head"]),
                "num_key_value_heads": int(row["n_kv_head"]),
                "intermediate_size": int(row["n_expanded_embd"]),
                "vocab_size": int(row["vocab_size"]),
                "model_type": "llama" if row["use_gated_mlp"] == "True" else "phi",
            }
            found[row["model"]] = model_from_config(config, row["model"])
    return found


def gemm(layer: LayerTime, x: F64) -> F64:
    """Columns: tokens."""
    return np.maximum(layer.weights_s, layer.gemm_base_s + layer.gemm_token_s * x[:, 0])


def whole_layer(layer: LayerTime, x: F64) -> F64:
    """Matrix products and elementwise kernels together. Columns: tokens."""
    return gemm(layer, x) + layer.elementwise_base_s + layer.elementwise_token_s * x[:, 0]


def decode(layer: LayerTime, x: F64) -> F64:
    """Columns: batch size, KV tokens of each sequence."""
    return layer.attention_base_s + layer.kv_read_s * x[:, 0] * x[:, 1]


def prefill(layer: LayerTime, x: F64) -> F64:
    """Columns: context, chunk."""
    pairs = x[:, 1] * x[:, 0] + x[:, 1] * (x[:, 1] + 1) / 2
    return layer.prefill_base_s + layer.prefill_token_s * x[:, 1] + layer.prefill_pair_s * pairs


PARTS: dict[str, tuple[Predict, tuple[str, ...]]] = {
    "gemm": (gemm, ("gemm", "weight_read", "gemm_base", "layer_s")),
    "gemm + elementwise": (whole_layer, ("elementwise_hidden", "elementwise_mlp", "elementwise_s")),
    "decode attention": (decode, ("kv_read", "attention_s")),
    "prefill attention": (prefill, ("prefill_attention", "prefill_moves", "prefill_s")),
}
"""Kernel -> its model and the constants it determines, in the order they are fitted."""


def errors(row: Device, part: str, rows: Rows, models: dict[str, Model]) -> dict[tuple[str, ...], float]:
    """Median relative error of every (model, tp)."""
    predict = PARTS[part][0]
    found: dict[tuple[str, ...], float] = {}
    for (name, tp), measured in rows.items():
        predicted = predict(layer_time(row, models[name], int(tp)), measured)
        found[name, tp] = float(np.median(np.abs(predicted / (measured[:, -1] * 1e-6) - 1)))
    return found


def fit(row: Device, part: str, rows: Rows, models: dict[str, Model]) -> Device:
    """The device with the part's constants that minimise the mean |log(predicted / measured)|; pattern search."""
    predict, names = PARTS[part]

    def with_constants(logs: F64) -> Device:
        return replace(row, efficiency=row.efficiency._replace(**dict(zip(names, np.exp(logs).tolist(), strict=True))))

    def error(logs: F64) -> float:
        ratios = []
        for (name, tp), measured in rows.items():
            predicted = predict(layer_time(with_constants(logs), models[name], int(tp)), measured)
            ratios.append(np.abs(np.log(predicted / (measured[:, -1] * 1e-6))).mean())
        return float(np.mean(ratios))

    best = np.log([getattr(row.efficiency, name) for name in names])
    least, step = error(best), 0.2
    while step > 1e-3:
        trials = [best + step * sign * np.eye(len(names))[i] for i in range(len(names)) for sign in (1, -1)]
        found = min(trials, key=error)
        if error(found) < least:
            best, least = found, error(found)
        else:
            step /= 2
    return with_constants(best)


def kernels(profiles: Path) -> dict[tuple[str, str], Rows]:
    """(part, device) -> (model, tp) -> measured rows; the time in microseconds is the last column."""
    keys = ("device", "model", "tp")
    layer = read(profiles / "gemm_profile.csv.gz", keys, ("num_tokens", "gemm_us", "other_us"))
    sources = [("gemm", {key: x[:, :2] for key, x in layer.items()})]
    sources.append(("gemm + elementwise", {key: np.c_[x[:, 0], x[:, 1] + x[:, 2]] for key, x in layer.items()}))
    for name in ("attention_a100_llama3_8b_sample.csv", "attention_profile_a30_qwen2_7b.csv.gz"):
        sources.append(("decode attention", read(profiles / name, keys, ("batch_size", "kv_len", "time_us"), "0")))
        sources.append(("prefill attention", read(profiles / name, keys, ("kv_len", "prefill_chunk", "time_us"), "1")))
    found: dict[tuple[str, str], Rows] = defaultdict(dict)
    for part, rows in sources:
        for (name, shape, tp), measured in rows.items():
            if name != "a30" or tp == "1":
                found[part, name][shape, tp] = measured
    return found


def all_reduce(profiles: Path) -> dict[str, float]:
    """Median error of latency + ring bandwidth for each cluster and TP degree inside one node."""
    rows = read(profiles / "all_reduce_profile.csv.gz", ("cluster", "tp", "devices_per_node"), ("bytes", "time_us"))
    found = {}
    for (cluster, tp, per_node), measured in rows.items():
        if cluster in CLUSTERS and tp == per_node:
            row = device(CLUSTERS[cluster])
            ring = 2 * (int(tp) - 1) / int(tp) * measured[:, 0]
            predicted = row.link_latency_s + ring / row.link_bytes_s
            found[f"{cluster} tp {tp}"] = float(np.median(np.abs(predicted / (measured[:, 1] * 1e-6) - 1)))
    return found


def table_1() -> list[tuple[str, float, float]]:
    """(kernel and batch, published ms, predicted ms) for BlendServe's table 1."""
    layer = layer_time(device("A100-80"), model("Llama-3.1-8B"))
    batch = np.array(TABLE_1["batch"], np.float64)
    sequences = np.stack((batch, np.full(3, 1024.0)), axis=1)
    found = []
    for kernel, published, predicted in (
        ("GEMM", TABLE_1["gemm_ms"], gemm(layer, batch[:, None])),
        ("decode attention", TABLE_1["attention_ms"], decode(layer, sequences)),
    ):
        found += [(f"{kernel} {b:.0f}", ms, s * 1e3) for b, ms, s in zip(batch, published, predicted, strict=True)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path(__file__).parents[2] / "shared/data/profiles")
    parser.add_argument("--refit", action="store_true", help="fit the constants anew instead of judging the source's")
    parser.add_argument("--out", type=Path, default=Path("out/steptime_fit.json"))
    options = parser.parse_args()
    models = shapes(options.profiles)
    devices = {name: device(row) for name, row in DEVICES.items()}
    report: dict[str, float] = {}
    for part in PARTS:
        for (measured_part, name), rows in kernels(options.profiles).items():
            if measured_part != part:
                continue
            if options.refit:
                devices[name] = fit(devices[name], part, rows, models)
            for (shape, tp), error in errors(devices[name], part, rows, models).items():
                report[f"{part}, {name}, {shape}, tp {tp}"] = error
    report |= {f"all-reduce, {name}": error for name, error in all_reduce(options.profiles).items()}
    report |= {f"BlendServe table 1, {name}": abs(ms / real - 1) for name, real, ms in table_1()}
    for line, error in report.items():
        print(f"{error:7.1%}  {line}{'' if error <= LIMIT else '   <-- above 10 %'}")
    print(f"left out: {NOISY}")
    constants: dict[str, Efficiency] = {name: row.efficiency for name, row in devices.items()}
    for name, efficiency in constants.items():
        print(name, ", ".join(f"{field}={value:.4g}" for field, value in efficiency._asdict().items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    constants_out = {name: efficiency._asdict() for name, efficiency in constants.items()}
    options.out.write_text(json.dumps({"median_error": report, "constants": constants_out}, indent=1))
    return int(max(report.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
