"""Sampling parameters from a model's own file or folder, after models.yaml.

A GGUF has them under general.sampling.*, a model folder in generation_config.json. Values that are out of range or
unknown are left out with a note: a user cannot edit another author's model.
"""

import secrets
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError, UsageError
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.files import no_file, read_json_object
from edgespec.models.gguf_header import header_values, is_gguf
from edgespec.models.registry import SAMPLING, Defaults

GGUF_PREFIX = "general.sampling."
# GGUF key -> field of `SamplingParams`, as in llama.cpp's `common_init_sampler_from_model`; but a repetition penalty
# counts the whole sequence here, not the last 64 tokens.
GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
NOT_HERE = ("sequence", "xtc_probability", "mirostat")  # keys of samplers that edgespec does not have
FOLDER_FILE = "generation_config.json"


def choose_sampling(defaults: Defaults, path: str) -> tuple[SamplingParams, list[str]]:
    """Defaults of a call's sampling: from models.yaml, else the model's own, else greedy.

    Args:
        defaults: what models.yaml says.
        path: the model's file or folder on this machine.

    Returns:
        The parameters, and notes for a person.
    """
    own, notes = own_sampling(path)
    return SamplingParams(**(own | defaults.sampling())), notes


def choose_seed(seed: int | None) -> int:
    """A seed as it is given; drawn if there is none or, as in llama.cpp, a negative one."""
    return secrets.randbits(32) if seed is None or seed < 0 else seed


def own_sampling(path: str) -> tuple[dict[str, Any], list[str]]:
    """
    Returns:
        Fields of `SamplingParams` with valid values in a model's own file or folder, and notes on the others.

    Raises:
        ModelError: the file is missing or a damaged GGUF.
    """
    found, notes = _of_folder(Path(path)) if Path(path).is_dir() else _of_file(path)
    good = dict[str, Any]()
    for name, value in found.items():
        try:
            one = {name: _number(name, value)}
            SamplingParams(**one)
        except UsageError as error:
            notes.append(f"left out of the model's own sampling: {error}")
        else:
            good |= one
    return good, notes


def _of_file(path: str) -> tuple[dict[str, Any], list[str]]:
    if not Path(path).is_file():
        raise no_file(path)
    if not is_gguf(path):
        return {}, []
    values = {key.removeprefix(GGUF_PREFIX): value for key, value in header_values(path, GGUF_PREFIX).items()}
    unknown = [key for key in NOT_HERE if values.get(key)]
    notes = [f"left out of the model's own sampling: {', '.join(unknown)}, which edgespec does not have"]
    return {name: values[key] for key, name in GGUF_NAMES.items() if key in values}, notes if unknown else []


def _of_folder(folder: Path) -> tuple[dict[str, Any], list[str]]:
    file = folder / FOLDER_FILE
    if not file.is_file():
        return {}, []
    try:
        config = read_json_object(file, ModelError)
    except ModelError as error:
        return {}, [f"{error}; its sampling is left out"]
    found = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    if config.get("do_sample") is False:  # greedy, so other sampling parameters have no effect
        return {"temperature": 0.0} | {name: value for name, value in found.items() if name == "repetition_penalty"}, []
    if config.get("do_sample") and "temperature" not in found:
        found["temperature"] = 1.0  # transformers' own default
    return found, []


def _number(name: str, value: Any) -> Any:
    """The number that a string, or for top_k 20.0, stands for; anything else as it is."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if name == "top_k" and isinstance(number, float) and number.is_integer() else number
