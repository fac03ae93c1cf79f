"""Command line: `python -m benchmarks STUDY` runs what is not there yet and reports it, `report` makes all tables."""

import argparse
import os
import sys
from pathlib import Path

import torch

from . import reproduce
from .core.runs import check_device, summary_writer
from .core.store import Store
from .core.study import insert, report, show, shown, write_tables
from .digests import DIGESTS
from .methods import added
from .studies import STUDIES

#: Options of several studies that count something.
_COUNTS = ("steps", "trials", "crops", "rounds", "minutes", "width", "seeds", "epochs")
#: Of the tables that pages link to, from the root of a clone.
TABLES = Path("docs/results/tables")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; a mistake in it is one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"threads is {options.threads}; it must be positive.")
            torch.set_num_threads(options.threads)
        with added(options.method_file):
            return _run(options)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command resumes.", file=sys.stderr)
        return 130


class _Help(argparse.HelpFormatter):
    """Adds to the text of every option its default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, False, argparse.SUPPRESS):
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        return f"{action.help} (default: {shown})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="STUDY", dest="study")
    for name, study in STUDIES.items():
        command = commands.add_parser(name, help=study.help, description=study.help, formatter_class=_Help)
        study.arguments(command)
        command.add_argument("--name", default=name, help="of the file of results and of the table")
    what = "tables and figures from result files"
    reporting = commands.add_parser("report", help=what, description=what, formatter_class=_Help)
    pages = "also fill the results sections of these pages, or of all that show any, if none is named"
    reporting.add_argument("--pages", nargs="*", type=Path, help=pages)
    where = f"folder of the whole tables as CSV; {TABLES} with --pages, else beside the results"
    reporting.add_argument("--tables", type=Path, help=where)
    reporting.add_argument("--figures", type=Path, help="folder of the figures; beside the results by default")
    reproduce.arguments(commands.add_parser("reproduce", help="make files of results from nothing, by their names"))
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, default=Path("runs"), help="folder of the result files")
        command.set_defaults(command=main)
        command.add_argument("--threads", type=int, default=None, help="CPU threads; torch's choice by default")
        command.add_argument("--method-file", type=Path, help="a Python file whose METHODS are known beside the others")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.study == "report":
        paths, figures = sorted(options.out.glob("*.jsonl"), key=lambda path: path.stem), options.figures or options.out
        sections = report(paths, STUDIES, DIGESTS, figures)
        show(sections, figures)
        tables = options.tables or (options.out if options.pages is None else TABLES)
        pages = shown(STUDIES, DIGESTS) if options.pages == [] else options.pages or []
        filled = {page: insert(page, sections, tables) for page in pages}  # all of them, or none
        write_tables(sections, tables)
        for page, text in filled.items():
            page.write_text(text)
        return 0
    if options.study == "reproduce":
        return reproduce.run(options, main, Path(__file__).parent / "results")
    for name, value in vars(options).items():
        if (isinstance(value, int) and value < 0) or (value == 0 and name in _COUNTS):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be positive.")
    if "device" in options:
        check_device(options.device)
    path = options.out / f"{options.name}.jsonl"
    log = path.with_suffix(f".{options.log}") if getattr(options, "log", None) else None
    if log:
        summary_writer()  # or say what it lacks, before a long run
    store = Store(path, options.study, log)
    store.check()
    STUDIES[options.study].run(options, store)
    if getattr(options, "estimate", False):
        return 0
    if int(os.environ.get("RANK", 0)) == 0 and Store(path).read():
        sections = report([path], STUDIES)
        show(sections, options.out)
        print(f"results: {path}; python -m benchmarks report --out {options.out} shows all that are there.")
        print("".join(f"verdict: {section.verdict}.\n" for section in sections.values() if section.verdict), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
