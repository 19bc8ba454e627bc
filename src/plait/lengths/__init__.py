"""How long answers will be: what a planner may know about output lengths, and the only way it gets to know it."""

from plait.lengths.estimate import Lengths, paper_estimate
from plait.lengths.survival import LengthState, observe, refit, remaining

__all__ = ["LengthState", "Lengths", "observe", "paper_estimate", "refit", "remaining"]
