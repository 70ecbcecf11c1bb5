"""A target's answers to a few questions, recorded once, so that drafts are measured without the target.

Answers are appended as JSON lines, so an interrupted recording can be resumed.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.loop.backend import Backend
from edgespec.loop.text import render_chat, user_messages
from edgespec.machine.files import cache_folder
from edgespec.machine.measurements import identity
from edgespec.measure.json_lines import append, resume
from edgespec.measure.replay import GREEDY, Recording
from edgespec.planners.choice import make_planner
from edgespec.scheduler import drive
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

QUESTIONS = {
    "prose": (
        "Describe a small harbour town on the morning after a storm.",
        "Explain to a child why the moon seems to change its shape.",
        "Write the opening of a story about a clockmaker who has lost her sense of time.",
        "What were the main causes of the decline of the Roman Empire?",
        "Summarise how vaccines prepare the immune system.",
    ),
    "code": (
        "Write a Python function that merges two sorted lists without using sort.",
        "Write a Python class for a bank account with deposit, withdraw and a transaction history.",
        "Write a shell script that finds the ten largest files below a folder.",
        "Write a JavaScript function that groups an array of objects by a key, with an example.",
        "Explain this code and rewrite it more clearly: x = [i for i in range(100) if all(i % j for j in range(2, i))]",
    ),
    "chat": (
        "I have eggs, rice and spinach. What can I cook in half an hour?",
        "How do I ask my landlord politely to repair the heating?",
        "Plan a weekend in Vienna for two people who like music.",
        "My computer is slow after an update. What should I check first?",
        "Give me five ideas for a birthday present for my grandfather.",
    ),
}


def questions(tasks: Sequence[str], count: int) -> list[tuple[str, str]]:
    """(task, question), `count` of each task.

    Raises:
        UsageError: there is no such task, or fewer questions.
    """
    for task in tasks:
        if task not in QUESTIONS:
            raise UsageError(f"there is no task {task!r}; there are: {', '.join(QUESTIONS)}")
    most = min(len(QUESTIONS[task]) for task in tasks)
    if not 1 <= count <= most:
        raise UsageError(f"{count} questions of a task are asked for, but there are 1 to {most}")
    return [(task, question) for task in tasks for question in QUESTIONS[task][:count]]


def recording_file(path: str, max_tokens: int, context_length: int) -> Path:
    """Its name depends on all that answers depend on, but not on the questions."""
    about = identity(path), max_tokens, context_length
    key = hashlib.sha256(", ".join(map(str, about)).encode()).hexdigest()[:16]
    return cache_folder() / "recordings" / f"{Path(path).stem}-{key}.jsonl"


def record(
    target: Backend,
    asked: Sequence[tuple[str, str]],
    kept: Path,
    max_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Recording]:
    """Record the target's greedy answers, except those that `kept` already has.

    Args:
        target: no session of it is open.
        asked: (task, question).
        kept: file of this target's answers, as `recording_file`; it is made if it is not there and can be.
        max_tokens: of an answer.
        progress: called with the numbers of answers that are done, and of all.

    Raises:
        UsageError: `kept` holds something else.
    """
    known = {one.question: one for one in resume(kept, Recording)}
    planner = make_planner("sssd" if target.capabilities.streams else "none", [target])  # the answers are equal
    scheduler = Scheduler(target, [planner], budget=16)
    try:
        for number, (task, question) in enumerate(asked):
            progress(number, len(asked))
            if question in known:
                continue
            prompt_ids = render_chat(target.vocab, user_messages(question))
            [answer] = drive.results_of(scheduler, [Request(prompt_ids, GREEDY, max_tokens)])
            known[question] = Recording(prompt_ids, answer.token_ids, task, question)
            with suppress(OSError):  # such as a full disk: it is recorded again next time
                kept.parent.mkdir(parents=True, exist_ok=True)
                append(kept, known[question])
    finally:
        scheduler.close()
    progress(len(asked), len(asked))
    return [replace(known[question], category=task) for task, question in asked]
