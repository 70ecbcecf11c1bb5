"""Tools, calls and results as parts of texts, for models whose chat template has no known format of calls.

The words are those of Qwen's and Hermes' templates, which many models have read.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from edgespec.loop.message_forms import CALL, RESULT
from edgespec.server.conversation import Turn
from edgespec.server.tool_calls import Call, Tools

INSTRUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def calls_as_text(turns: Sequence[Turn], tools: Tools | None) -> list[Turn]:
    """Turns that any template shows: tools stand in the system message, results are the user's.

    Calls of the last turn stay, since their results are missing.
    """
    found = list[Turn]()
    for is_result, group in groupby(turns, lambda turn: turn.role == "tool"):
        if is_result:
            results = [RESULT.format(turn.text) for turn in group]
            found.append(Turn("user", "\n".join(results)))
            continue
        for turn in group:
            texts = filter(None, [turn.text, *map(call_text, turn.calls)])
            is_over = turn.calls and turn is not turns[-1]
            found.append(replace(turn, text="\n".join(texts), calls=()) if is_over else turn)
    if tools:
        shown = [tool.shown for tool in tools.all]
        listed = [json.dumps(one, ensure_ascii=False) for one in shown]
        about = INSTRUCTION.format(tools="\n".join(listed))
        system = found.pop(0).text if found[0].role == "system" else ""
        found.insert(0, Turn("system", "\n\n".join(filter(None, [system, about]))))
    return found


def call_text(call: Call) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return CALL.format(f'{{"name": {name}, "arguments": {call.arguments or "{}"}}}')
