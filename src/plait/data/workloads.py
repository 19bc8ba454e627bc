"""Seeded workloads like the ones BlendServe was evaluated on: mixes of sources to a wanted compute density and sharing.

T1–T4 and the grid need no data; X1–X5 take their lengths from real traces in a folder; S1 and S2 are rich in prefixes.
Density and sharing are those of the whole set for Llama-3.1-8B on an A100: ρ = (1 − s) · Σ Comp / Σ Mem, s = share of
prompt tokens that a depth-first order with an unlimited cache does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plait.data.sources import Part, Source, burstgpt_like, from_trace, grouped, mmlu_like, openvid_like
from plait.data.traces import Trace
from plait.errors import UsageError
from plait.model.cost import Cost, comp_s, cost_of, mem_s
from plait.model.specs import device, model
from plait.table import F64, I64, RequestTable
from plait.tree.build import tree_from_order
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import sharing_ratio

PAPER_BANDWIDTH_BYTES_S = 2.0e12
"""The A100's bandwidth as the paper's figures imply it."""
SYSTEM_PROMPT_TOKENS = 8
"""Tokens all requests of a source start with (the paper gives each source one system prompt)."""

SYNTHETIC = {"T1": (1.4, 0.35), "T2": (0.9, 0.35), "T3": (1.4, 0.05), "T4": (0.9, 0.05)}
"""Name -> density and sharing (paper §6.1)."""
REAL = {
    "X1": (("sharegpt", "video"), 1.2, 0.25),
    "X2": (("azure_conv_2023", "servegen_deepseek_r1"), 1.0, 0.30),
    "X3": (("lmsys", "servegen_deepseek_r1"), 1.2, 0.35),
    "X4": (("servegen_m_mid", "servegen_deepseek_r1"), 1.0, 0.15),
    "X5": (("azure_conv_2023", "video"), 1.4, 0.10),
}
"""Name -> compute-heavy and memory-heavy source, density, sharing; MMLU-like requests bring the sharing."""
PREFIX_RICH = {"S1": 1.2, "S2": 0.9}
"""Name -> density; 4 000 groups with prefixes of 500–3 000 tokens."""
WORKLOADS = (*SYNTHETIC, *REAL, *PREFIX_RICH)


def workload(name: str, n: int | None = None, seed: int = 0, traces: Path | None = None) -> Trace:
    """Workload by name; n defaults to 400 000 (T), 200 000 (X, S). ``traces``: folder of the length traces, for X1–X5.

    Raises UsageError for an unknown name, InputError where a trace cannot be read.
    """
    if name in SYNTHETIC:
        return synthetic(*SYNTHETIC[name], n or 400_000, seed, name)
    if name in PREFIX_RICH:
        return prefix_rich(PREFIX_RICH[name], n or 200_000, seed, name)
    if name not in REAL:
        raise UsageError(f"unknown workload '{name}'; known: {', '.join(WORKLOADS)}")
    if traces is None:
        raise UsageError(f"workload {name} has real lengths; name the folder of the traces")
    (light, heavy), density, sharing = REAL[name]
    memory = openvid_like if heavy == "video" else from_trace(traces / f"{heavy}.csv.gz")
    return mix([from_trace(traces / f"{light}.csv.gz"), memory, mmlu_like], density, sharing, n or 200_000, seed, name)


def synthetic(density: float, sharing: float, n: int, seed: int = 0, name: str = "mix") -> Trace:
    """BurstGPT-like, OpenVid-like and MMLU-like requests mixed to a density and a sharing (T1–T4 and the grid)."""
    return mix([burstgpt_like, openvid_like, mmlu_like], density, sharing, n, seed, name)


def grid() -> list[tuple[float, float]]:
    """The paper's 65 points: density 0.8–1.4 in steps of 0.05 × sharing 0.05–0.45 in steps of 0.1."""
    return [(round(0.8 + 0.05 * i, 2), round(0.05 + 0.1 * j, 2)) for i in range(13) for j in range(5)]


def paper_cost() -> Cost:
    """Cost constants behind the densities of this module: Llama-3.1-8B on one A100, 312 TFLOP/s and 2.0 TB/s."""
    return cost_of(device("A100-80"), model("Llama-3.1-8B"), bandwidth=PAPER_BANDWIDTH_BYTES_S)


def achieved(trace: Trace, cost: Cost | None = None) -> tuple[float, float]:
    """Density (1 − s) Σ Comp / Σ Mem and sharing s that a trace really has."""
    cost = cost or paper_cost()
    prompt, output = trace.table.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    sharing = sharing_ratio(trace.tree, trace.table.prompt_tokens)
    return (1 - sharing) * float(comp_s(cost, prompt, output).sum() / mem_s(cost, prompt, output).sum()), sharing


def mix(sources: Sequence[Source], density: float, sharing: float, n: int, seed: int, name: str) -> Trace:
    """n requests of three sources, shuffled, in numbers that meet density and sharing.

    Each source is sampled evenly over its distribution, so the sums a source contributes are nearly linear in its
    number of requests: three linear equations (all requests, sharing, density) give the numbers, and a few rounds with
    the sums of the real samples remove what is left; a small n comes as near as whole requests allow. Raises UsageError
    where no mix has that density and sharing.
    """
    counts = np.full(len(sources), n / len(sources))
    best, best_error = None, np.inf
    for _ in range(8):
        parts = _draw(sources, _whole(counts, n), seed)
        trace = assemble(parts, seed, name)
        error = float(np.abs(np.array(achieved(trace)) / (density, sharing) - 1).max())
        if error < best_error:
            best, best_error = trace, error
        counts = _solve(np.array([_sums(part) / len(part.group) for part in parts]), density, sharing, n)
        if best_error < 1e-4:
            break
        if np.any(counts < 0):
            raise UsageError(f"no mix of these sources has density {density} and sharing {sharing}")
    assert best is not None
    return best


def _draw(sources: Sequence[Source], counts: I64, seed: int) -> list[Part]:
    """Every source's requests, each from its own random stream."""
    numbered = enumerate(zip(sources, counts, strict=True))
    return [source(int(k), np.random.default_rng([seed, i])) for i, (source, k) in numbered]


def _whole(counts: F64, n: int) -> I64:
    """Counts rounded to whole numbers >= 2 that add up to n; the largest takes up the difference."""
    whole = np.maximum(2, np.rint(counts)).astype(np.int64)
    whole[np.argmax(whole)] += n - whole.sum()
    return whole


def _sums(part: Part) -> F64:
    """Comp seconds, Mem seconds, prompt tokens and shared prompt tokens of a part."""
    cost, tree = paper_cost(), _tree([part])
    prompt, output = part.prompt_tokens.astype(np.float64), part.output_tokens.astype(np.float64)
    shared = sharing_ratio(tree, part.prompt_tokens) * prompt.sum()
    return np.array([comp_s(cost, prompt, output).sum(), mem_s(cost, prompt, output).sum(), prompt.sum(), shared])


def _solve(mean: F64, density: float, sharing: float, n: int) -> F64:
    """Requests of each source, float64 [3], from the mean sums of one request of each, float64 [3, 4]."""
    comp, memory, prompt, shared = mean.T
    equations = np.array([np.ones(3), shared - sharing * prompt, (1 - sharing) * comp - density * memory])
    scale = np.abs(equations).max(axis=1)
    return np.linalg.solve(equations / scale[:, None], np.array([n, 0, 0]) / scale)


def prefix_rich(density: float, n: int, seed: int = 0, name: str = "prefix-rich", groups: int = 4000) -> Trace:
    """Groups of requests with prefixes of 500–3 000 tokens, some of them with answers as long as the density asks for.

    Raises UsageError if no length does.
    """
    low, high = 20.0, 16_000.0
    for _ in range(20):
        long_mean = float(np.sqrt(low * high))
        trace = assemble([grouped(n, np.random.default_rng([seed, 7]), groups, long_mean)], seed, name)
        ratio = achieved(trace)[0] / density
        if abs(ratio - 1) < 0.001:
            return trace
        low, high = (long_mean, high) if ratio > 1 else (low, long_mean)
    raise UsageError(f"{n} requests in {groups} groups cannot have density {density}")


def assemble(parts: Sequence[Part], seed: int, name: str) -> Trace:
    """One shuffled trace of all parts; a part is a subtree below its system prompt, its groups are subtrees of that."""
    prompt = np.concatenate([part.prompt_tokens for part in parts])
    output = np.concatenate([part.output_tokens for part in parts])
    place = np.random.default_rng([seed, 99]).permutation(len(prompt))  # row i of the parts becomes row place[i]
    table = RequestTable.of(_scatter(prompt, place))
    return Trace(name, table, _tree(parts, place), _scatter(output, place))


def _scatter(values: I64, place: I64) -> I64:
    """``values[i]`` moved to position ``place[i]``."""
    moved = np.empty_like(values)
    moved[place] = values
    return moved


def _tree(parts: Sequence[Part], place: I64 | None = None) -> PrefixTree:
    """Prefix tree of parts whose i-th row (counted over all parts) is row ``place[i]`` of the table (default: i)."""
    prompt = np.concatenate([part.prompt_tokens for part in parts])
    source = np.repeat(np.arange(len(parts)), [len(part.group) for part in parts])
    group = np.concatenate([part.group for part in parts])
    prefix = np.concatenate([part.prefix_tokens for part in parts])
    own = np.minimum(np.maximum(prefix, SYSTEM_PROMPT_TOKENS), prompt)
    rows = np.lexsort((own, group, source))
    above, below = rows[:-1], rows[1:]
    common = np.minimum(own[above], own[below])
    same_group = (group[above] == group[below]) & (group[below] >= 0)
    shared = np.zeros(len(rows), np.int64)
    shared[1:] = np.where(same_group, common, np.minimum(common, SYSTEM_PROMPT_TOKENS))
    shared[1:][source[above] != source[below]] = 0
    return tree_from_order(rows if place is None else place[rows], shared)
