"""The figure of ``plait simulate``: compute and memory use per step over time (BlendServe Fig. 10), throughput,
bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import UsageError
from plait.model.steptime import StepTime
from plait.scheduling.state import Records
from plait.table import F64

POINTS = 400
"""Points of a curve; steps are averaged between them."""


def plot(traces: list[dict[str, Any]], path: Path) -> None:
    """Draw one column a trace. Raises UsageError where matplotlib is missing or the format is unknown."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'plait[report]'") from None
    rows = max(len(trace["policies"]) for trace in traces) + 1
    figure, axes = pyplot.subplots(rows, len(traces), figsize=(7 * len(traces), 2.2 * rows), squeeze=False)
    for column, trace in enumerate(traces):
        for line, (row, ranks) in enumerate(zip(trace["policies"], trace["results"], strict=True)):
            time_s, compute, memory = usage(ranks[0].steps, trace["step_time"])
            axis = axes[line][column]
            axis.plot(time_s, compute, label="compute", linewidth=1)
            axis.plot(time_s, memory, label="memory", linewidth=1)
            axis.set(title=f"{trace['name']}: {row['policy']}", ylabel="share of a step", ylim=(0, 1.05), xlabel="s")
            axis.legend(loc="lower left", fontsize=7)
        _throughput(axes[rows - 1][column], trace["policies"])
        for line in range(len(trace["policies"]), rows - 1):
            axes[line][column].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from None
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def usage(steps: Records, st: StepTime) -> tuple[F64, F64, F64]:
    """Time [k], and the shares [k] of step time in which the compute units and the memory are busy, averaged."""
    tokens = steps["prefill_tokens"] + steps["decode_seqs"]
    compute = np.maximum(st.gemm_base_s + st.gemm_s_per_token * tokens, st.weights_s)
    compute = compute + st.prefill_attn_s * steps["prefill_context_tokens"]
    memory = st.kv_read_s_per_token * steps["decode_context_tokens"]
    edges = np.unique(np.linspace(0, len(steps), min(POINTS, len(steps)) + 1).astype(np.int64))[:-1]
    duration = np.add.reduceat(steps["duration_s"], edges)
    share = [np.minimum(1.0, np.add.reduceat(part, edges) / duration) for part in (compute, memory)]
    return steps["t_s"][edges], share[0], share[1]


def _throughput(axis: Any, policies: list[dict[str, Any]]) -> None:
    names = [row["policy"] for row in policies]
    tokens = np.array([row["tokens_per_s"] for row in policies])
    axis.bar(names, tokens, color="tab:green")
    work = tokens[0] * policies[0]["makespan_s"]
    for key, label, style in (("practical_bound_s", "practical", "--"), ("ideal_bound_s", "ideal", ":")):
        axis.axhline(work / policies[0][key], linestyle=style, color="black", linewidth=1, label=f"{label} bound")
    axis.set(ylabel="tokens/s")
    axis.legend(loc="lower right", fontsize=7)
