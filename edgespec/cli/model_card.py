"""The default settings of a model, and the origin of each."""

from pathlib import Path
from typing import Any

from edgespec.errors import MissingPackage, ModelError
from edgespec.loading.pair import DEFAULT_BUDGET, DEFAULT_CONTEXT
from edgespec.loop.sampling import SamplingParams
from edgespec.models.gguf_header import check_model, has_states
from edgespec.models.heads import is_head
from edgespec.models.own_sampling import own_sampling
from edgespec.models.registry import SAMPLING, Entry, local_path
from edgespec.planners.cost import note

FILE, OWN, PROGRAM = "models.yaml", "the model's own", "edgespec"
UNSAID = {
    "budget": f"as many as pay, at most {DEFAULT_BUDGET}",
    "system": "none",
}


def model_card(entry: Entry) -> dict[str, Any]:
    """Sources, settings (name -> value and origin) and notes of a model, as JSON.

    Raises:
        ModelError: the file is missing, damaged, or not a GGUF.
    """
    own, notes = dict[str, Any](), list[str]()
    try:
        path = local_path(entry.target, fetch=False)
    except (ModelError, MissingPackage) as error:  # the model or its engine is not installed: show the rest
        notes.append(str(error))
    else:
        if not Path(path).is_dir():
            check_model(path, weights=False)
        if is_head(path):
            raise ModelError(f"{path}: is a head, not a model: edgespec run TARGET --draft {path}")
        own, notes = own_sampling(path)
        if path.endswith(".gguf") and has_states(path):
            notes = [*notes, note()]
    program: dict[str, Any] = {"planner": "auto", "budget": None, "context_length": DEFAULT_CONTEXT, "system": None}
    program |= {name: getattr(SamplingParams(), name) for name in SAMPLING}
    given = entry.defaults.model_dump(exclude_none=True)
    sources = [(PROGRAM, program), (OWN, own), (FILE, given)]  # later ones override
    settings = {name: {"value": value, "from": origin} for origin, said in sources for name, value in said.items()}
    return {**entry.model_dump(mode="json", exclude={"defaults"}), "settings": settings, "notes": notes}


def card_text(card: dict[str, Any]) -> str:
    lines = [card["description"]] if card["description"] else []
    lines += [f"{name:20}{card[name]}" for name in ("target", "draft", "license") if card[name]]
    for name, setting in card["settings"].items():
        value = UNSAID[name] if setting["value"] is None else str(setting["value"])
        lines.append(f"{name:20}{value:36}{setting['from']}")
    return "\n".join([*lines, *(f"{'note':20}{note}" for note in card["notes"])])
