"""How a mixture's tokens choose experts, beside traces of other mixtures."""

from functools import partial
from hashlib import sha256
from pathlib import Path

import click

from benchmarks.options import AT_LEAST_1, FILE, questions
from benchmarks.routing import CHOSEN, agreement, foreseen, read_trace, record, routers_of, statistics
from edgespec.cli.terminal import Bars
from edgespec.errors import UsageError
from edgespec.measure.tables import table
from edgespec.models.registry import find_model, local_path


@click.command(
    epilog="""\b
Example:
  scripts/bench routes qwen.route.csv.gz mixture.gguf --prompts questions.jsonl"""
)
@click.argument("sources", nargs=-1, required=True)
@click.option("--prompts", type=FILE, help="For models.")
@click.option("--limit", type=AT_LEAST_1, default=8, help="Use this many of them, evenly spaced.")
@click.option(
    "--max-tokens", "-n", type=click.IntRange(26), default=128, help="Of an answer; shorter ones do not count."
)
@click.option("--draft", help="A small model: how many tokens of the answers it would draft.")
def command(sources: tuple[str, ...], prompts: Path | None, limit: int, max_tokens: int, draft: str | None) -> None:
    """Statistics of the experts that tokens choose.

    SOURCES are mixtures, whose answers to prompts are recorded, and route traces (.csv.gz).
    """
    columns = list[dict[str, str]]()
    for source in sources:
        if source.endswith(".csv.gz"):
            columns.append(statistics(*read_trace(Path(source))))
        elif prompts:
            asked = questions(prompts, limit)
            columns.append(_recorded(local_path(find_model(source).target), asked, max_tokens, draft))
        else:
            raise UsageError(f"{source} answers prompts: give --prompts")
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    click.echo(table("", ["", *(Path(source).name.split(".")[0] for source in sources)], rows))


def _recorded(path: str, prompts: list[str], tokens: int, draft: str | None) -> dict[str, str]:
    routers = routers_of(path)
    with Bars() as bars:
        texts = record(path, prompts, tokens, partial(bars.update, "prompts"))
    texts = [text for text in texts if len(text.parts) == tokens + 1]
    if not texts:
        raise UsageError(f"no answer has {tokens} tokens: give a smaller --max-tokens")
    found = statistics([text.answer(CHOSEN) for text in texts], len(routers[0]))
    hashed = sha256(b"".join(rows.tobytes() for rows in routers)).hexdigest()[:16]
    found |= {"foreseen by the layer before": foreseen(texts, routers), "routers (SHA-256)": hashed}
    if draft:
        found["drafted by the small model"] = agreement(local_path(find_model(draft).target), texts)
    return found
