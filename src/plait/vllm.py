"""A scheduler plug-in for vLLM: ``vllm serve MODEL --scheduler-cls plait.vllm.Scheduler``.

vLLM keeps its own scheduler, which forms the steps; which request it may take next, and how many prompt tokens a step
should hold, is decided by Plait's ``Scheduler``, as for every other engine. The goal is ``throughput``, ``balanced`` or
``latency``, chosen with ``--additional-config '{"plait": {"goal": "latency"}}'`` or the environment variable
``PLAIT_VLLM_GOAL``; ``{"plait": {"policy": NAME}}`` names any policy of ``plait simulate`` instead.

``{"plait": {"prefill_tokens": 512}}`` also limits the prompt tokens of a step in which others generate, so that a long
prompt does not hold them up.

vLLM's CPU wheel looks through all loaded modules when it registers its kernels and stumbles over llvmlite's. So Numba
is not loaded before there is a scheduler, which vLLM makes after its executor.

vLLM calls this interface private. Where it is not what 0.32 has, vLLM's own order stays, with one warning. With
``--no-async-scheduling`` name ``plait.vllm.SyncScheduler`` instead.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler
from vllm.v1.request import Request, RequestStatus

from plait.errors import UsageError
from plait.events import Capacity, Step
from plait.table import I32

if TYPE_CHECKING:
    from plait.online import OnlineScheduler

try:
    from vllm.v1.core.sched.request_queue import RequestQueue
except ImportError:  # moved: vLLM's own order stays
    RequestQueue = object

log = logging.getLogger("vllm.plait")

GOALS = {"throughput": "blend", "balanced": "balanced", "latency": "latency"}
"""Goal -> policy."""
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
PARAMETERS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (Request, "__init__", ("prompt_token_ids", "sampling_params", "priority", "lora_request", "cache_salt")),
    (BaseScheduler, "_free_request", ("request",)),
    (BaseScheduler, "update_from_output", ("scheduler_output",)),
)
"""Class, method, and parameters of it that are relied on."""
ATTRIBUTES = (
    *("policy", "running", "requests", "max_num_scheduled_tokens", "num_spec_tokens", "max_model_len", "block_size"),
    *("scheduler_config", "cache_config", "kv_cache_config", "vllm_config", "max_num_active_reqs"),
)
"""What else is read of a scheduler."""
STATUSES = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "WAITING_FOR_STREAMING_REQ")
"""Of a request."""
STEPS_KEPT = 16
"""Steps under way are few; what is remembered of ones that never came back is dropped."""


class OrderedQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's waiting queue: it counts all that wait and shows those that our scheduler has admitted, in its order."""

    def __init__(self, online: OnlineScheduler, by_priority: bool, longest_tokens: int) -> None:
        self.online = online
        self._by_priority, self._longest_tokens = by_priority, longest_tokens
        self._admitted: deque[Request] = deque()

    def admit(self, running: Iterable[Request]) -> int | None:
        """Ask the scheduler what may go next, given how far the running requests are. Returns the prefill tokens that
        the next step should take; None: as vLLM has it."""
        left = sum(request.num_prompt_tokens for request in self._admitted)  # taken by nobody yet
        for request in running:
            self.online.progress(request, request.num_output_tokens)
            left += max(0, request.num_prompt_tokens - request.num_computed_tokens)
        admitted, prefill_tokens = self.online.decide(left)
        self._admitted.extend(admitted)
        return prefill_tokens

    def add_request(self, request: Request) -> None:
        """A new request, or the next turn of a session. A session that waits for its client is for vLLM to look at."""
        self.online.leave(request)
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._admitted.append(request)
            return
        most = max(1, min(request.max_tokens, self._longest_tokens - request.num_prompt_tokens))
        given = request.sampling_params
        least = 0 if given is None else most if given.ignore_eos and not given.stop else given.min_tokens
        priority = -request.priority if self._by_priority else 0
        self.online.arrive(request, prompt_tokens(request), most, least, priority)

    def pop_request(self) -> Request:
        """Take the next request: the one ``peek_request`` showed."""
        return self._admitted.popleft()

    def peek_request(self) -> Request:
        """The next request. Raises IndexError if none may go."""
        return self._admitted[0]

    def prepend_request(self, request: Request) -> None:
        """A preempted request."""
        if request in self.online:
            self.online.preempted(request)
        else:
            self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Requests that vLLM took and could not run yet: next, the last one in front as in vLLM's own queue."""
        self._admitted.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        """An aborted request."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Aborted requests; others are ignored."""
        for request in requests:
            if request in self._admitted:
                self._admitted.remove(request)
            self.online.leave(request)

    def __bool__(self) -> bool:
        return bool(self._admitted)

    def __len__(self) -> int:
        return len(self._admitted) + len(self.online)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._admitted, *self.online])


class _Ordered:
    """Puts our queue in place of vLLM's and tells our scheduler what becomes of requests and how long steps take."""

    waiting: Any
    running: Any
    requests: Any
    policy: Any
    scheduler_config: Any
    num_spec_tokens: Any
    max_num_scheduled_tokens: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from plait.model.steptime import assumed
        from plait.online import OnlineScheduler, compile_ahead

        super().__init__(*args, **kwargs)
        self.plait: OrderedQueue | None = None
        fault = interface_fault(self)
        if fault is not None:
            log.warning("plait: %s; vLLM's own order stays", fault)
            return
        policy, self.plait_prefill_tokens = chosen(self.vllm_config)  # type: ignore[attr-defined]
        self.plait_steps: dict[int, tuple[float, int, int, int, int]] = {}
        self.plait_stepped_s = 0.0
        compile_ahead(policy)
        capacity, shares = capacity_of(self), bool(self.cache_config.enable_prefix_caching)  # type: ignore[attr-defined]
        online = OnlineScheduler(capacity, assumed(), policy, time.monotonic, shares)
        by_priority = str(getattr(self.policy, "value", self.policy)) == "priority"
        self.plait = self.waiting = OrderedQueue(online, by_priority, self.max_model_len)  # type: ignore[attr-defined]
        log.info("plait: waiting requests are served by policy %s", policy)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step, of what our scheduler admits. Where somebody generates who would wait for it, its prefill is
        limited."""
        if self.plait is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        wanted = self.plait.admit(self.running)
        generating = sum(request.num_output_tokens > 0 for request in self.running)
        budgets = [tokens for tokens in (wanted, self.plait_prefill_tokens or None) if tokens is not None]
        config, whole = self.scheduler_config, self.max_num_scheduled_tokens
        chunk = config.long_prefill_token_threshold
        if generating and budgets:
            budget = min(budgets)
            self.max_num_scheduled_tokens = min(whole, generating * (1 + self.num_spec_tokens) + budget)
            config.long_prefill_token_threshold = min(chunk or budget, budget)  # nobody takes what is for the others
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens, config.long_prefill_token_threshold = whole, chunk
        self._note(output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """A step is done: how long it took."""
        noted = self.plait_steps.pop(id(scheduler_output), None) if self.plait is not None else None
        if self.plait is not None and noted is not None:
            begun_s, prefill, pairs, decoding, context = noted
            now_s = time.monotonic()
            duration_s = now_s - max(begun_s, self.plait_stepped_s)  # steps overlap under async scheduling
            self.plait_stepped_s = now_s
            self.plait.online.step(Step(now_s, duration_s, prefill, decoding, 0, pairs, context))
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _note(self, output: Any) -> None:
        """Remember what a step holds: begin, prefill tokens, the (token, context) pairs of their attention, decoding
        sequences, and the KV tokens these read."""
        prefill = pairs = decoding = context = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            end = request.num_computed_tokens  # after this step
            if tokens > 1 + self.num_spec_tokens or end <= request.num_prompt_tokens:
                prefill += tokens
                pairs += tokens * (end - tokens) + tokens * (tokens + 1) // 2
            else:
                decoding += 1
                context += end
        if prefill + decoding:
            self.plait_steps[id(output)] = time.monotonic(), prefill, pairs, decoding, context
            if len(self.plait_steps) > STEPS_KEPT:
                del self.plait_steps[next(iter(self.plait_steps))]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.plait is not None:
            answered = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
            self.plait.online.leave(request, request.num_output_tokens if answered else -1)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class Scheduler(_Ordered, AsyncScheduler):  # type: ignore[misc]
    """What vLLM takes by default, with our order."""


class SyncScheduler(_Ordered, BaseScheduler):  # type: ignore[misc]
    """What vLLM takes with ``--no-async-scheduling``, with our order."""


def prompt_tokens(request: Request) -> I32:
    """Token ids, int32 [n]. What shares no KV gets a first token of its own: prompts of other adapters or cache salts,
    and prompts that are embeddings."""
    given = request.prompt_token_ids
    tokens = np.zeros(request.num_prompt_tokens, np.int32) if given is None else np.array(given, np.int32)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    if given is None or adapter or request.cache_salt:
        apart = f"{adapter}\n{request.cache_salt}\n{request.request_id if given is None else ''}"
        tokens[0] = -1 - (zlib.crc32(apart.encode()) >> 1)
    return tokens


def capacity_of(scheduler: Any) -> Capacity:
    """What vLLM found room for. KV tokens as vLLM itself counts them: blocks are dealt out to the groups of layers."""
    block, cache = scheduler.block_size, scheduler.kv_cache_config
    blocks = (cache.num_blocks - 1) // max(1, len(cache.kv_cache_groups))  # one block is never given out
    longest = -(-scheduler.max_model_len // block)
    return Capacity(
        kv_tokens=max(blocks, longest) * block,
        block_tokens=block,
        max_num_seqs=scheduler.max_num_active_reqs,
        max_batched_tokens=scheduler.max_num_scheduled_tokens,
        max_context_tokens=scheduler.max_model_len,
        takes_prefill_budget=True,
    )


def chosen(vllm_config: Any) -> tuple[str, int]:
    """Policy, and prefill tokens of a step in which others generate (0: no limit of ours): from ``additional_config``,
    the goal else from the environment, else throughput. Unknown values are an error at the start."""
    from plait.policy.base import order_function

    extra = getattr(vllm_config, "additional_config", None)
    own = extra.get("plait") if isinstance(extra, dict) else None
    own = own if isinstance(own, dict) else {}
    goal = own.get("goal") or os.environ.get("PLAIT_VLLM_GOAL") or "throughput"
    if goal not in GOALS:
        raise ValueError(f"plait: goal is '{goal}'; known: {', '.join(GOALS)}")
    policy = str(own.get("policy") or GOALS[goal])
    try:
        order_function(policy)
    except UsageError as error:
        raise ValueError(f"plait: {error}") from None
    tokens = own.get("prefill_tokens", 0)
    if not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"plait: prefill_tokens is {tokens!r}; a whole number of tokens is needed (0: vLLM's own)")
    return policy, tokens


def interface_fault(scheduler: Any) -> str | None:
    """What about this vLLM is not as expected, or None."""
    if RequestQueue is object:
        return "this vLLM has no vllm.v1.core.sched.request_queue"
    abstract: frozenset[str] = getattr(RequestQueue, "__abstractmethods__", frozenset())
    if abstract != QUEUE_METHODS:
        return f"this vLLM's request queue asks for other methods: {', '.join(sorted(abstract ^ QUEUE_METHODS))}"
    if not isinstance(getattr(scheduler, "waiting", None), RequestQueue):
        return "this vLLM's scheduler has no waiting queue of its own"
    missing = [name for name in ATTRIBUTES if not hasattr(scheduler, name)]
    missing += [f"RequestStatus.{name}" for name in STATUSES if not hasattr(RequestStatus, name)]
    for owner, method, names in PARAMETERS:
        known = inspect.signature(getattr(owner, method)).parameters if hasattr(owner, method) else {}
        missing += [f"{name} of {owner.__name__}.{method}" for name in names if name not in known]
    return f"this vLLM has no {', '.join(missing)} where it was" if missing else None
