"""The content of messages, results and items as text; this model reads nothing else."""

import json
from base64 import b64decode
from typing import Any
from urllib.parse import unquote

from edgespec.server.errors import refuse_if

TEXTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
# What a text stands for, by the kind of a part.
MEDIA = dict.fromkeys(
    ("image", "image_url", "input_image", "output_image", "image_file", "computer_screenshot"), "image"
)
MEDIA |= {"audio": "sound", "input_audio": "sound", "output_audio": "sound", "audio_url": "sound"}
MEDIA |= {"video": "video", "video_url": "video", "input_video": "video"}
MEDIA |= dict.fromkeys(("document", "file", "input_file", "container_upload"), "file")
# Parts for the provider alone: encrypted, or about its own models and servers.
SKIPPED = ("redacted_thinking", "fallback", "mcp_tool_listing")
ALONE = ("document", "file", "input_file", "search_result")  # parts that are not within a sentence
OPAQUE = ("encrypted_content", "encrypted_index", "encrypted_stdout", "cache_control", "signature")


def stand_in(what: str, name: Any = None) -> str:
    article = "an" if what == "image" else "a"
    return f"[{article} {what}{f' {name!r}' if isinstance(name, str) else ''}; this model reads only text]"


def text_of(content: Any, where: str, *, asked: bool = False) -> str:
    """Content as one string.

    Args:
        content: null, a text, a part or parts.
        where: it is in the request.
        asked: a person asks about it now, and is told that an image is not seen; elsewhere a text stands for it, since
            a program cannot take it out of its history.

    Raises:
        Refused: a part cannot be read.
    """
    if content is None or isinstance(content, str):
        return content or ""
    found, stands_alone = list[str](), False
    for part in content if isinstance(content, list) else [content]:
        before, stands_alone = stands_alone, isinstance(part, dict) and part.get("type") in ALONE
        text = _part(part, where, asked)
        found += ["\n", text] if found and text and (before or stands_alone) else [text]
    return "".join(found)


def _part(part: Any, where: str, asked: bool) -> str:
    kind: Any = part.get("type") if isinstance(part, dict) else None
    if kind in TEXTS:
        text = part.get("text", part.get("refusal"))
        refuse_if(not isinstance(text, str), f"{where}: a text part has no text", where)
        return str(text)
    if isinstance(part, str):
        return part
    refuse_if(
        not isinstance(kind, str) or kind not in (*MEDIA, *SKIPPED, "search_result", "tool_reference", "compaction"),
        f"{where}: only text can be read here, not {kind or type(part).__name__!r}",
        where,
    )
    if kind in SKIPPED:
        return ""
    if kind == "compaction":  # a summary
        return text_of(part.get("content"), where)
    if kind == "tool_reference":
        return f"[tool {part.get('tool_name')}]"
    if kind == "search_result":
        return _lines(part.get("title"), part.get("source"), text_of(part.get("content"), where))
    if (text := _of_file(part, where)) is not None:
        return text
    refuse_if(asked, f"{where}: this model reads only text, not {kind!r}; leave it out", where)
    return stand_in(MEDIA[kind], _told(part, "title", "filename"))


def _of_file(part: dict[str, Any], where: str) -> str | None:
    """The text of a document or file, if it is one, with its title."""
    source = part.get("source")
    data = _told(part, "file_data")
    if part.get("type") == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        text = text_of(source.get("data") or source.get("content"), where)
    elif isinstance(data, str) and data.startswith("data:text/"):
        head, _, rest = data.partition(",")
        try:
            text = b64decode(rest, validate=True).decode() if head.endswith(";base64") else unquote(rest)
        except ValueError:
            return None
    else:
        return None
    return _lines(_told(part, "title", "filename"), part.get("context"), text)


def _told(part: dict[str, Any], *names: str) -> Any:
    """The first of the members that there is, in the part or in its file."""
    inner = part.get("file")
    known = (inner if isinstance(inner, dict) else {}) | {name: value for name, value in part.items() if value}
    return next((known[name] for name in names if known.get(name)), None)


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def result_of(content: Any, where: str) -> str:
    """The result of a tool: as `text_of`, and other values as JSON without what only the provider can read."""
    parts = content if isinstance(content, list) else [content]
    if content is None or all(isinstance(part, str) or _is_part(part) for part in parts):
        return text_of(content, where)
    return json.dumps(_readable(content), ensure_ascii=False)


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in (*TEXTS, *MEDIA, *SKIPPED, "search_result", "tool_reference")


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = str(value.get("type"))
    if kind in MEDIA or kind == "base64":
        text = _of_file(value, "")
        return stand_in(MEDIA.get(kind, "file")) if text is None else text
    return {name: _readable(one) for name, one in value.items() if name not in OPAQUE}
