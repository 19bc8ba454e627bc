"""Live calibration: what the scheduler believes of the machine follows the steps that the machine does."""

from __future__ import annotations

from plait.events import Step
from plait.model.calibrate import TRUSTED_RESIDUAL, WINDOW_STEPS, Calibrator, Observed, fit_steps
from plait.model.steptime import StepTime
from plait.scheduling.plan import Planner
from plait.scheduling.state import Records

FIRST_FIT_STEPS, FIT_GROWTH = 32, 1.25
"""Steps before the first fit, and the factor by which they grow until the next: fitting stays a small, constant share
of a run."""


class LiveStepTime:
    """Refits the planner's constants now and then. What recent steps do not tell apart (on a well-balanced engine:
    which side of a step is the longer one) stays as it was fitted before: each fit is the prior of the next."""

    def __init__(self, planner: Planner, prior: StepTime) -> None:
        self._planner, self._calibrator = planner, Calibrator(prior)
        self.due_step = FIRST_FIT_STEPS

    def follow(self, planner: Planner) -> None:
        """Tell another planner from now on."""
        self._planner = planner

    def observe(self, step: Step) -> None:
        """One step of a live engine."""
        self._calibrator.observe(step)
        if self._calibrator.seen >= self.due_step:
            found = self._calibrator.fit()
            self._take(found.step_time, found.residual, self._calibrator.seen)

    def observe_log(self, steps: Records) -> None:
        """All steps of a simulation so far, records with the fields of ``Step``."""
        if len(steps) >= self.due_step:
            found = fit_steps(Observed.of_records(steps[-WINDOW_STEPS:]), self._calibrator.prior)
            self._take(found.step_time, found.residual, len(steps))

    def _take(self, found: StepTime, residual: float, seen: int) -> None:
        self.due_step = max(seen + 1, int(seen * FIT_GROWTH))
        if residual < TRUSTED_RESIDUAL:
            self._calibrator.prior = found
            self._planner.set_step_time(found)
