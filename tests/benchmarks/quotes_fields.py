"""What pages say of coordinate networks and physics-informed networks, and where the numbers are to be read."""

import math
from functools import partial
from statistics import fmean, median

from benchmarks.fields.report import arm, chosen, compared, errors, pace
from benchmarks.studies.coordinates import psnr

from .measured import results


def fitted(norm, optimizer, method="none", network="relu", size=64, batch_size=None):
    """Errors on the crops."""
    wanted = {"network": network, "size": size, "batch_size": batch_size}
    runs = [r for r in results("coordinates") if all(r["settings"].get(n) == v for n, v in wanted.items())]
    return errors(r for r in chosen(runs) if arm(r) == (norm, optimizer, method, None, None))


def gain(own, other, **protocol):
    """The difference of two arms in dB, and its p."""
    return compared(fitted(*own, **protocol), fitted(*other, **protocol), psnr)[:2]


def in_sines(optimizer):
    """What whitening an optimizer changes in SIREN, and p."""
    return white(optimizer, network="siren")


def white(optimizer, **protocol):
    """What whitening an optimizer gains in dB, and p."""
    return gain(("none", optimizer, "whitened"), ("none", optimizer), **protocol)


def white_against_norm(optimizer, **protocol):
    """How far a whitened optimizer is ahead of itself behind BatchNorm, and p."""
    return gain(("none", optimizer, "whitened"), ("batchnorm", optimizer), **protocol)


def solutions(optimizer, method="none", rows=None, equation="poisson", points="fixed", every=None, **length):
    """Errors of an equation's solution, by seed."""
    found = {"equation": equation, "points": points, **length}
    runs = chosen(r for r in results("poisson") if found.items() <= r["settings"].items())
    return errors(r for r in runs if arm(r) == ("none", optimizer, method, every, rows))


def times(own, other):
    """How many times the other's error an arm has, in the geometric mean over seeds, and p."""
    found = compared(own, other, math.log10)
    return 10**found.difference, found.p


def oftener(optimizer, every):
    """The same of measuring at every so many steps, in place of every tenth."""
    own = partial(solutions, optimizer, "whitened", "derivatives", steps=2000)
    return times(own(every=every), own())


def solved(optimizer, method="none", rows=None):
    """Errors of Poisson's equation after a minute."""
    return list(solutions(optimizer, method, rows, seconds=60.0).values())


def heated(optimizer):
    """Errors of the heat equation: by how much whitening divides their geometric mean, and p."""
    own, bare = (solutions(optimizer, *how, equation="heat", steps=2000) for how in (("whitened", "derivatives"), ()))
    found = compared(bare, own, math.log10)
    return 10**found.difference, found.p


def regressed(optimizer, method="none", norm="none", condition=10000):
    """Test errors behind maps of a condition, by data set and seed."""
    runs = [r for r in results("tabular") if r["settings"]["data_set"].endswith(f"-{condition}")]
    return errors(r for r in runs if arm(r)[:3] == (norm, optimizer, method))


def share(optimizer, norm="none", condition=10000):
    """A whitened optimizer's test error, as a share of that of the bare one behind a norm."""
    own, other = regressed(optimizer, "whitened", condition=condition), regressed(optimizer, "none", norm, condition)
    return math.exp(compared(own, other, math.log).difference)


def price(file, setting, value, method="none", optimizer="soap"):
    """Seconds of a step, the median of the runs that have a setting."""
    runs = [r for r in results(file) if r["settings"].get(setting) == value and r["settings"].get("points") != "drawn"]
    return median(pace(r) for r in chosen(runs) if arm(r) == ("none", optimizer, method, None, None))


def in_batches():
    """Adam's whitened step of 512 pixels, in Adam's own."""
    bare, own = (price("coordinates", "batch_size", 512, how, "adam") for how in ("none", "whitened"))
    return own / bare


def behind_features(optimizer, held_out=None):
    """What whitening gives an optimizer behind Fourier features in equal time, and p."""
    runs = [r for r in results("fourier") if "time_of" in r["settings"] and r["settings"].get("held_out") == held_out]
    white, bare = (errors(r for r in runs if arm(r)[:3] == ("none", optimizer, how)) for how in ("whitened", "none"))
    return compared(white, bare, psnr)[:2]


FIELDS = [
    ("take Adam from {:.1f} to {:.1f} dB of PSNR", lambda: [fmean(map(psnr, fitted("none", "adam", how).values()))
                                                             for how in ("none", "whitened")]),
    ("`Whitened` gives Adam {:.1f} dB, Muon {:.1f} and SOAP {:.1f} (each p < 0.001), and BatchNorm gives them {:.1f}, "
     "{:.1f} and {:.1f}", lambda: [d for own in (("none", "{}", "whitened"), ("batchnorm", "{}")) for d, p in (
         gain([part.format(o) for part in own], ("none", o)) for o in ("adam", "muon", "soap")) if p < 0.001]),
    ("With Fourier features `Whitened` gives Adam {:.1f} dB, Muon {:.1f} (p = {:.2f}) and SOAP {:.1f}", lambda: [
        *white("adam", network="fourier")[:1], *white("muon", network="fourier"),
        *white("soap", network="fourier")[:1]]),
    ("SOAP loses {:.1f} dB there (p = {:.2f}), and Adam gains {:.1f} (p = {:.2f})", lambda: [
        -in_sines("soap")[0], in_sines("soap")[1], *in_sines("adam")]),
    ("in batches of 512 pixels {:.1f} (Muon, p = {:.2f}) to {:.1f} dB", lambda: [
        *white("muon", batch_size=512), white("adam", batch_size=512)[0]]),
    ("median error {:.5f}; SOAP {:.5f} (p = {:.2f}), LBFGS {:.4f}, Muon {:.4f}, Adam {:.3f}", lambda: [
        median(solved("soap", "whitened")), median(solved("soap")), times(*(
            solutions("soap", how, seconds=60.0) for how in ("whitened", "none")))[1],
        *(median(solved(o)) for o in ("lbfgs", "muon", "adam"))]),
    ("| {:.1f} times SOAP's | | regression", lambda: [
        price("poisson", "seconds", 60.0, "whitened") / price("poisson", "seconds", 60.0)]),
    ("condition 10⁴ [{:.2f} times](docs/results/fields.md#badly-conditioned-features) SOAP's test error, {:.2f} times "
     "that with BatchNorm", lambda: [share("soap"), share("soap", "batchnorm")]),
    ("on well-conditioned features Adam loses {:.0f} %", lambda: [100 * (share("adam", condition=1) - 1)]),
    ("| {:.1f} times SOAP's | | convolutions", lambda: [
        price("tabular", "data_set", "friedman1-10000", "whitened") / price("tabular", "data_set", "friedman1-10000")]),
]  # fmt: skip
PAGE = [
    ("whitening gives SOAP {:.1f} dB (p = {:.3f}), Muon {:.1f} (p = {:.2f}) and Adam {:.1f}", lambda: [
        *behind_features("soap"), *behind_features("muon"), behind_features("adam")[0]]),
    ("Pixels held out lose {:.1f} dB to SOAP's (p = {:.3f}), {:.1f} to Muon's, and gain {:.1f} on Adam's", lambda: [
        -behind_features("soap", True)[0], behind_features("soap", True)[1], -behind_features("muon", True)[0],
        behind_features("adam", True)[0]]),
    ("Whitened SOAP loses {:.1f} dB to SOAP (p = {:.2f}), and five crops show no gain of whitened Adam (p = {:.2f}) or "
     "Muon (p = {:.2f})", lambda: [-in_sines("soap")[0], *(in_sines(o)[1] for o in ("soap", "adam", "muon"))]),
    ("`Whitened` is worth {:.0f} to {:.0f} dB", lambda: (lambda gains: [min(gains), max(gains)])([
        gain(("none", o, "whitened"), ("none", o))[0] for o in ("adam", "muon", "soap")])),
    ("whitened SOAP is {:.1f} dB better without it (p = {:.3f})", lambda: (lambda d, p, *_: [d, p])(
        *gain(("none", "soap", "whitened"), ("layernorm", "soap", "whitened")))),
    ("is worth {:.1f} dB to Adam** (p = {:.3f}): as much as `Preconditioned`, and {:.1f} less than `Whitened` "
     "(p = {:.2f}). With Muon it loses {:.1f}", lambda: [*(number for found in (gain(("none", "adam", "mac"), (
         "none", "adam")), gain(("none", "adam", "whitened"), ("none", "adam", "mac"))) for number in found[:2]), -gain(
             ("none", "muon", "mac"), ("none", "muon"))[0]]),
    ("Beside LayerNorm whitening gains with {}, {} and {}", lambda: [o for o in (
        "Adam", "Muon", "SOAP") for d, p, *_ in [gain(("layernorm", o.lower(), "whitened"), ("layernorm", o.lower()))]
        if d > 0 and p < 0.05]),
    ("Whitened Adam is {:.1f} dB ahead of Adam (p < 0.001), at {:.1f} times the time of a step", lambda: [
        gain for gain, p in [white("adam", network="wide")] if p < 0.001] + [
        price("coordinates", "network", "wide", "whitened", "adam")
        / price("coordinates", "network", "wide", optimizer="adam")]),
    ("Whitened Adam and Muon are {} dB ahead of their counterparts with BatchNorm", lambda: {
        f"{white_against_norm(o, size=128)[0]:.0f}" for o in ("adam", "muon")}),
    ("Whitening divides the error of Muon by {:.0f}, of Adam by {:.0f} and of SOAP by {:.0f}", lambda: [
        median(solved(o)) / median(solved(o, "whitened")) for o in ("muon", "adam", "soap")]),
    ("whitened Muon has {:.2f} times its error (p = {:.3f}), with these rows {:.2f} times (p = {:.3f})", lambda: [
        n for rows in (None, "derivatives") for found in [compared(solutions("muon", "whitened", rows, steps=2000),
         solutions("muon", "preconditioned", steps=2000), math.log10)] for n in (10**found.difference, found.p)]),
    ("whitening divides the error of SOAP by {:.0f} (p = {:.4f}) and of Muon by {:.0f} (p = {:.4f})", lambda: [
        number for o in ("soap", "muon") for number in heated(o)]),
    ("whitened SOAP has {:.2f} times SOAP's error (p = {:.4f}), with rows of derivatives {:.2f} times (p = {:.4f})",
     lambda: [n for rows in (None, "derivatives") for found in [compared(*(
         solutions("soap", *how, points="drawn", steps=2000) for how in (("whitened", rows), ())), math.log10)]
         for n in (10**found.difference, found.p)]),
    ("has {:.2f} times the error (p = {:.2f}, one of four such comparisons), at every step {:.2f} times (p = {:.2f})",
     lambda: [*oftener("soap", 3), *oftener("soap", 1)]),
    ("Whitening divides Muon's error by {:.0f} (p = {:.3f}) and Adam's by {:.0f} (p = {:.3f})", lambda: [
        n for o in ("muon", "adam") for ratio, p in [times(*(
            solutions(o, m, points="drawn", steps=2000) for m in ("whitened", "none")))] for n in (1 / ratio, p)]),
    ("Whitened Adam loses to Adam (p = {:.3f})", lambda: [p for ratio, p in [heated("adam")] if ratio < 1]),
]  # fmt: skip
INDEX = [("a ReLU coordinate network gains {:.0f} to {:.0f} dB by `Whitened`", PAGE[1][1])]
