"""A scheduler plug-in for vLLM: ``vllm serve MODEL --scheduler-cls plait.vllm.Scheduler``.

vLLM keeps its own scheduler; only the order of its waiting queue is ours. The goal is ``throughput`` (prefix groups
side by side) or ``latency`` (least expected work first, lengths learned per prefix, with ageing), chosen with
``--additional-config '{"plait": {"goal": "latency"}}'`` or the environment variable ``PLAIT_VLLM_GOAL``.

``{"plait": {"prefill_tokens": 512}}`` also limits the prompt tokens of a step in which others generate, so that a long
prompt does not hold them up.

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
from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler
from vllm.v1.request import Request, RequestStatus

from plait.engine.waiting import GOALS, OutputLengths, Waiting, WaitingOrder

try:
    from vllm.v1.core.sched.request_queue import RequestQueue
except ImportError:  # moved: vLLM's own order stays
    RequestQueue = object

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
REQUEST_PARAMETERS = ("prompt_token_ids", "sampling_params", "priority")
STEP_ATTRIBUTES = ("policy", "running", "max_num_scheduled_tokens", "num_spec_tokens", "scheduler_config")
"""What else is read of a request and of a scheduler."""


class OrderedQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's waiting queue in our order."""

    def __init__(self, order: WaitingOrder, by_priority: bool) -> None:
        self.order = order
        self.by_priority = by_priority

    def _item(self, request: Request) -> Waiting:
        """The request's place, which it keeps when it comes back after it was taken."""
        item: Waiting | None = getattr(request, "plait_place", None)
        if item is None:
            priority = request.priority if self.by_priority else 0
            item = Waiting(request, token_bytes(request), request.max_tokens, priority)
            request.plait_place = item
        return item

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
        item = self._item(request)
        if self.by_priority:
            self.order.add_again(item)
        else:
            self.order.put_back(item)

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
        self.plait_prefill_tokens = 0
        fault = interface_fault(self)
        if fault is not None:
            log.warning("plait: %s; vLLM's own order stays", fault)
            return
        self.plait_lengths = OutputLengths()
        goal, self.plait_prefill_tokens = chosen(getattr(self, "vllm_config", None))
        by_priority = str(getattr(self.policy, "value", self.policy)) == "priority"  # type: ignore[attr-defined]
        self.waiting = OrderedQueue(WaitingOrder(goal, self.plait_lengths), by_priority)
        log.info("plait: waiting requests are served for %s", goal)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step; with a prefill budget only where somebody generates who would wait for it."""
        generating = sum(request.num_output_tokens > 0 for request in self.running) if self.plait_prefill_tokens else 0  # type: ignore[attr-defined]
        if not generating:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        config, budget = self.scheduler_config, self.plait_prefill_tokens  # type: ignore[attr-defined]
        whole, chunk = self.max_num_scheduled_tokens, config.long_prefill_token_threshold  # type: ignore[has-type]
        self.max_num_scheduled_tokens = min(whole, generating * (1 + self.num_spec_tokens) + budget)  # type: ignore[attr-defined]
        config.long_prefill_token_threshold = min(chunk or budget, budget)  # nobody takes what is for the others
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens, config.long_prefill_token_threshold = whole, chunk

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.plait_lengths is not None and request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            opening = Waiting(request, token_bytes(request)).group
            self.plait_lengths.observe(opening, request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class Scheduler(_Ordered, AsyncScheduler):  # type: ignore[misc]
    """What vLLM takes by default, with our order."""


class SyncScheduler(_Ordered, BaseScheduler):  # type: ignore[misc]
    """What vLLM takes with ``--no-async-scheduling``, with our order."""


def token_bytes(request: Request) -> bytes:
    """Prompt tokens, in an order-preserving form; none where the prompt is embeddings."""
    return np.asarray(request.prompt_token_ids or (), ">i4").tobytes()


def chosen(vllm_config: Any) -> tuple[str, int]:
    """Goal, and prefill tokens of a step in which others generate (0: vLLM's own budget): from ``additional_config``,
    the goal else from the environment, else throughput. Unknown values are an error at the start."""
    extra = getattr(vllm_config, "additional_config", None)
    own = extra.get("plait") if isinstance(extra, dict) else None
    own = own if isinstance(own, dict) else {}
    goal = own.get("goal") or os.environ.get("PLAIT_VLLM_GOAL") or GOALS[0]
    if goal not in GOALS:
        raise ValueError(f"plait: goal is '{goal}'; known: {', '.join(GOALS)}")
    tokens = own.get("prefill_tokens", 0)
    if not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"plait: prefill_tokens is {tokens!r}; a whole number of tokens is needed (0: vLLM's own)")
    return str(goal), tokens


def interface_fault(scheduler: Any) -> str | None:
    """What about this vLLM is not as expected, or None."""
    if RequestQueue is object:
        return "this vLLM has no vllm.v1.core.sched.request_queue"
    abstract: frozenset[str] = getattr(RequestQueue, "__abstractmethods__", frozenset())
    if abstract != QUEUE_METHODS:
        return f"this vLLM's request queue asks for other methods: {', '.join(sorted(abstract ^ QUEUE_METHODS))}"
    if not isinstance(getattr(scheduler, "waiting", None), RequestQueue):
        return "this vLLM's scheduler has no waiting queue of its own"
    if "request" not in inspect.signature(BaseScheduler._free_request).parameters:
        return "this vLLM frees requests in another way"
    parameters = inspect.signature(Request.__init__).parameters
    missing = [name for name in REQUEST_PARAMETERS if name not in parameters]
    missing += [name for name in STEP_ATTRIBUTES if not hasattr(scheduler, name)]
    return f"this vLLM has no {', '.join(missing)} where it was" if missing else None
