"""Read-only tools run before they are called; a result is never one that a later call may have changed."""

import json
from contextlib import closing
from threading import Event, Thread

import pytest

import edgespec
from edgespec.lab import ToolCache, tool_cache


@pytest.fixture
def cache():
    made = []

    def run(name, arguments):
        made.append((name, arguments))
        if name == "broken":
            raise OSError("no answer")
        return len(made)

    with closing(ToolCache(run, {"look", "broken"}, size=3)) as found:
        found.made = made
        yield found


def proposed(cache, *calls):
    for call in calls:
        cache.propose(*call)
    cache._threads.submit(int).result()
    for _, future in list(cache._results.values()):
        future.exception()


def test_a_proposed_call_runs_once(cache):
    proposed(cache, ("look", '{"a": 1, "b": [2]}'), ("look", {"b": [2], "a": 1}))
    assert cache.call("look", '{"b":[2], "a":1}') == cache.call("look", {"a": 1, "b": [2]}) == 1
    assert cache.made == [("look", {"a": 1, "b": [2]})]
    assert (cache.calls, cache.early, cache.started) == (2, 2, 1)


def test_only_safe_calls_run_early_and_others_make_all_results_old(cache):
    proposed(cache, ("look", "{}"), ("book", "{}"))
    assert cache.made == [("look", {})]
    assert cache.call("book", "{}") == 2
    assert cache.call("look", "{}") == 3
    assert cache.call("book", "{}") == 4


def test_an_early_failure_is_tried_again_and_a_late_one_is_raised(cache):
    proposed(cache, ("broken", "{}"))
    for _ in range(2):
        with pytest.raises(OSError, match="no answer"):
            cache.call("broken", "{}")
    assert len(cache.made) == 3


def test_old_and_seldom_used_results_go(cache, monkeypatch):
    proposed(cache, *(("look", {"n": n}) for n in range(3)))
    cache.call("look", {"n": 0})
    proposed(cache, ("look", {"n": 3}))
    assert cache.call("look", {"n": 0}) == 1
    assert cache.call("look", {"n": 1}) == 5
    monkeypatch.setattr(tool_cache, "monotonic", lambda: 1e12)
    assert cache.call("look", {"n": 0}) == 6


def test_a_call_does_not_wait_behind_proposals():
    go_on = Event()

    def run(name, arguments):
        return name if arguments.get("last") else go_on.wait(20)

    with closing(ToolCache(run, {"look"})) as cache:
        for number in range(20):
            cache.propose("look", {"number": number})
        cache.propose("look", {"last": True})
        assert cache.call("look", {"last": True}) == "look"
        go_on.set()
    cache.propose("look", {"late": True})


DEEP = '{"a": ' * 3000 + "1" + "}" * 3000  # as a model that repeats itself may write it


@pytest.mark.parametrize("arguments", ["[]", "{", 5, None, [("a", 1)], {"a": {1, 2}}, {"a": 1, 2: "b"}, DEEP])
def test_arguments_that_are_no_object_are_refused(cache, arguments):
    with pytest.raises(edgespec.UsageError, match=r"what look is called with is .*, but must be a JSON object"):
        cache.call("look", arguments)
    assert not cache.made


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Is it paid?", "messages is 'Is it paid\\?', but must be a list of messages"),
        (5, "messages is 5"),
        ([["user", "Hi"]], "but must be a list of messages"),
        ([{"role": "assistant", "tool_calls": [{"name": "look"}]}], "a tool call is {'name': 'look'}, but must be one"),
        ([{"role": "assistant", "tool_calls": ["look"]}], "a tool call is 'look', but must be one with `function`"),
    ],
)
def test_messages_of_another_form_are_refused(cache, messages, says):
    with pytest.raises(edgespec.UsageError, match=says):
        cache.foresee(messages)
    assert not cache.made


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        (None, {}, "run is None, but must be a function"),
        (print, {"size": 0}, "size is 0"),
        (print, {"seconds": 0}, "seconds is 0, but must be above 0"),
        (print, {"safe": [5]}, "one of safe is 5"),
        (print, {"safe": 5}, "safe is 5, but must be a collection of names of functions"),
        (print, {"safe": "look"}, "safe is 'look', but must be a collection of names of functions"),
    ],
)
def test_wrong_options_are_one_line(run, options, says):
    with pytest.raises(edgespec.UsageError, match=says):
        ToolCache(run, **{"safe": ["look"], **options})


def call_of(name, **arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}


def test_arguments_are_copied_from_where_earlier_ones_stood(cache):
    """From one conversation to the next; not from places where none stood."""
    first = [
        {"role": "user", "content": "The bookings are listed below."},
        {"role": "tool", "content": json.dumps({"bookings": ["QX1234", "QX9999"], "flight": "HAT123"})},
        call_of("look", booking="QX1234"),
    ]
    cache.foresee(first)
    second = [{"role": "tool", "content": json.dumps({"flight": "HAT777", "bookings": ["AB5678", "CD1122"]})}]
    cache.foresee(second)
    cache._threads.submit(int).result()
    started = [arguments["booking"] for _, arguments in cache.made]
    assert sorted(started) == ["AB5678", "CD1122", "QX9999"]
    assert cache.call("look", {"booking": "CD1122"}) is not None
    assert cache.early == 1


def test_a_text_in_parts_is_that_text(cache):
    parts = [{"type": "text", "text": "QX1234 please"}]
    image = {"role": "user", "content": [{"type": "image_url"}]}
    cache.foresee([{"role": "user", "content": parts}, image, call_of("look", booking="QX1234")])
    cache.foresee([{"role": "user", "content": "AB5678 please"}])
    proposed(cache)
    assert cache.call("look", {"booking": "AB5678"}) is not None
    assert cache.early == 1


def test_a_call_with_wrong_arguments_stops_no_conversation(cache):
    """A model wrote them; the right call that follows is learned from."""
    wrong = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"booking": "QX1'}}]}
    talk = [{"role": "user", "content": "My booking is QX1234."}, wrong, call_of("look", booking="QX1234")]
    cache.foresee(talk)
    cache.foresee([{"role": "user", "content": "Now booking is AB5678."}])
    proposed(cache)
    assert cache.call("look", {"booking": "AB5678"}) is not None
    assert cache.early == 1


def test_a_call_that_changes_things_while_another_is_proposed_makes_its_result_old():
    state = {"booked": False}

    def run(name, arguments):
        state["booked"] = state["booked"] or name == "book"
        return state["booked"]

    with closing(ToolCache(run, {"look"})) as cache:
        submit = cache._threads.submit

        def submit_and_book(*call):
            found = submit(*call)
            found.result()
            other = Thread(target=cache.call, args=("book", "{}"))
            other.start()
            other.join(0.5)  # it may wait for the proposal
            cache.booking = other
            return found

        cache._threads.submit = submit_and_book
        cache.propose("look", "{}")
        cache.booking.join()
        assert cache.call("look", "{}") is True
