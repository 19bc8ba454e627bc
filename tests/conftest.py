"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The first example may compile a kernel, and machines may be busy: time says nothing about a property.
settings.register_profile("plait", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("plait")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces, prompts and cases that lies beside a checkout; tests that read it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here")
    return SHARED
