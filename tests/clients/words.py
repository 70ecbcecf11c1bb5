"""A small MCP server on standard input and output, with one tool: it tells a word that no model knows."""

import json
import sys

WORD = "quillon-7319"
TOOL = {
    "name": "secret_word",
    "description": "Tell the secret word.",
    "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
}


def result_of(method: str, params: dict) -> dict:
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        about = {"name": "words", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": WORD}], "isError": False}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked and "method" in asked:
            answer = {
                "jsonrpc": "2.0",
                "id": asked["id"],
                "result": result_of(asked["method"], asked.get("params", {})),
            }
            print(json.dumps(answer), flush=True)
