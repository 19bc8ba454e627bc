"""The request bodies of /v1/chat/completions and /v1/completions as types.

One source for both readings of a line: the fast one decodes straight into these types, the thorough one
(``plait.data.validate``) asks them field by field what is allowed. ``Meta(description=...)`` is the text a user sees.
Encoding a decoded body gives its canonical form: fields in the order below, absent and null alike left out, while
objects whose key order reaches the model (tools, JSON schemas) keep it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

Text: TypeAlias = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1, description="an integer from 1 to 2147483647")]
FromZero: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1, description="an integer from 0 to 2147483647")]
Whole: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a 64-bit integer")]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
Positive: TypeAlias = Annotated[float, Meta(gt=0, description="a number > 0")]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=128, description="an integer from 1 to 128")]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="an integer >= 1, or 0 or -1 for no limit")]
Stops: TypeAlias = (
    Text | Annotated[list[Text], Meta(max_length=4, description="a string or a list of at most 4 strings")]
)
Bias: TypeAlias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(description="an object of token ids with numbers from -100 to 100"),
]
TokenIds: TypeAlias = Annotated[list[FromZero], Meta(description="a list of token ids")]
Prompt: TypeAlias = (
    Text
    | Annotated[list[FromZero], Meta(min_length=1, description="a string, or one list of token ids, and not empty")]
)


class TextPart(Struct, forbid_unknown_fields=True):
    """Text inside a list of content parts."""

    type: Literal["text"]
    text: str


Content: TypeAlias = str | Annotated[list[TextPart], Meta(min_length=1)]


class _Message(Struct, tag_field="role", forbid_unknown_fields=True, omit_defaults=True):
    """Fields of every message."""

    content: Content
    name: str | None = None


class SystemMessage(_Message, tag="system"):
    """Instructions."""


class DeveloperMessage(_Message, tag="developer"):
    """Instructions, under their newer name."""


class UserMessage(_Message, tag="user"):
    """What the user says."""


class ToolMessage(_Message, tag="tool"):
    """What a tool answered."""

    tool_call_id: str | None = None


class FunctionMessage(_Message, tag="function"):
    """What a function answered (older form of tool)."""


class AssistantMessage(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, omit_defaults=True):
    """What the model said earlier; without content only where it called a tool."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None

    def __post_init__(self) -> None:
        """Raise ValueError (msgspec makes it a ValidationError) for a message that says nothing."""
        if self.content is None and not self.tool_calls and self.function_call is None and self.refusal is None:
            raise ValueError("an assistant message needs content or tool_calls")


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
MESSAGES: dict[str, type[Struct]] = {
    "system": SystemMessage,
    "developer": DeveloperMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "function": FunctionMessage,
}


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class JsonFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True, omit_defaults=True):
    """Any JSON object; ``schema`` is an extension of some servers."""

    schema: dict[str, Any] | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that follows a schema."""

    json_schema: dict[str, Any]


class TagFormat(Struct, tag_field="type", tag="structural_tag", forbid_unknown_fields=True, omit_defaults=True):
    """Tagged parts, an extension of vLLM and SGLang."""

    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat: TypeAlias = TextFormat | JsonFormat | SchemaFormat | TagFormat


class Common(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Parameters of both endpoints: OpenAI's, then those that vLLM and SGLang add."""

    model: Text | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Choices | None = None
    stop: Stops | None = None
    seed: Whole | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Positive | None = None
    length_penalty: float | None = None
    min_tokens: FromZero | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    custom_params: dict[str, Any] | None = None
    custom_logit_processor: str | None = None
    logits_processors: list[Any] | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    priority: Whole | None = None
    request_id: str | None = None
    rid: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError (msgspec makes it a ValidationError) for what the types cannot say."""
        if self.stream:
            raise ValueError("stream is true")

    def is_deterministic(self) -> bool:
        """True if the same body gives the same answer again: seeded, or greedy with one choice."""
        return self.seed is not None or (self.temperature == 0 and self.n in (None, 1))


class ChatBody(Common, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, description="a list of at least one message")]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="an integer from 0 to 20")] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionBody(Common, kw_only=True):
    """Body of /v1/completions. One prompt a line: a list of prompts is several requests."""

    prompt: Prompt
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20, description="an integer from 0 to 20")] | None = None
    suffix: str | None = None


class ChatLine(Struct, tag_field="url", tag="/v1/chat/completions", forbid_unknown_fields=True):
    """A whole line of a batch file for chat."""

    custom_id: Text
    method: Literal["POST"]
    body: ChatBody


class CompletionLine(Struct, tag_field="url", tag="/v1/completions", forbid_unknown_fields=True):
    """A whole line of a batch file for completions."""

    custom_id: Text
    method: Literal["POST"]
    body: CompletionBody


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, type[ChatBody] | type[CompletionBody]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}

ROW_PARAMETERS = frozenset(
    (
        *("model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
        *("seed", "stop", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "chat_template_kwargs", "stream"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
)
"""Keys of a plain row (JSONL, CSV, Parquet) that go into the body; any other key is metadata."""
