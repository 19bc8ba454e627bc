"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("plait", deadline=None)  # the first example may compile a kernel
settings.load_profile("plait")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces, prompts and cases that lies beside a checkout; tests that read it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here")
    return SHARED
