"""A scheduler for vLLM whose process dies on the spot when it is handed a marked request."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

MARK = [31013] * 8
"""A prompt that begins so kills."""


class Killer(AsyncScheduler):  # type: ignore[misc]
    """What vLLM takes by default, until then."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if any(new.prompt_token_ids[: len(MARK)] == MARK for new in output.scheduled_new_reqs):
            os._exit(17)
        return output
