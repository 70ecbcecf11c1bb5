"""More of the clients that people have, over real sockets: llm, LangChain, OpenAI's agents; and made-up requests."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Literal

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server_clients import HELLO, listening
from test_server_tools import TEMPLATE, WEATHER, check

SCHEMA = WEATHER["parameters"]


@pytest.fixture(scope="module")
def server():
    """(model, port), of a model that shows tools."""
    with listening(slots=2, context=1500) as (model, port):
        model.target.vocab.chat_template = TEMPLATE
        yield model, port


@pytest.fixture
def expected(server):
    return server[0].chat(HELLO, max_tokens=20, temperature=0.9, seed=3).text


class TestLlm:
    @pytest.fixture
    def ask(self, server, tmp_path):
        pytest.importorskip("llm", reason="the client is not installed: pip install llm")
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: tiny\n  model_name: tiny\n  api_base: http://127.0.0.1:{server[1]}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )

        def ask(*arguments):
            command = [sys.executable, "-m", "llm", "prompt", "-m", "tiny", "--no-log", *arguments]
            environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
            return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True).stdout

        return ask

    def test_a_prompt_and_a_schema(self, ask, expected):
        options = ("-o", "max_tokens", "20", "-o", "temperature", "0.9", "-o", "seed", "3")
        assert ask("hello", *options).decode("utf-8", "replace").rstrip("\n") == expected.rstrip("\n")
        found = json.loads(ask("hello", "--schema", json.dumps(SCHEMA), "--no-stream", "-o", "max_tokens", "100"))
        check("weather", json.dumps(found))


class TestLangChain:
    @pytest.fixture
    def chat(self, server):
        langchain = pytest.importorskip("langchain_openai", reason="not installed: pip install langchain-openai")
        return langchain.ChatOpenAI(
            base_url=f"http://127.0.0.1:{server[1]}/v1", api_key="none", model="tiny", temperature=0.9, seed=3,
            max_tokens=120, max_retries=0,
        )  # fmt: skip

    def test_answers_streams_and_schemas(self, chat, server, expected):
        short = chat.bind(max_tokens=20)
        assert short.invoke("hello").content == expected
        assert "".join(part.content for part in short.stream("hello")) == expected
        schema = {"title": "weather", **SCHEMA}
        check("weather", json.dumps(chat.with_structured_output(schema, method="json_schema").invoke("hello")))

    def test_tools(self, chat):
        bound = chat.bind_tools([{"type": "function", "function": WEATHER}], tool_choice="weather")
        (call,) = bound.invoke("hello").tool_calls
        check(call["name"], json.dumps(call["args"]))


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_openai_agents(server, dialect):
    agents = pytest.importorskip("agents", reason="not installed: pip install openai-agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Prague"], days: Literal[1, 2]) -> str:
        """Tell the weather."""
        asked.append((city, days))
        return "rain"

    async def run():
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server[1]}/v1", api_key="none", max_retries=0)
        async with client:
            kind = agents.OpenAIChatCompletionsModel if dialect == "chat" else agents.OpenAIResponsesModel
            settings = agents.ModelSettings(tool_choice="weather", max_tokens=200, extra_body={"seed": 3})
            # The tiny model knows nothing: a call that is forced is all that it can be asked for.
            agent = agents.Agent(
                "tester", instructions="Be good.", tools=[weather], model=kind("tiny", client),
                model_settings=settings, tool_use_behavior="stop_on_first_tool",
            )  # fmt: skip
            return await agents.Runner.run(agent, "hello", max_turns=2)

    result = asyncio.run(run())
    assert result.final_output == "rain"
    check("weather", json.dumps(dict(zip(("city", "days"), asked[0], strict=True))))


def test_made_up_requests_are_never_an_error_of_the_server(server):
    """Bodies by the schemas that the server reads with, and bodies that nearly fit."""
    schemathesis = pytest.importorskip("schemathesis", reason="not installed: pip install schemathesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from edgespec.server.dialects.chat import ChatBody
    from edgespec.server.dialects.completions import CompletionBody
    from edgespec.server.dialects.draft_prompt import TypedBody
    from edgespec.server.dialects.embeddings import EmbedBody, OpenAIEmbeddingsBody
    from edgespec.server.dialects.messages import CountBody, MessagesBody
    from edgespec.server.dialects.ollama import ChatBody as OllamaChatBody
    from edgespec.server.dialects.ollama import GenerateBody
    from edgespec.server.dialects.responses import ResponsesBody
    from edgespec.server.dialects.tokens import TextBody, TokensBody

    bodies = {
        ("POST", "/v1/chat/completions"): ChatBody,
        ("POST", "/v1/completions"): CompletionBody,
        ("POST", "/v1/messages"): MessagesBody,
        ("POST", "/v1/messages/count_tokens"): CountBody,
        ("POST", "/v1/responses"): ResponsesBody,
        ("POST", "/api/chat"): OllamaChatBody,
        ("POST", "/api/generate"): GenerateBody,
        ("POST", "/api/embed"): EmbedBody,
        ("POST", "/v1/embeddings"): OpenAIEmbeddingsBody,
        ("POST", "/tokenize"): TextBody,
        ("POST", "/detokenize"): TokensBody,
        ("PUT", "/edgespec/draft-prompt"): TypedBody,
    }
    names, paths = dict[str, object](), dict[str, object]()
    for (method, path), body in bodies.items():
        found = body.model_json_schema(ref_template="#/components/schemas/{model}")
        names |= found.pop("$defs", {})
        content = {"application/json": {"schema": found}}
        answers = {"default": {"description": "an answer or an error object"}}
        paths[path] = {method.lower(): {"requestBody": {"content": content, "required": True}, "responses": answers}}
    schema = schemathesis.openapi.from_dict({
        "openapi": "3.1.0", "info": {"title": "edgespec", "version": "1"}, "paths": paths,
        "components": {"schemas": names},
    })  # fmt: skip

    with httpx.Client(base_url=f"http://127.0.0.1:{server[1]}", timeout=30) as http:

        @given(schema.as_strategy(), st.sampled_from([4, 4, 1, 0]))
        @settings(max_examples=90, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        def check_case(case, most):
            body = case.body if isinstance(case.body, dict) else {}
            body |= {"max_tokens": most, "max_completion_tokens": most, "max_output_tokens": most, "stream": False}
            if isinstance(body.get("options") or {}, dict):
                body["options"] = {**(body.get("options") or {}), "num_predict": most}
            answer = http.request(case.method, case.path, json=body)
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error if isinstance(error, str) else error["message"]

        check_case()
