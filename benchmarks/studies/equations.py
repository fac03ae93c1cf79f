"""Differential equations: GaussNewton beside first-order optimizers and its rivals, at equal processor time.

Every arm trains two networks, but random features. Its points, learning rate and damping are the best of ten trials of
a quarter of the length, on seed 0, which no table shows: three choose among counts of points, the others begin there.
An arm without learning rate and damping, as GaussNewton is, has the three alone, each on three seeds. One whose
runs end far above its best trial has a learning rate at the edge of what trains, and the next lower one that was tried
is run.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.arms import Arm, Changes, Look, arm, chosen, errors, first_trial, label, quartiles, sections, variants
from ..core.runs import check_known, run_all
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, Training, check_length
from ..core.tables import SIGNIFICANT, Cell, Section, Table, exact, grouped, holm, paired, pivot
from ..core.tune import Search, Tried, around, choose
from ..problems.equations import ANEW, EQUATIONS, NONLINEAR, NOW_AND_THEN, ONCE, SOLVED, EquationRun
from ..train import DERIVATIVES, limit

#: Most valuable first, with the ways in which their points are drawn, of which the better one counts.
ARMS = {
    Arm("none", "gauss-newton", "none"): (ANEW,),
    Arm("none", "self-scaled-bfgs", "none"): (NOW_AND_THEN, ONCE),
    Arm("none", "soap", "none"): (ANEW,),
    Arm("none", "soap", "whitened", None, DERIVATIVES): (ANEW,),
    Arm("none", "spring", "none"): (ANEW,),
    Arm("none", "nielsen", "none"): (ANEW,),
    Arm("none", "adam-lbfgs", "none"): (ONCE,),
    Arm("none", "muon", "none"): (ANEW,),
    Arm("none", "muon", "whitened", None, DERIVATIVES): (ANEW,),
    Arm("none", "adam", "none"): (ANEW,),
}
RANDOM_FEATURES = Arm("none", "random-features", "none", hidden=1000)
#: Of three hidden layers.
WIDTHS = 20, 50
#: Inside; among these the trials choose.
COUNTS = 300, 600, 1200
SECONDS = 60.0
#: Seeds of trials, which no table shows; the others serve arms that have nothing but points to choose.
TUNED_ON = 0, 101, 102
#: Errors to which times are taken.
TIMED = 1e-3, 1e-5
#: Runs that end so many times above their trial are far from it.
FAR = 3.0
#: Runs of these equations by the first four arms are made again by `--varied`, on one seed with each of the changes;
#: and SOAP's settings are chosen again on another seed, which says how far two searches of one arm lie apart.
VARIED = "burgers", "reaction", "korteweg-de-vries"
CHANGES: dict[str, Changes] = {"points that stay": {"draws": ONCE}, "PyTorch's initialisation": {"start": "pytorch"}}
SEED, AGAIN_ON, SOAP = 1, 101, Arm("none", "soap", "none")
#: Damping that searches begin with.
DAMPINGS = {"spring": 1e-4}
_LOOK = Look(
    math.log10,
    quartiles,
    "relative error",
    lambda difference: f"× {10**difference:.2g}",
    logarithmic=True,
    about="Median and quartiles over seeds. The learning rate of random features is the range of their slopes.",
)


def _length(settings: Mapping[str, Any]) -> str:
    return f"{settings['seconds']:g} seconds of one core" if "seconds" in settings else f"{settings['steps']} steps"


def _named(settings: Mapping[str, Any]) -> tuple[str, str]:
    return settings["equation"], f"{EQUATIONS[settings['equation']].label}; {_length(settings)}"


def report(store: Store, name: str, folder: Path) -> Sections:
    """Tables of equations by arm, of errors and of times, and a section for every equation."""
    results = store.read()
    best = _better_networks(results)
    lowest = dict(sorted(best, key=lambda place: -_middle(best[place])))  # of an equation the last counts
    above, times = _above(best, lowest), " and ".join(f"{error:.0e}" for error in TIMED)
    medians = {place: _error(runs, above.get(place)) for place, runs in best.items()}
    return {
        f"{name}-errors": _by_arm(
            medians,
            "≈: not shown to be above the lowest by paired t tests of logarithms, by Holm's correction within "
            "nonlinear or linear equations; a higher error than 1, and a run that broke down, count as 1. Median "
            "relative L2 error after "
            f"{_length(results[0]['settings'])}, or the viscosity's",
        ),
        f"{name}-times": _by_arm(
            {place: _times(runs) for place, runs in best.items()},
            f"Median of the seconds of one core after which the relative L2 error was at most {times}",
        ),
        **_varied(store, name),
        **sections(store, name, folder, _LOOK, _named, lambda arm: True),
    }


#: An equation, and an arm without the width of its network.
Place = tuple[str, Arm]


def _better_networks(results: Iterable[Result]) -> dict[Place, list[Result]]:
    """The runs of every arm by the network of the lower median."""
    best = grouped(results, lambda r: (r["settings"]["equation"], arm(r)._replace(hidden=None)))
    for place, runs in best.items():
        best[place] = min(map(chosen, grouped(runs, setting("hidden")).values()), key=_middle)
    return best


def _middle(runs: Iterable[Result]) -> float:
    """The median error."""
    return statistics.median(errors(runs).values())


def _by_arm(cells: Mapping[Place, Cell], about: str) -> Section:
    columns = {key._replace(hidden=None): label(key._asdict() | {"hidden": None}) for key in (*ARMS, RANDOM_FEATURES)}
    rows = {name: _short(name) for name in EQUATIONS}
    caption = f"{about}, of the better of two networks; {len(NONLINEAR)} nonlinear equations first."
    return Section([pivot(["equation"], rows, columns, cells), caption])


def _above(best: Mapping[Place, list[Result]], lowest: Mapping[str, Arm]) -> dict[Place, float]:
    """P of an arm's being above the lowest of its equation, after Holm's correction; errors end at that of 0."""
    found = dict[Place, float]()
    for is_nonlinear in (True, False):
        others = [(e, key) for e, key in best if (e in NONLINEAR) is is_nonlinear and key != lowest[e]]
        final = {place: {of: min(error, 1.0) for of, error in errors(runs).items()} for place, runs in best.items()}
        tests = [paired(final[e, key], final[e, lowest[e]], math.log10).p for e, key in others]
        found |= dict(zip(others, holm([1.0 if math.isnan(p) else p for p in tests]), strict=True))
    return found


def _error(runs: Sequence[Result], p: float | None) -> Cell:
    """The median error, bold where it is the lowest of its equation and has no p."""
    median = _middle(runs)
    numbers = {"": median, "width": runs[0]["settings"]["hidden"], "n": len(runs), "holm": p}
    return Cell(f"**{median:.1e}**" if p is None else f"{median:.1e}{' ≈' * (p >= SIGNIFICANT)}", numbers)


def _times(runs: Sequence[Result]) -> Cell:
    """Medians of when errors were first no higher than `TIMED`; never is infinite."""
    middles = {
        error: statistics.median(
            next((t for t, e in zip(r["seconds"], r["error"], strict=True) if e is not None and e <= error), math.inf)
            for r in runs
        )
        for error in TIMED
    }
    text = ", ".join(f"{time:.0f}" if math.isfinite(time) else "–" for time in middles.values())
    return Cell(text, {f"{error:g}": time for error, time in middles.items()})


def _vary(store: Store, shown: Sequence[Changes], search: Callable[[EquationRun], Search]) -> None:
    """Make these runs; `search` is that of an arm's settings from its first trial on."""
    best = _better_networks(store.read())
    settled = [_made_by(result) for result in _varied_from(best).values()]
    changed = [run for each in settled for run in variants(each, CHANGES.values())]
    run_all([run for run in changed if run not in settled], SOLVED, store, part="varied")
    for runs in _of_soap(best).values():
        first = first_trial(_made_by(runs[0]), arm(runs[0]))
        on = partial(variants, changes=[{"seed": AGAIN_ON}])
        (again,) = choose([search(first)], SOLVED, store, math.log, part="again-search", each=on)
        run_all(variants(again, shown), SOLVED, store, part="again")


def _made_by(result: Result) -> EquationRun:
    """The run of a result, whose settings leave out those that are None."""
    return EquationRun(**{field.name: result["settings"].get(field.name) for field in fields(EquationRun)})


def _of_soap(best: Mapping[Place, list[Result]]) -> dict[str, list[Result]]:
    return {equation: best[equation, SOAP] for equation in VARIED if (equation, SOAP) in best}


def _varied_from(best: Mapping[Place, list[Result]]) -> dict[Place, Result]:
    """Place → the run that others are to differ from."""
    places = [place for place in product(VARIED, list(ARMS)[:4]) if place in best]
    return {place: r for place in places for r in best[place] if r["settings"]["seed"] == SEED}


def tuned_twice(store: Store) -> dict[str, tuple[float, float]]:
    """Equation → the medians of SOAP by the settings of two searches."""
    again = grouped(store.read("again"), lambda r: r["settings"]["equation"])
    first = _of_soap(_better_networks(store.read()))
    return {e: (_middle(first[e]), statistics.median(r["score"] for r in runs)) for e, runs in again.items()}


def _varied(store: Store, name: str) -> Sections:
    """A table of the errors as shown, and with each change that has been made; nothing before there are runs."""
    scores, rows = {r["key"]: r["score"] for r in store.read("varied")}, list[dict[str, str | Cell]]()
    for (equation, key), result in _varied_from(_better_networks(store.read())).items():
        keys = [run.key("varied") for run in variants(_made_by(result), CHANGES.values())]
        if scores.keys() & keys:
            cells = [exact(error, ".1e") for error in (result["error"][-1], *map(scores.get, keys))]
            columns = dict(zip(("as above", *CHANGES), cells, strict=True))
            rows.append({"equation": _short(equation), "arm": label(key._asdict()), **columns})
    if not rows:
        return {}
    pairs = [f"{_short(e)} {first:.1e} and {second:.1e}" for e, (first, second) in tuned_twice(store).items()]
    twice = f" SOAP, tuned on two seeds in turn, has medians of {', '.join(pairs)}." if pairs else ""
    return {f"{name}-varied": Section([Table.of(rows), f"Errors after a minute, of seed 1.{twice}"])}


def _short(equation: str) -> str:
    return EQUATIONS[equation].label.split(":")[0]


def counts_first(first: EquationRun, trials: int) -> Search:
    """A trial of every count of points, and the other trials around the best of them."""

    def search(tried: Tried) -> list[Any]:
        if not tried:
            return [replace(first, inner=count) for count in COUNTS][:trials]
        begun = list(tried)[: len(COUNTS)]
        inner = min(begun, key=tried.__getitem__).inner
        if first.lr is None or trials <= len(COUNTS):
            return []
        here = {run: loss for run, loss in tried.items() if run.inner == inner}
        return list(around(replace(first, inner=inner), trials - len(COUNTS) + 1)(here))

    return search


@dataclass
class EquationOptions(Training):
    """Options of this study."""

    equation: str | None = None  # this one alone, such as burgers or poisson-5
    optimizer: str | None = None  # this one alone, such as gauss-newton or soap
    width: int | None = None  # of the network, this one alone: 20 or 50
    trials: int = 10  # that choose an arm's points, learning rate and damping
    seeds: int = 5  # how many; they begin at 1
    steps: int | None = None  # in place of a minute
    varied: bool = False  # once the others are made: points that stay, PyTorch's initialisation, a second search


def _arms(options: EquationOptions) -> list[tuple[Arm, str]]:
    """The arms of an equation, and how their points are drawn."""
    every = [(arm._replace(hidden=width), way) for arm, ways in ARMS.items() for way in ways for width in WIDTHS]
    every.insert(6, (RANDOM_FEATURES, ONCE))
    wanted = {"optimizer": options.optimizer, "hidden": options.width}
    return [(arm, draws) for arm, draws in every if all(v in (None, getattr(arm, name)) for name, v in wanted.items())]


def _run(options: EquationOptions, store: Store) -> None:
    optimizers = dict.fromkeys(arm.optimizer for arm in (*ARMS, RANDOM_FEATURES))
    check_known("equation", filter(None, [options.equation]), EQUATIONS)
    check_known("optimizer", filter(None, [options.optimizer]), optimizers)
    check_known("width", filter(None, [options.width]), [*WIDTHS, RANDOM_FEATURES.hidden])
    if not _arms(options):
        raise ValueError(f"{options.optimizer} has no --width {options.width}: nothing to run with these options.")
    length = options.steps or SECONDS
    check_length(store, **limit(length))
    shown = [{"seed": seed, **limit(length)} for seed in range(1, options.seeds + 1)]
    if options.varied:
        _vary(store, shown, lambda run: counts_first(replace(run, **limit(length, 0.25)), options.trials))
        return
    for equation in [name for name in EQUATIONS if options.equation in (None, name)]:
        for each, draws in _arms(options):
            like = EquationRun("", "none", equation=equation, draws=draws, **limit(length, 0.25))
            first = first_trial(like, each, damping=DAMPINGS.get(each.optimizer, 3.2e-3))
            slopes = around(replace(first, inner=2000), options.trials)
            search = slopes if each == RANDOM_FEATURES else counts_first(first, options.trials)
            # An arm with a learning rate needs its trials for that: it tries every count of points on one seed.
            repeats = 1 if first.lr else max(1, options.trials // len(COUNTS))
            tuned_on = [{"seed": seed} for seed in TUNED_ON[:repeats]]
            (best,) = choose([search], SOLVED, store, math.log, each=partial(variants, changes=tuned_on))
            for run, error in _trials(best, store)[: 1 if each == RANDOM_FEATURES else 3]:
                runs = variants(run, shown)
                run_all(runs, SOLVED, store, wait=True)
                final = {r["key"]: r for r in store.read()}
                if error is None or _middle(final[run.key()] for run in runs) <= FAR * error:
                    break


def _trials(best: EquationRun, store: Store) -> list[tuple[EquationRun, float | None]]:
    """The best trial and its error, which is None where it broke down, and those of all lower rates that did not."""
    scores = {r["key"]: r["score"] for r in store.read("search")}
    rates = {r["settings"].get("lr") for r in store.read("search")}
    lower = [replace(best, lr=rate) for rate in sorted(rates - {None}, reverse=True) if rate < (best.lr or 0)]
    tried = [(run, scores.get(run.key("search"))) for run in [best, *lower]]
    return [(run, error) for run, error in tried if run == best or error is not None]


STUDIES = {
    "equations": Study(
        "differential equations, nonlinear ones first, by a network", _run, report, EquationOptions(),
        makes=[Recipe(30.0, options=("", "--varied"))],
        smoke="--equation burgers --optimizer gauss-newton --width 20 --seeds 1 --steps 1",
        page="docs/results/equations.md",
    )
}  # fmt: skip
