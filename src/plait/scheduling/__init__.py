"""The scheduler's state and its compiled decisions; ``plait.scheduler`` and ``plait.simulate`` drive the same
functions."""
