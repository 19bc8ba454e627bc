"""Fit the constants of ``StepTime`` to the steps of a live engine.

A step's time is linear in the constants once it is known which side of each maximum is the longer one; so the fit
alternates between deciding that and a non-negative least-squares problem of seven unknowns on relative errors. Steps
far off the rest (a first step that compiles, a machine that slept) get no weight. What the steps do not tell apart
keeps the proportions of the prior, which as a whole is first scaled to the observed times; what is 0 there stays 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.events import Step
from plait.model.steptime import StepTime, steps_s
from plait.table import F64

WINDOW_STEPS = 4096
"""Steps the fit looks back on: enough to average noise, few enough to follow a machine that gets slower."""

TRUSTED_RESIDUAL = 0.5
"""A fit that misses the typical step by more than half says more about noise than about the machine."""

_FITTED = (
    "gemm_s_per_token",
    "gemm_base_s",
    "weights_s",
    "prefill_attn_s",
    "kv_read_s_per_token",
    "overhead_s",
    "decode_seq_s",
)
_ROUNDS = 12
_PRIOR_WEIGHT = 1e-3
"""Pull towards the scaled prior, in units of all observed steps."""
_OUTLIER = 6.0
"""Deviations (scaled median absolute) from which on a step has no weight."""


class Calibration(NamedTuple):
    """Fitted constants and how well they describe the steps."""

    step_time: StepTime
    residual: float
    """Median of |predicted / observed - 1|."""
    outliers: int
    """Steps that were given no weight."""
    steps: int


class Observed(NamedTuple):
    """k steps, float64 [k] each: the arguments of ``steps_s`` and the time it took."""

    prefill_tokens: F64
    prefill_context_pairs: F64
    decode_seqs: F64
    decode_kv_tokens: F64
    duration_s: F64

    @staticmethod
    def of_records(steps: npt.NDArray[np.void]) -> Observed:
        """Steps of a simulation's or journal's record array, whose fields are named as in ``plait.events.Step``."""
        names = ("prefill_tokens", "prefill_context_tokens", "decode_seqs", "decode_context_tokens", "duration_s")
        return Observed(*(steps[name].astype(np.float64) for name in names))


class Calibrator:
    """Collects an engine's steps and fits on demand. Memory and time of a fit are bounded by the window."""

    def __init__(self, prior: StepTime, window_steps: int = WINDOW_STEPS) -> None:
        self.prior = prior
        self._rows = np.zeros((window_steps, len(Observed._fields)))
        self.seen = 0

    def observe(self, step: Step) -> None:
        """Take note of one step; steps without work or time say nothing and are skipped."""
        if step.prefill_tokens + step.decode_seqs > 0 and step.duration_s > 0:
            self._rows[self.seen % len(self._rows)] = (
                step.prefill_tokens,
                step.prefill_context_tokens,
                step.decode_seqs,
                step.decode_context_tokens,
                step.duration_s,
            )
            self.seen += 1

    def observe_all(self, steps: Iterable[Step]) -> None:
        """``observe`` for several steps, oldest first."""
        for step in steps:
            self.observe(step)

    def sample(self, steps: int) -> F64:
        """At most so many of the window's steps, spread evenly over it, oldest first: float64 [k, 5], columns as in
        ``Observed``."""
        count = min(self.seen, len(self._rows))
        order = np.roll(np.arange(count), -(self.seen % len(self._rows)) if self.seen > count else 0)
        return self._rows[order[np.linspace(0, count - 1, min(count, steps)).astype(np.int64)]].copy()

    def fit(self) -> Calibration:
        """Constants that describe the last ``window_steps`` steps; the prior as it is before any was seen."""
        rows = self._rows[: min(self.seen, len(self._rows))]
        return fit_steps(Observed(*rows.T), self.prior)


def fit_steps(observed: Observed, prior: StepTime) -> Calibration:
    """Constants of the steps. ``interference``, ``overlapped`` and network per GEMM time are the prior's."""
    seconds = observed.duration_s
    if len(seconds) == 0:
        return Calibration(prior, 0.0, 0, 0)
    st = _scaled(prior, float(np.median(seconds / np.maximum(_predict(prior, observed), 1e-12))))
    target = np.array([getattr(st, name) for name in _FITTED])
    weight = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        columns = _columns(st, observed)
        found = target * _non_negative(columns * target / seconds[:, None], weight)
        network = float(found[0]) / max(prior.gemm_s_per_token, 1e-30)
        st = st._replace(
            comm_s_per_token=prior.comm_s_per_token * network,
            comm_base_s=prior.comm_base_s * network,
            **dict(zip(_FITTED, found.tolist(), strict=True)),
        )
        weight = _weights(_predict(st, observed) / seconds - 1)
    kept = weight > 0
    st = _scaled(st, float(seconds[kept].sum() / _predict(st, observed)[kept].sum()))  # totals matter for an ETA
    residual = float(np.median(np.abs(_predict(st, observed) / seconds - 1)))
    return Calibration(st, residual, int((~kept).sum()), len(seconds))


def _predict(st: StepTime, x: Observed) -> F64:
    return steps_s(st, x.prefill_tokens, x.prefill_context_pairs, x.decode_seqs, x.decode_kv_tokens)


def _scaled(st: StepTime, factor: float) -> StepTime:
    """All times multiplied."""
    names = (*_FITTED, "comm_s_per_token", "comm_base_s")
    return st._replace(**{name: getattr(st, name) * factor for name in names})


def _columns(st: StepTime, x: Observed) -> F64:
    """Seconds of each step for a unit of each fitted constant, with the maxima resolved as ``st`` has them; [k, 7]."""
    tokens = x.prefill_tokens + x.decode_seqs
    compute_bound = st.gemm_base_s + st.gemm_s_per_token * tokens >= st.weights_s
    gemm = np.maximum(st.gemm_base_s + st.gemm_s_per_token * tokens, st.weights_s)
    compute = gemm + st.prefill_attn_s * x.prefill_context_pairs
    memory = st.kv_read_s_per_token * x.decode_kv_tokens
    network = st.comm_base_s + st.comm_s_per_token * tokens
    longest = np.maximum(compute, np.maximum(memory, network))
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    compute_share = np.where(compute >= longest, 1.0, exposed)
    memory_share = np.where((memory >= longest) & (compute < longest), 1.0, exposed)
    return np.stack(
        (
            compute_share * compute_bound * tokens,
            compute_share * compute_bound,
            compute_share * ~compute_bound,
            compute_share * x.prefill_context_pairs,
            memory_share * x.decode_kv_tokens,
            np.ones(len(tokens)),
            x.decode_seqs,
        ),
        axis=1,
    )


def _weights(error: F64) -> F64:
    """Weight of each step from its relative error: 1 near the middle, falling to 0 at _OUTLIER deviations (Tukey)."""
    spread = max(1.4826 * float(np.median(np.abs(error))), 1e-3)
    inside = 1 - (error / (_OUTLIER * spread)) ** 2
    return np.where(inside > 0, inside**2, 0.0)


def _non_negative(columns: F64, weight: F64) -> F64:
    """x >= 0 that minimises the weighted mean of (columns · x − 1)² + _PRIOR_WEIGHT |x − 1|², by coordinates."""
    total = max(float(weight.sum()), 1e-12)
    gram = (columns * weight[:, None]).T @ columns / total + _PRIOR_WEIGHT * np.eye(columns.shape[1])
    right = columns.T @ weight / total + _PRIOR_WEIGHT
    x = np.ones(columns.shape[1])
    for _ in range(300):
        before = x.copy()
        for j in range(len(x)):
            x[j] = max(0.0, x[j] + (right[j] - gram[j] @ x) / gram[j, j])
        if np.abs(x - before).max() < 1e-10:
            break
    return x
