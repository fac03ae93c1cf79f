"""Command line: `python -m benchmarks STUDY` runs what is not there yet and reports it, `report` makes all tables."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import gpu, reproduce
from .catalogue import STUDIES
from .core.runs import check_device, summary_writer
from .core.store import Store
from .core.study import Absent, Options, files, insert, parsed, report, show, shown
from .digests import DIGESTS, values
from .methods import added

#: Of the tables that pages link to, from the root of a clone.
TABLES = Path("docs/results/tables")


@dataclass
class ReportOptions(Options):
    """Options of `report`."""

    name: Absent[str] = ""
    pages: tuple[Path, ...] | None = None  # also fill the results sections of these pages, of all if none is named
    figures: Path | None = None  # folder of the figures; beside the results by default


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; a mistake in it is one line on standard error."""
    given = sys.argv[1:] if arguments is None else arguments
    studies = {name: (study.help, study.options, partial(_study, name)) for name, study in STUDIES.items()}
    known: dict[str, Any] = {**studies, **COMMANDS}
    if not given or given[0] in ("-h", "--help"):
        print(__doc__, *(f"{name:20} {help}" for name, (help, *_) in known.items()), sep="\n")
        print("\npython -m benchmarks STUDY --help has the options of one.")
        return 0
    try:
        if given[0] not in known:
            raise ValueError(f"unknown study {given[0]!r}; `python -m benchmarks --help` lists all.")
        help, defaults, run = known[given[0]]
        options = parsed(given[0], help, defaults, given[1:])
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with added(options.method_file):
            if hasattr(options, "device"):
                check_device(options.device)
            return run(options)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command resumes.", file=sys.stderr)
        return 130


def _study(command: str, options: Any) -> int:
    path = options.out / f"{options.name}.jsonl"
    log = path.with_suffix(f".{options.log}") if getattr(options, "log", None) else None
    if log:
        summary_writer()  # or say what it lacks, before a long run
    store = Store(path, command, log)
    store.check()
    STUDIES[command].run(options, store)
    if int(os.environ.get("RANK", 0)) == 0 and Store(path).read():
        show(report([path], STUDIES), options.out)
        print(f"results: {path}; python -m benchmarks report --out {options.out} shows all that are there.")
    return 0


def _report(options: ReportOptions) -> int:
    paths, figures = sorted(options.out.glob("*.jsonl"), key=lambda path: path.stem), options.figures or options.out
    sections = report(paths, STUDIES, DIGESTS, figures)
    show(sections, figures)
    pages, tables = [*(options.pages or ())], options.out
    if options.pages == ():
        pages, tables = [*shown(STUDIES, DIGESTS), *values.PAGES], TABLES
    stores = {path.stem: Store(path) for path in paths}
    whole = files(sections)
    filled = {page: values.filled(insert(page, sections, tables), stores, whole) for page in pages}  # all, or none
    tables.mkdir(parents=True, exist_ok=True)
    for file, table in whole.items():
        (tables / f"{file}.csv").write_text(table.csv())
    for page, text in filled.items():
        page.write_text(text)
    return 0


#: Commands that are no study: what each does, its options, and what runs it.
COMMANDS: dict[str, tuple[str, Options, Callable[[Any], int]]] = {
    "report": ("tables and figures from result files", ReportOptions(), _report),
    "gpu": ("all that wants a GPU, the most valuable first, for some minutes", gpu.GpuOptions(), gpu.run),
    "reproduce": (
        "make files of results from nothing, by their names",
        reproduce.ReproduceOptions(),
        partial(reproduce.run, main=main, committed=Path(__file__).parent / "results"),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
