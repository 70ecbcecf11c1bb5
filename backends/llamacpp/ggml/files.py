"""GGUF files through llama.cpp's libraries.

llama-cpp-python binds the functions of libllama; `ggml_base` binds a few of libggml-base.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.errors import MissingPackage, ModelError
from edgespec.machine.files import part_names
from edgespec.machine.system import declare
from edgespec.models.gguf_header import check_header, check_model, own_values
from edgespec.models.heads import head_layers
from edgespec.weights.plan import Tensor, count_layers, layer_of

from ...common.signals import Signals

try:
    import llama_cpp as llama_cpp  # other modules import it from here, and so get this error
except ImportError as error:
    raise MissingPackage("llama-cpp-python", "", "running GGUF models") from error

FILE_TYPE_F32, FILE_TYPE_F16, FILE_TYPE_BF16 = b"0", b"1", b"32"  # general.file_type: llama_ftype in llama.h
NO_GPUS = (ctypes.c_void_p * 1)()  # a list of devices ends with a null pointer
# With 0 layers alone GPUs would compute long passes.
PROCESSOR_ONLY = {"n_gpu_layers": 0, "devices": ctypes.cast(NO_GPUS, ctypes.c_void_p)}
WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
PROCESSOR, GPU, SHARED, LIBRARY = range(4)  # ggml_backend_dev_type: a GPU has its own memory, or the host's; 3 is BLAS
TEMPLATES = (None, b"tool_use")  # names of chat templates: that of every conversation, and of those with tools
LLAMA_MAX_SEQ = 256  # of llama-cparams.h, fixed at compile time

_log_lines: list[str] = []
_error_lines: list[str] = []  # those of `_log_lines` that are more than warnings
size_lines: list[str] = []


def _keep_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level in (3, 4):  # GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR
        for lines in (_log_lines, _error_lines)[: level - 2]:
            lines.append(text.decode("utf-8", "replace").strip())
            del lines[:-20]
    elif b" size = " in text or b": dev = " in text:
        size_lines.append(text.decode("utf-8", "replace"))
        del size_lines[:-1000]


def _give_up(message: bytes) -> None:
    """Called before ggml ends the process: the user reads one line, not the calls that led there."""
    where, _, what = message.partition(b": ")
    os.write(2, b"edgespec: llama.cpp cannot go on: " + what + b" (" + where.rpartition(b"/")[2] + b")\n")
    os._exit(1)


_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_give_up)
_log_callback = llama_cpp.llama_log_callback(_keep_log)  # must live as long as llama.cpp, which has only its address


def keep_log() -> None:
    forget_log()
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
    ggml_base().ggml_set_abort_callback(_abort_callback)


def forget_log() -> None:
    """Called before a call whose failure `last_log` explains."""
    _log_lines.clear()
    _error_lines.clear()


def last_log() -> str:
    """The first of llama.cpp's last 20 errors, because later lines only pass it on; without errors, of its warnings."""
    lines = _error_lines or _log_lines
    reasons = [line for line in lines if not line.endswith("-- ignoring")]  # of tensors that it skips
    return reasons[0] if reasons else "llama.cpp gave no reason"


@contextmanager
def logged() -> Iterator[list[str]]:
    """Complaints of llama.cpp."""
    forget_log()
    try:
        yield _log_lines
    finally:
        forget_log()


def load_model(path: str, mapped: Callable[[], None] = lambda: None, /, **params: Any) -> Any:
    """Load a llama_model, which the caller must free.

    Args:
        path: the GGUF file.
        mapped: called when the file is mapped.
        params: fields of llama.cpp's llama_model_params.

    Raises:
        ModelError: the file is missing, not a GGUF, no model, or damaged.
    """
    for part in parts(path):
        if part == path or os.path.isfile(part):
            check_header(part)
    check_model(path, weights=not params.get("vocab_only"))
    keep_log()
    llama_cpp.llama_backend_init()
    leave_out_blas()
    model_params = llama_cpp.llama_model_default_params()
    for name, value in (params | without_amx(llama_cpp.llama_print_system_info())).items():
        setattr(model_params, name, value)
    signals = Signals()

    def report(share: float, user_data: Any) -> bool:
        if not share:
            mapped()
        return not signals.stop()

    model_params.progress_callback = llama_cpp.llama_progress_callback(report)
    with signals.held():
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        if model and signals.stop():
            llama_cpp.llama_model_free(model)
            model = None
    if not model:
        raise ModelError(_why_not(path))
    try:
        for kind in TEMPLATES:
            decoded(llama_cpp.llama_model_chat_template(model, kind) or b"", f"{path}: the chat template")
        _check_rotation(path, model)
    except ModelError:
        llama_cpp.llama_model_free(model)
        raise
    return model


def _why_not(path: str) -> str:
    """Why llama.cpp has not loaded a file, by its log."""
    reason = re.sub(r"^(\w+: )?(error loading [\w ]+: )*", "", last_log())
    if "file bounds" in reason:
        return cut_off(path)
    if "unknown model architecture" in reason:
        reason += f", to llama-cpp-python {llama_cpp.__version__}: a newer one may know it"
    return f"{path}: cannot be loaded: {reason}"


def _check_rotation(path: str, model: Any) -> None:
    """
    Raises:
        ModelError: llama.cpp's kernel would never end, or end the process.
    """
    name = metadata(model, "general.architecture").decode()
    for kind in ("", "_swa"):
        keys = (f"{name}.rope.dimension_count{kind}", f"{name}.attention.key_length{kind}")
        count, most = (metadata(model, key).decode() for key in keys)
        if not count or llama_cpp.llama_model_rope_type(model) < 0:
            continue
        if not (2 <= int(count) <= int(most or count) and int(count) % 2 == 0):
            raise ModelError(f"{path}: is damaged: {keys[0]} is {count} of {most or 'unknown'}, but must be even")


def load_header(path: str, **params: Any) -> Any:
    """Load a llama_model with tokenizer and sizes but without weights, for no GPU; otherwise as `load_model`."""
    return load_model(
        path, no_alloc=True, load_mode=llama_cpp.LLAMA_LOAD_MODE_NONE, use_extra_bufts=False, **PROCESSOR_ONLY, **params
    )


def without_amx(system_info: bytes) -> dict[str, Any]:
    """Model parameters that disable kernels for Intel's AMX, which GCC 12 miscompiles (ggml-org/llama.cpp#20824)."""
    return {"use_extra_bufts": False} if b"AMX_INT8 = 1" in system_info else {}


def metadata(model: Any, key: str) -> bytes:
    buffer = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value


def parts(path: str) -> list[str]:
    """Files of a model that llama.cpp loads by this one: all parts by the first one."""
    found = part_names(path)
    return found if found[0] == path else [path]


def file_size(path: str) -> int:
    return sum(Path(part).stat().st_size for part in parts(path))


def read_tensors(path: str, file: int = 0) -> list[Tensor]:
    """
    Args:
        path: of one GGUF file.
        file: number of that file among the model's.

    Raises:
        ModelError: the file is missing, not a GGUF, or damaged.
    """
    library = ggml_base()
    with open_table(path) as table:
        base = library.gguf_get_data_offset(table)
        return [
            Tensor(
                decoded(library.gguf_get_tensor_name(table, i), f"{path}: a tensor's name"),
                file,
                base + library.gguf_get_tensor_offset(table, i),
                library.gguf_get_tensor_size(table, i),
                library.gguf_get_tensor_type(table, i),
            )
            for i in range(library.gguf_get_n_tensors(table))
        ]


def check_whole(path: str) -> None:
    """
    Raises:
        ModelError: a part of the model is missing, not a GGUF, damaged or cut off.
    """
    for part in parts(path):
        end = max((tensor.start + tensor.size for tensor in read_tensors(part)), default=0)
        if Path(part).stat().st_size < end:
            raise ModelError(cut_off(part))


def cut_off(path: str) -> str:
    return f"{path}: is cut off: fetch or copy it again"


def decoded(text: bytes, what: str) -> str:
    """Raises ModelError: `text` is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{what} is not UTF-8, so the GGUF file is damaged: {text[:64]!r}") from error


def all_tensors(path: str) -> list[Tensor]:
    """Of all parts of a model; errors as for `read_tensors`."""
    return [tensor for number, part in enumerate(parts(path)) for tensor in read_tensors(part, number)]


def loaded_tensors(path: str) -> list[Tensor]:
    """Of all parts of a model, the tensors that llama.cpp loads.

    The last layers of some models predict further tokens (MTP). llama.cpp counts these layers, also on a GPU, but loads
    nothing of them, and may unmap their part of the file. So their size is 0.

    Raises:
        ModelError: as for `all_tensors`.
    """
    tensors = all_tensors(path)
    loaded = int(own_values(path).get("block_count", count_layers(tensors))) - head_layers(path)
    return [tensor if layer_of(tensor) < loaded else replace(tensor, size=0) for tensor in tensors]


@contextmanager
def open_table(path: str, described: Any = None) -> Iterator[Any]:
    """
    Args:
        path: of one GGUF file.
        described: a pointer, which gets a ggml context with the file's tensors, without their data.
    """
    check_header(path)
    keep_log()
    to_tensors = None if described is None else ctypes.addressof(described)
    with Signals().held():
        table = ggml_base().gguf_init_from_file(os.fsencode(path), GgufInit(no_alloc=True, ctx=to_tensors))
        if not table:
            raise ModelError(f"{path}: is a damaged GGUF file: {last_log()}")
        try:
            yield table
        finally:
            ggml_base().gguf_free(table)


class GgufInit(ctypes.Structure):
    """struct gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def llama_folder() -> Path:
    return Path(llama_cpp.__file__).parent / "lib"


@cache
def compiled_backends() -> frozenset[str]:
    """Names of llama.cpp's backends in this build, such as "cpu", "blas", "metal", "rpc"."""
    found = (re.search(r"ggml-(\w+)", path.name) for path in llama_folder().glob("*ggml-*"))
    return frozenset(match[1] for match in found if match)


@cache
def ggml_library(name: str) -> Any:
    """Load a library, such as "ggml-cpu", by the name that libllama uses.

    By another name it would be loaded again, with devices of its own.
    """
    names = {"darwin": (f"lib{name}.0.dylib", f"lib{name}.dylib"), "win32": (f"{name}.dll",)}.get(
        sys.platform, (f"lib{name}.so.0", f"lib{name}.so")
    )
    folder = llama_folder()
    return ctypes.CDLL(str(next((folder / one for one in names if (folder / one).exists()), folder / names[-1])))


@cache
def ggml_base() -> Any:
    """Functions of libggml-base that llama-cpp-python does not name."""
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
    functions = [
        ("ggml_get_name", text, [pointer]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_nelements", number, [pointer]),
        ("ggml_op_desc", text, [pointer]),
        ("ggml_row_size", ctypes.c_size_t, [ctypes.c_int, number]),
        ("ggml_type_name", text, [ctypes.c_int]),
        ("ggml_backend_buffer_is_host", ctypes.c_bool, [pointer]),
        ("ggml_backend_buffer_clear", None, [pointer, ctypes.c_uint8]),
        ("ggml_backend_buffer_free", None, [pointer]),
        ("ggml_backend_buffer_get_base", pointer, [pointer]),
        ("ggml_backend_buffer_set_usage", None, [pointer, ctypes.c_int]),
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, ctypes.c_size_t]),
        ("ggml_backend_buft_get_alloc_size", ctypes.c_size_t, [pointer, pointer]),
        ("ggml_backend_buft_get_max_size", ctypes.c_size_t, [pointer]),
        ("ggml_backend_dev_buffer_type", pointer, [pointer]),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, [pointer, pointer]),
        ("ggml_backend_dev_buffer_from_host_ptr", pointer, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
        ("ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
        ("gguf_init_from_file", pointer, [text, GgufInit]),
        ("gguf_free", None, [pointer]),
        ("gguf_get_data_offset", ctypes.c_size_t, [pointer]),
        ("gguf_get_n_tensors", number, [pointer]),
        ("gguf_get_tensor_name", text, [pointer, number]),
        ("gguf_get_tensor_offset", ctypes.c_size_t, [pointer, number]),
        ("gguf_get_tensor_size", ctypes.c_size_t, [pointer, number]),
        ("gguf_get_tensor_type", ctypes.c_int, [pointer, number]),
        ("gguf_get_meta_size", ctypes.c_size_t, [pointer]),
        ("gguf_init_empty", pointer, []),
        ("gguf_set_kv", None, [pointer, pointer]),
        ("gguf_set_val_str", None, [pointer, text, text]),
        ("gguf_remove_key", number, [pointer, text]),
        ("gguf_add_tensor", None, [pointer, pointer]),
        ("gguf_write_to_file", ctypes.c_bool, [pointer, text, ctypes.c_bool]),
        ("ggml_get_tensor", pointer, [pointer, text]),
        ("ggml_free", None, [pointer]),
    ]
    return declare(ggml_library("ggml-base"), functions)


@cache
def ggml() -> Any:
    """Functions of libggml."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    functions = [
        ("ggml_backend_dev_count", size, []),
        ("ggml_backend_dev_get", pointer, [size]),
        ("ggml_backend_dev_type", ctypes.c_int, [pointer]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [pointer]),
        ("ggml_backend_dev_memory", None, [pointer, pointer, pointer]),
        ("ggml_backend_dev_get_props", None, [pointer, pointer]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_cpu_buffer_type", pointer, []),
        ("ggml_backend_register", None, [pointer]),
        ("ggml_backend_unload", None, [pointer]),
    ]
    return declare(ggml_library("ggml"), functions)


def devices(library: Any, *kinds: int) -> list[int]:
    """Devices of `ggml` that are of these kinds; without kinds all."""
    every = map(library.ggml_backend_dev_get, range(library.ggml_backend_dev_count()))
    return [one for one in every if not kinds or library.ggml_backend_dev_type(one) in kinds]


def memory_of(library: Any, device: int) -> tuple[int, int]:
    """Bytes of a device that are free, and in all."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def find_device(name: str) -> int | None:
    return next((one for one in devices(ggml()) if ggml().ggml_backend_dev_name(one) == name.encode()), None)


@cache
def leave_out_blas() -> None:
    """Have contexts compute without BLAS, which every build for a Mac has by default.

    In passes of 32 rows and more it copies each weight of the processor as float32, into memory that no plan counts. It
    rounds by the number of rows, and keeps GPUs from helping.
    """
    library = ggml()
    for device in devices(library, LIBRARY):
        library.ggml_backend_unload(library.ggml_backend_dev_backend_reg(device))


def engine_build() -> str:
    switches = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("GGML_")]
    features = llama_cpp.llama_print_system_info().decode().strip(" |")
    others = sorted(
        compiled_backends() - {"base", "cpu"}
    )  # such as BLAS, which is no feature, and rounds in its own way
    return "; ".join([f"llama-cpp-python {llama_cpp.__version__}", features, *others, *switches])
