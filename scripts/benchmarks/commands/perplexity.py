"""Perplexity: exp of the mean of -log p(token | the tokens before it in its piece)."""

import gzip
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import numpy as np

from benchmarks.options import FILE, THREADS
from edgespec.cli.terminal import Bars
from edgespec.errors import ModelError, UsageError
from edgespec.loading.pair import load_pair, plan_pair
from edgespec.loop.backend import Backend, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import log_sum_exp
from edgespec.models.registry import find_model

PIECE = 512  # tokens


def perplexity(
    backend: Backend, token_ids: Sequence[int], *, piece: int = PIECE, done: Callable[[int], None] = lambda tokens: None
) -> float:
    """
    Args:
        backend: a loaded model.
        token_ids: at least two.
        piece: tokens that are predicted from each other only.
        done: called with the number of tokens after every piece.

    Raises:
        UsageError: there are fewer than two tokens.
    """
    total, count = 0.0, 0
    for start in range(0, len(token_ids), piece):
        ids = np.array(token_ids[start : start + piece], np.int32)
        if len(ids) > 1:
            nodes = np.arange(len(ids), dtype=np.int32)
            session = backend.open()
            logits = backend.forward([Work(session, ids, nodes - 1, nodes)])[0]
            rows = (logits.row(i) for i in range(len(ids) - 1))
            total += sum(log_sum_exp(row) - float(row[token]) for row, token in zip(rows, ids[1:], strict=True))
            count += len(ids) - 1
            session.close()
        done(len(ids))
    if not count:
        raise UsageError("perplexity needs a text of at least two tokens")
    return float(np.exp(total / count))


@click.command(
    epilog="""\b
Example:
  scripts/bench perplexity wiki.txt.gz original.gguf small.gguf smaller.gguf --bytes 20000"""
)
@click.argument("text", type=FILE)
@click.argument("models", nargs=-1, required=True)
@click.option("--bytes", "most", type=click.IntRange(2), default=20_000, help="Bytes of TEXT to use.")
@click.option("--tokens", type=click.IntRange(2), help="Most tokens of it. [default: all]")
@click.option("--kv-type", help="Type of the cache, as for run.")
@THREADS
def command(
    text: Path, models: tuple[str, ...], most: int, tokens: int | None, kv_type: str | None, threads: int | None
) -> None:
    """Perplexity of models on a text.

    TEXT is UTF-8 and may be gzipped; tokens are predicted in pieces of 512.
    """
    try:
        with gzip.open(text) if text.suffix == ".gz" else text.open("rb") as file:
            words = file.read(most).decode("utf-8", "ignore")
    except (OSError, EOFError, zlib.error) as error:
        raise ModelError(f"{text}: cannot be read: {error}") from error
    options = LoadOptions(context_length=2 * PIECE, budget=PIECE, exact="off", kv_type=kv_type, threads=threads)
    # Check all of them before the first takes hours.
    plans = [plan_pair(find_model(name), None, None, options) for name in models]
    for name, plan in zip(models, plans, strict=True):
        with Bars() as bars:
            (backend,) = load_pair(plan, say=bars.say)
            ids = backend.vocab.encode(words, add_bos=True, parse_special=False)[:tokens]
            figure = perplexity(backend, ids, done=partial(bars.advance, name, len(ids)))
        backend.close()
        click.echo(f"{figure:8.3f}  {len(ids)} tokens  {name}")
