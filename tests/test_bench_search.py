"""scripts/bench-search: a line a problem, and a run goes on where it stopped, with the same options only."""

import json
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-search"
RECORDS = [{"question": f"What is {number} plus 2?", "answer": f"#### {number + 2}"} for number in (1, 2, 3)]


def test_a_stopped_search_goes_on_and_other_options_are_refused(script, smollm2_tiny, tmp_path):
    problems, out = tmp_path / "problems.jsonl", tmp_path / "search.jsonl"
    problems.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    run = smollm2_tiny, problems, out, "--width", "2", "--depth", "1", "--limit", "2"
    code, shown, said = script(*run)
    assert code == 0, said
    assert shown.startswith("2 problems: ")
    whole = out.read_text()
    found = [json.loads(line) for line in whole.splitlines()]
    assert [line["question"] for line in found] == [RECORDS[0]["question"], RECORDS[1]["question"]]
    assert all(line["thought_passes"] > 0 < line["rating_passes"] for line in found)
    out.write_text(whole[:-30])  # the last line was cut short
    assert script(*run)[0] == 0
    again = out.read_text()
    assert again.splitlines()[0] == whole.splitlines()[0]
    assert [json.loads(line)["question"] for line in again.splitlines()] == [line["question"] for line in found]
    for option, value in (("keep", "1"), ("parallel", "2"), ("memory", "1G")):
        code, shown, said = script(*run, f"--{option}", value)
        assert (code, shown) == (2, "")
        assert said.strip().endswith(f"{out}: was made with other {option}: name another file, or a new one")
    assert out.read_text() == again
