"""How fast servers have been so far: what a request usually takes, learned from answers."""

from __future__ import annotations

from dataclasses import dataclass

from plait.engine.answers import Answer
from plait.engine.http_flight import Flight

PREFILL_SPEEDUP = 8.0
"""Prompt tokens that a server computes in the time of one output token, at least. Slow CPUs do about ten, GPUs
hundreds; an answer that arrives whole does not tell its prefill from its decoding."""
UNKNOWN_PREFILL_S = 2.0
"""Longest a group waits for its primer before any answer has shown how fast the servers are."""
MARGIN = 1.5
UNBOUNDED_TOKENS = 4096
"""Output a request without a cap is given time for."""


@dataclass
class Pace:
    """Running averages over the answers of a pool; zeros before the first."""

    token_s: float = 0.0
    """Time of an answer per output token."""
    unit_s: float = 0.0
    """Time of an answer per output token where ``PREFILL_SPEEDUP`` computed prompt tokens count as one."""
    bytes_per_token: float = 4.0
    """Of request bodies, per prompt token."""

    def learn(self, flight: Flight, answer: Answer, took_s: float) -> None:
        """Take an answer into the averages."""
        if answer.output_tokens:
            self.token_s = _moved(self.token_s, took_s / answer.output_tokens, 0.05)
        units = answer.output_tokens + (answer.prompt_tokens - answer.cached_tokens) / PREFILL_SPEEDUP
        if units > 0:
            self.unit_s = _moved(self.unit_s, took_s / units, 0.05)
        if answer.prompt_tokens:
            self.bytes_per_token = _moved(self.bytes_per_token, len(flight.body) / answer.prompt_tokens, 0.02)

    def prefill_s(self, flight: Flight) -> float:
        """Time after which its prompt is surely computed, at a server that begins with it at once."""
        if not self.unit_s:
            return UNKNOWN_PREFILL_S
        return MARGIN * self.unit_s * (1.0 + flight.prompt_tokens / PREFILL_SPEEDUP)

    def usual_s(self, flight: Flight) -> float:
        """Time that as many output tokens as it may generate usually take."""
        return self.token_s * min(flight.max_tokens, UNBOUNDED_TOKENS)


def _moved(average: float, value: float, weight: float) -> float:
    return average + weight * (value - average) if average else value
