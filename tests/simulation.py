"""Small random jobs and a slow, independent checker of simulated schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import StepTime
from plait.table import I64, RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree

STEP_TIME = StepTime(6e-5, 9e-3, 1e-9, 7e-8, 1.5e-3)
POLICIES = ("fcfs", "random", "dfs", "dual-scan", "blend")


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its true output lengths."""

    table: RequestTable
    tree: PrefixTree
    output_tokens: I64


def small_job(seed: int, n: int, groups: int = 0) -> Job:
    """n requests, some in groups that share up to 60 tokens; short and long outputs."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 120, n)
    output = np.where(rng.random(n) < 0.2, rng.integers(50, 300, n), rng.integers(1, 20, n))
    group = rng.integers(-1, groups, n) if groups else np.full(n, -1)
    tree = tree_from_groups(prompt, group, np.minimum(prompt, rng.integers(20, 60, n)))
    return Job(RequestTable.of(prompt), tree, output.astype(np.int64))


def capacity_for(kv_tokens: int, block_tokens: int = 1, chunk: int = 128, max_num_seqs: int = 0) -> Capacity:
    """A simulated engine's capacity."""
    return Capacity(kv_tokens, block_tokens, max_num_seqs, chunk, takes_prefill_budget=True, preempts_on_request=True)


def lengths_for(job: Job, knowledge: str) -> Lengths:
    """known, sampled or unknown."""
    if knowledge == "known":
        return Lengths.known(job.table, job.output_tokens)
    if knowledge == "sampled":
        return Lengths.sampled(job.table, job.tree, lambda rows: job.output_tokens[rows], 0.1)
    return Lengths.unknown(job.table, job.tree)
