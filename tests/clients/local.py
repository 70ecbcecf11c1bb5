"""Python's clients of Ollama: vectors, and a task with one tool.

Arguments: library, address, message, file for the conversation.
"""

import json
import sys
from pathlib import Path
from typing import Any

LIBRARY, URL, MESSAGE, KEPT = sys.argv[1:]
PATIENCE = 60


def write(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: of the file.
        text: the whole content.
    """
    Path(path).write_text(text, encoding="utf-8")
    return "written"


def with_ollama(messages: list[Any]) -> None:
    import ollama

    client = ollama.Client(URL, timeout=PATIENCE)
    model = client.list().models[0].model
    assert "tools" in client.show(model).capabilities
    assert len(client.embed(model, ["one", "two"]).embeddings) == 2
    while True:
        said, thought, calls = "", "", []
        for part in client.chat(model, messages, tools=[write], stream=True):
            said, thought = said + (part.message.content or ""), thought + (part.message.thinking or "")
            calls += [call.model_dump() for call in part.message.tool_calls or ()]
        print(said)
        messages.append({"role": "assistant", "content": said, "thinking": thought, "tool_calls": calls})
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            messages.append({"role": "tool", "tool_name": name, "content": write(**arguments)})
        if not calls:
            return


def with_litellm(messages: list[Any]) -> None:
    import litellm

    properties = {"path": {"type": "string"}, "text": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["path", "text"]}
    function = {"name": "write", "description": "Write a file.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    assert len(litellm.embedding("ollama/tiny", ["one", "two"], api_base=URL).data) == 2
    while True:
        answer = litellm.completion(
            "ollama_chat/tiny", messages, api_base=URL, tools=tools, timeout=PATIENCE, temperature=0.2, max_tokens=500
        )
        message = answer.choices[0].message
        print(message.content)
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            result = write(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return


def with_langchain(messages: list[Any]) -> None:
    from langchain_core.messages import ToolMessage, messages_from_dict, messages_to_dict
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    assert len(OllamaEmbeddings(model="tiny", base_url=URL).embed_documents(["one", "two"])) == 2
    bound = ChatOllama(model="tiny", base_url=URL, reasoning=True, validate_model_on_init=True).bind_tools(
        [tool(write)]
    )
    said = messages_from_dict(messages) if messages and "data" in messages[0] else []
    said.append(messages_from_dict([{"type": "human", "data": {"content": MESSAGE}}])[0])
    calls: list[Any] = [None]
    while calls:
        answer = bound.invoke(said)
        print(answer.content)
        said.append(answer)
        calls = answer.tool_calls
        said += [ToolMessage(write(**call["args"]), tool_call_id=call["id"]) for call in calls]
    messages[:] = messages_to_dict(said)


before = json.loads(Path(KEPT).read_text("utf-8")) if Path(KEPT).exists() else []
if LIBRARY != "langchain":
    before.append({"role": "user", "content": MESSAGE})
{"ollama": with_ollama, "litellm": with_litellm, "langchain": with_langchain}[LIBRARY](before)
Path(KEPT).write_text(json.dumps(before), encoding="utf-8")
