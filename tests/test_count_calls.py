"""What `count_calls.py` counts in a step."""

from threading import Thread

from count_calls import Counts, count, counts_of, watched
from reference.backend import ReferenceBackend, random_model

from edgespec.model import Model
from edgespec.planners.none import NonePlanner


def in_file(name: str):
    return compile("", name, "exec")


def test_changes_of_file_are_those_of_each_thread():
    a, other_a, b = in_file("a"), in_file("a").replace(co_firstlineno=9), in_file("b")
    step = [(1, a), (1, other_a), (2, b), (1, b), (2, b), (1, a)]
    assert counts_of(step) == Counts(calls=6, functions=3, files=2, changes=2)


def test_calls_of_all_threads_are_seen_from_pass_to_pass():
    target = ReferenceBackend(random_model(1, vocab_size=48), context_length=64)
    with watched(target) as steps, Model(target, NonePlanner()) as model:
        thread = Thread(target=model.generate, args=("abc",), kwargs={"max_tokens": 6})
        thread.start()
        thread.join()
    assert len(steps) > 5
    names = [[code.co_name for _, code in step] for step in steps]
    assert all(step.count("forward") == 1 for step in names[1:])
    before = len(steps)
    target.forward([])
    assert len(steps) == before, "nothing is watched any more"


def test_a_step_with_drafts_runs_more_functions():
    plain, drafted = count("none", drafts=False), count("specexec", drafts=True)
    for one in (plain, drafted):
        assert one.calls >= one.functions >= one.files > 1
        assert one.files - 1 <= one.changes < one.calls
    assert drafted.functions > plain.functions
