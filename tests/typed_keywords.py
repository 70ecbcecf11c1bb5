"""Nobody runs this: mypy reads it, and would report a comment below that is no longer needed."""

import edgespec


def wrong_keywords_are_refused() -> None:
    edgespec.load("model", contxt_length=4096)  # type: ignore[call-arg]
    model = edgespec.load("model", context_length=4096, depth=4)
    model.generate("text", max_token=4)  # type: ignore[call-arg]
    model.chat("question", max_tokens="4")  # type: ignore[arg-type]
    model.stream_chat("question", temprature=0.5)  # type: ignore[call-arg]
    model.chat("question", max_tokens=4, temperature=0.5, stop=["."])
