"""A scheduler plug-in for vLLM: ``vllm serve MODEL --scheduler-cls plait.vllm.Scheduler``.

vLLM keeps its own scheduler; only the order of its waiting queue is ours. The goal is ``throughput`` (prefix groups
side by side) or ``latency`` (least expected work first, lengths learned per prefix, with ageing), chosen with
``--additional-config '{"plait": {"goal": "latency"}}'`` or the environment variable ``PLAIT_VLLM_GOAL``.

vLLM calls this interface private. Where it is not what 0.32 has, vLLM's own order stays, with one warning. With
``--no-async-scheduling`` name ``plait.vllm.SyncScheduler`` instead.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler
from vllm.v1.request import Request, RequestStatus

from plait.engine.waiting import GOALS, OutputLengths, Waiting, WaitingOrder

log = logging.getLogger("vllm.plait")

QUEUE_METHODS = frozenset(
    {
        "add_request",
        "pop_request",
        "peek_request",
        "prepend_request",
        "prepend_requests",
        "remove_request",
        "remove_requests",
        "__bool__",
        "__len__",
        "__iter__",
    }
)
"""What vLLM 0.32 asks of a request queue."""


class OrderedQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's waiting queue in our order."""

    def __init__(self, order: WaitingOrder, by_priority: bool) -> None:
        self.order = order
        self.by_priority = by_priority

    def _item(self, request: Request) -> Waiting:
        tokens = np.asarray(request.prompt_token_ids or (), ">i4").tobytes()
        priority = request.priority if self.by_priority else 0
        return Waiting(request, tokens, request.max_tokens, priority)

    def add_request(self, request: Request) -> None:
        """A new request."""
        self.order.add(self._item(request))

    def pop_request(self) -> Request:
        """Take the next request: the one ``peek_request`` showed."""
        return self.order.pop().key

    def peek_request(self) -> Request:
        """The next request."""
        return self.order.peek().key

    def prepend_request(self, request: Request) -> None:
        """A preempted or skipped request: next, unless priorities say otherwise."""
        if self.by_priority:
            self.add_request(request)
        else:
            self.order.put_back(self._item(request))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Several of them, the last one in front as in vLLM's own queue."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """An aborted request."""
        self.order.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Aborted requests; others are ignored."""
        for request in requests:
            self.order.remove(request)

    def __bool__(self) -> bool:
        return len(self.order) > 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Request]:
        return iter([item.key for item in self.order.in_order()])


class _Ordered:
    """Puts our queue in place of vLLM's and learns output lengths from what ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plait_lengths: OutputLengths | None = None
        fault = interface_fault(self)
        if fault is not None:
            log.warning("plait: %s; vLLM's own order stays", fault)
            return
        self.plait_lengths = OutputLengths()
        goal = chosen_goal(getattr(self, "vllm_config", None))
        by_priority = str(getattr(self.policy, "value", self.policy)) == "priority"  # type: ignore[attr-defined]
        self.waiting = OrderedQueue(WaitingOrder(goal, self.plait_lengths), by_priority)
        log.info("plait: waiting requests are served for %s", goal)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.plait_lengths is not None and request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            opening = np.asarray(request.prompt_token_ids or (), ">i4").tobytes()
            self.plait_lengths.observe(Waiting(request, opening).group, request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class Scheduler(_Ordered, AsyncScheduler):  # type: ignore[misc]
    """What vLLM takes by default, with our order."""


class SyncScheduler(_Ordered, BaseScheduler):  # type: ignore[misc]
    """What vLLM takes with ``--no-async-scheduling``, with our order."""


def chosen_goal(vllm_config: Any) -> str:
    """From ``additional_config``, else the environment, else throughput; an unknown goal is an error at the start."""
    extra = getattr(vllm_config, "additional_config", None)
    own = extra.get("plait") if isinstance(extra, dict) else None
    goal = own.get("goal") if isinstance(own, dict) else None
    goal = goal or os.environ.get("PLAIT_VLLM_GOAL") or GOALS[0]
    if goal not in GOALS:
        raise ValueError(f"plait: goal is '{goal}'; known: {', '.join(GOALS)}")
    return str(goal)


def interface_fault(scheduler: Any) -> str | None:
    """What about this vLLM is not as expected, or None."""
    abstract: frozenset[str] = getattr(RequestQueue, "__abstractmethods__", frozenset())
    if abstract != QUEUE_METHODS:
        return f"this vLLM's request queue asks for other methods: {', '.join(sorted(abstract ^ QUEUE_METHODS))}"
    if not isinstance(getattr(scheduler, "waiting", None), RequestQueue):
        return "this vLLM's scheduler has no waiting queue of its own"
    if "request" not in inspect.signature(BaseScheduler._free_request).parameters:
        return "this vLLM frees requests in another way"
    return None
