"""HTTP below the dialects: JSON bodies, whole answers, and events."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from math import isinf
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.errors import first_mistake
from edgespec.server.errors import Refused, refuse_if
from edgespec.server.schema import levels

MOST_BODY = 8 * 2**20  # bytes
PIECE = 2**18  # bytes that are searched before another thread may run
BODY_SECONDS = 60.0
MOST_VALUES = 2**19  # JSON values
FEW_VALUES = 2**15  # that C code parses before any other thread runs: tens of milliseconds
MOST_DEPTH = 64
MOST_BIASES = 2**14
MOST_NAME = 512  # characters of what is a name
GONE = 499  # the client left before the answer

# The characters of JSON at which str.splitlines, and with it clients on httpx, end a line.
LINE_BREAKS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
# Fields of llama.cpp, vLLM, SGLang and others that change an answer, and their values that do not, besides null.
# An interface refuses those that it does not read.
NOT_READ: dict[str, tuple[Any, ...]] = {
    name: neutral
    for neutral, names in (
        ((1,), "repeat_penalty typical_p tfs_z length_penalty n best_of"),
        ((0,), "mirostat dry_multiplier xtc_probability dynatemp_range smoothing_factor no_repeat_ngram_size"),
        ((0,), "min_tokens n_probs logprobs top_logprobs"),
        ((-1,), "top_n_sigma t_max_predict_ms thinking_budget thinking_budget_tokens"),
        ((False,), "ignore_eos use_beam_search include_stop_str_in_output no_stop_trim echo"),
        ((False,), "return_token_ids return_tokens_as_token_ids return_hidden_states"),
        ((True,), "skip_special_tokens add_generation_prompt include_reasoning separate_reasoning"),
        (("auto", "deepseek", "parsed"), "reasoning_format"),
        (("", []), "stop stop_regex stop_token_ids bad_words samplers documents chat_template lora lora_path"),
        (("", []), "grammar guided_grammar ebnf json_schema guided_json guided_regex guided_choice regex"),
        (({"type": "text"},), "response_format"),
        ((), "structured_outputs logits_processors custom_logit_processor allowed_token_ids thinking_token_budget"),
        ((), "n_predict max_new_tokens num_predict enable_thinking think"),
        ((), "truncate_prompt_tokens prompt_logprobs logprob_token_ids"),
        ((True,), "normalize"),
        ((2,), "embd_normalize"),
    )
    for name in names.split()
}
TOKENS = ("n_predict", "max_new_tokens", "num_predict")
ServerSent = tuple[str | None, Any]  # name, and data: JSON, or a string as it is
Body = TypeVar("Body", bound="Lenient")
Item = TypeVar("Item")


class FirstMistake(FailFast):
    """Of a list, only the first wrong item is looked for."""

    __hash__ = object.__hash__  # unions of types need it


Listed = Annotated[list[Item], FirstMistake()]


class Lenient(BaseModel):
    """A body; null stands for a field that is left out."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if NoneType in get_args(field.annotation)}
        return {name: value for name, value in given.items() if value is not None or name in optional}


class Named(Lenient):
    model: str = Field("", max_length=MOST_NAME)


def not_read(name: str, instead: str) -> Refused:
    return Refused(400, f"{name} is not read here" + f"; use {instead}" * bool(instead), param=name)


class Checked(Lenient):
    """A body that refuses fields of other servers that would change its answer.

    Attributes:
        instead: of fields in `NOT_READ`, what this interface has for them.
    """

    instead: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_not_read(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in [one for one in NOT_READ if one in given and one not in cls.model_fields]:
            if given[name] not in (None, *NOT_READ[name]):
                raise not_read(name, cls.instead.get(name, ""))
        return given


class SamplingFields(Checked):
    """Fields of a request for an answer."""

    instead: ClassVar[dict[str, str]] = {
        "repeat_penalty": "repetition_penalty",
        "typical_p": "top_p or min_p",
        "ignore_eos": "logit_bias",
        "n_probs": "logprobs",
        "think": "enable_thinking",
        **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), "edgespec.lark"),
        **dict.fromkeys(TOKENS, "max_tokens"),
    }

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = Field(None, max_length=MOST_BIASES)
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that are given. As in llama.cpp, top_k below 0 keeps all tokens, top_p 0 and min_p 1 the best."""
        given = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        if given.get("top_k", 0) < 0:
            given["top_k"] = 0
        for name, best_only in (("top_p", 0), ("min_p", 1)):
            if given.get(name) == best_only:
                del given[name]
                given["top_k"] = 1
        return given


class TemplateFields(Lenient):
    """Variables of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # also among those

    @property
    def variables(self) -> dict[str, Any]:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return thinking | (self.chat_template_kwargs or {})


async def read_body(request: HttpRequest) -> bytearray:
    """
    Raises:
        Refused: the request's body is too long or too slow, or the client left.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > MOST_BODY:
                    raise Refused(413, f"the body is larger than {MOST_BODY} bytes")
    except ClientDisconnect as error:
        raise Refused(GONE, "the client left before the end of the body") from error
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} seconds") from error
    return data


def parsed(data: bytes | bytearray) -> Any:
    """
    Raises:
        Refused: it is not JSON.
    """
    starts = range(0, len(data), PIECE)
    values = sum(data.count(mark, at, at + PIECE) for at in starts for mark in (b",", b"[", b"{"))  # also in texts
    if values > MOST_VALUES:
        raise Refused(413, f"the body has more than {MOST_VALUES} values")
    try:
        decoder = InSteps if values > FEW_VALUES else None
        return json.loads(data, cls=decoder, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error


def parsed_body(data: bytes | bytearray, kind: type[Body]) -> Body:
    """
    Raises:
        Refused: it is not JSON, or not of this kind.
    """
    found = parsed(data)
    refuse_if(
        not isinstance(found, dict) or sum(1 for _ in levels(found)) > MOST_DEPTH,
        f"the body must be a JSON object, at most {MOST_DEPTH} deep",
    )
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        where, says = first_mistake(error, kind)
        raise Refused(400, says, param=".".join(map(str, where)) or None) from error


class InSteps(json.JSONDecoder):
    """Parses in Python, more slowly, so that other threads run meanwhile."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.scan_once = py_make_scanner(self)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(number: str) -> float:
    if isinf(found := float(number)):
        raise ValueError(f"{number} is too large")
    return found


async def answer_whole(
    http: HttpRequest, work: Awaitable[Any], body: Callable[[], Mapping[str, Any] | str]
) -> Response:
    """Wait for `work`, then send one JSON body, or its text; the work ends if the client leaves."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_left(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=GONE)
        await task
        found = body()
        return Response(found, media_type="application/json") if isinstance(found, str) else JSONResponse(found)
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(BaseException):
                await one


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def json_of(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _in_line(data: Any) -> str:
    text = data if isinstance(data, str) else json_of(data)
    for end, escape in LINE_BREAKS.items():
        text = text.replace(end, escape)  # `translate` takes a second for megabytes
    return text


def sse(name: str | None, data: Any) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {_in_line(data)}\n\n".encode()


def json_line(name: str | None, data: Any) -> bytes:
    return f"{_in_line(data)}\n".encode()


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"
