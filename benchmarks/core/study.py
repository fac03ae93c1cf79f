"""A study: its options, how its runs are made, and how they are reported, which files of results alone decide."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import filter as matching
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

from ..methods import METHODS
from .runs import check_known, measure
from .store import Result, Store
from .tables import Section, Table, grouped

#: Options that count something: none of them may be 0.
COUNTS = ("steps", "seconds", "trials", "crops", "rounds", "width", "seeds", "epochs", "threads")

Value = TypeVar("Value")
#: An option that a command does not have, though others of its kind do.
Absent = Annotated[Value, tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass
class Options:
    """What every command has."""

    name: str = ""  # of the file of results and of the table
    out: Path = Path("runs")  # folder of the result files
    threads: int | None = None  # CPU threads; torch's choice by default
    method_file: Path | None = None  # a Python file whose METHODS are known beside the others


@dataclass
class Training(Options):
    """What every study has that trains."""

    download: bool = False  # fetch CIFAR-10 or tinyshakespeare into ./data
    log: Literal["tensorboard"] | None = None  # also write losses while they train, to OUT/NAME.tensorboard


@dataclass
class Compared(Training):
    """What a study of arms has, which learn the same problems."""

    trials: int = 10  # that choose an arm's learning rate and damping, or more until the rate lies inside
    seeds: int = 10  # how many; they begin at 1
    steps: int = 500  # of every run


def parsed(command: str, help: str, defaults: Options, arguments: list[str]) -> Any:
    """The options of a command, whose numbers have to be positive and finite; what is not given is as in `defaults`."""
    defaults = replace(defaults, name=defaults.name or command)
    options = tyro.cli(
        type(defaults), prog=f"python -m benchmarks {command}", description=help, args=arguments, default=defaults,
        config=(tyro.conf.FlagCreatePairsOff,),
    )  # fmt: skip
    if "/" in options.name:
        raise ValueError(f"--name is {options.name!r}; it names a file in the folder --out, so it has no /.")
    for name, value in vars(options).items():
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if is_number and (not 0 <= number < math.inf or (number == 0 and name in COUNTS)):
                raise ValueError(f"--{name.replace('_', '-')} is {number}; it must be positive and finite.")
    return options


def refuse_given(options: Options, names: Iterable[str], why: str) -> None:
    """Raise a ValueError if an option that has no effect here is given: one that differs from its kind's default."""
    for name in names:
        if getattr(options, name) != getattr(type(options)(), name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect {why}.")


def check_length(store: Store, *, unless: str = "", **length: Any) -> None:
    """Raise a ValueError if the file has runs of another length, which one table would mix with those of this one.

    A length is settings by name; runs that have none of them, or have the setting `unless`, are not looked at.
    """
    for settings in (result["settings"] for result in store.read()):
        there = {name: settings.get(name) for name in length}
        if unless not in settings and any(there.values()) and there != length:
            which = ", ".join(f"{name} {value}" for name, value in there.items() if value is not None)
            raise ValueError(f"{store.path} has runs of another length ({which}); choose another --name or --out.")


#: By name.
Sections = dict[str, Section]
#: (store, name of its file, folder for figures) → sections.
Report = Callable[[Store, str, Path], Sections]


class Recipe(NamedTuple):
    """How a study makes one file of results."""

    hours: float  # about, of one core of an AMD EPYC and no GPU
    name: str = ""  # of the file; the study's own by default
    options: Sequence[str] = ("",)  # of the commands that add to it, behind the study's name
    data: str | None = None  # in place of the study's own

    def commands(self, study: str) -> list[str]:
        """What follows `python -m benchmarks`."""
        return [f"{study} {options}".strip() for options in self.options]


#: Options of a study that has none to make it small.
UNTRIED = "--help"


@dataclass(frozen=True)
class Study:
    """One command: what it runs, what files of results it makes, and where these are shown."""

    help: str  # what is compared
    run: Callable[[Any, Store], None]  # adds to the store what it does not have yet
    report: Report
    options: Options = field(default_factory=Options)  # their values are the defaults
    _: KW_ONLY
    makes: Sequence[Recipe] = ()  # nothing, if it is for one's own runs
    data: str = ""  # what its --data is to name: "images", a "text", or nothing
    smoke: str = UNTRIED  # options that make it so small that a test can run it
    page: str = ""  # that shows its tables, from the root of a clone


@dataclass(frozen=True)
class Digest:
    """A section that is made from the results of several studies."""

    of: Sequence[str]  # the names of their files; without one of them there is no section
    #: Stores by name, own name, folder for figures → section.
    section: Callable[[Mapping[str, Store], str, Path], Section]
    page: str  # that shows it


def measurement(
    help: str, key: str, make: Callable[[], Result], section: Callable[[Result, str, Path], Section], **entry: Any
) -> Study:
    """A study that is one measurement; its section is made from (result, name, folder), and the entry is its rest."""

    def report(store: Store, name: str, folder: Path) -> Sections:
        return {name: section(store.read()[-1], name, folder)}

    return Study(help, lambda options, store: measure(store, {key: make}), report, **entry)


def protocol(*within: str) -> Callable[[Result], str]:
    """What tells tables apart: all settings but some, which tell apart what is within a table."""
    return lambda result: str(sorted(each for each in result["settings"].items() if each[0] not in within))


def protocols(store: Store, name: str, *within: str) -> Iterator[tuple[str, list[Result], list[Result]]]:
    """The results of every protocol, with a name, and what chose their settings; see `protocol`.

    A single one has the name of its file, several have numbers behind it.
    """
    key = protocol(*within)
    groups, searched = grouped(store.read(), key), grouped([*store.read("search"), *store.read("trials")], key)
    for number, (which, results) in enumerate(groups.items(), start=1):
        yield f"{name}-{number}" if len(groups) > 1 else name, results, searched.get(which, [])


def apart(section: Callable[[list[Result], str, Path], Section], *within: str) -> Report:
    """A report with a section for every protocol; `within` are the settings that may differ in one."""

    def report(store: Store, name: str, folder: Path) -> Sections:
        return {own: section(results, own, folder) for own, results, _ in protocols(store, name, *within)}

    return report


def report(
    paths: Iterable[Path],
    studies: Mapping[str, Study],
    digests: Mapping[str, Digest] | None = None,
    figures: Path | None = None,
) -> Sections:
    """Write the figures of some files of results, beside them or into a folder; return Markdown by name."""
    sections, stores = Sections(), dict[str, Store]()
    for path in paths:
        store, folder = Store(path), figures or path.parent
        if store.study not in studies:
            raise ValueError(f"{path} is of the study {store.study!r}, which is not there; move it to another folder.")
        results = store.read()
        if unknown := {result["settings"].get("method", "none") for result in results} - METHODS.keys():
            raise ValueError(f"{path} has runs of method {min(unknown)!r}; name the file that has it by --method-file.")
        if results:  # not only what is to choose settings
            stores[path.stem] = store
            sections |= studies[store.study].report(store, path.stem, folder)
    if not sections:
        raise FileNotFoundError("no results; run `python -m benchmarks digits` first, or name their folder by --out.")
    for name, digest in (digests or {}).items():
        if stores.keys() >= set(digest.of):
            sections[name] = digest.section(stores, name, folder)
    return sections


def shown(studies: Mapping[str, Study], digests: Mapping[str, Digest]) -> list[Path]:
    """The pages that show results, from the root of a clone."""
    pages = {study.page for study in studies.values()} | {digest.page for digest in digests.values()}
    return sorted(Path(page) for page in pages - {""})


def show(sections: Sections, figures: Path) -> None:
    """Print every section, and which figures a folder holds of them."""
    for name, section in sections.items():
        print(f"\n## {name}\n\n{section.text}")
    for figure in sorted(figures.glob("*.png")):
        if figure.stem.startswith(tuple(sections)):
            print(f"figure: {figure}")


def files(sections: Sections) -> dict[str, Table]:
    """The tables of sections by the names of their files, without an ending."""
    named = ((name, table) for name, section in sections.items() for table in section.tables)
    return {f"{name}-{table.name}" if table.name else name: table for name, table in named}


def insert(page: Path, sections: Sections, tables: Path) -> str:
    """Return the text of a page with its places for results filled from `sections`.

    `<!-- results:NAME -->` … `<!-- end -->` takes a section with the rows worth showing of its tables,
    and `<!-- results:NAME without COLUMN; COLUMN -->` leaves columns out. Both have links to the whole tables, in the
    folder `tables`; `<!-- link:NAME NAME* -->` is these alone, of several sections.
    """

    def filled(place: re.Match[str]) -> str:
        opening, kind, names, columns = place.groups()
        without, folder = columns.split("; ") if columns else [], os.path.relpath(tables, page.parent)
        patterns = names.split()
        check_known(f"results on {page}", [each for each in patterns if not matching(sections, each)], sections)
        named = {name: sections[name] for each in patterns for name in sorted(matching(sections, each))}
        whole = files(named)
        titles = [title for each in whole.values() for title in each.header]
        check_known(f"column of {names} on {page}", without, titles)
        what = f"All rows: {', '.join(f'[{file}.csv]({folder}/{file}.csv)' for file in whole)}." if whole else ""
        if kind != "link":
            what = named[names].on_page(what, without=without)
        return f"{opening}\n\n{what}\n\n<!-- end -->"

    place = r"(<!-- (results|link):(.+?)(?: without (.*?))? -->).*?<!-- end -->"
    return re.sub(place, filled, page.read_text(), flags=re.DOTALL)
