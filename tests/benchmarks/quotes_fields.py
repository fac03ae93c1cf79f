"""What pages say of coordinate networks and physics-informed networks, and where the numbers are to be read."""

import math

from benchmarks.core.arms import arm, chosen, compared, errors
from benchmarks.problems.pictures import psnr

from .measured import results


def fitted(norm, optimizer, method="none", network="relu", size=64, batch_size=None):
    """Errors on the crops."""
    wanted = {"network": network, "size": size, "batch_size": batch_size}
    runs = [r for r in results("coordinates") if all(r["settings"].get(n) == v for n, v in wanted.items())]
    return errors(r for r in chosen(runs) if arm(r) == (norm, optimizer, method, None, None))


def gain(own, other, **protocol):
    """The difference of two arms in dB, and its p."""
    return compared(fitted(*own, **protocol), fitted(*other, **protocol), psnr)[:2]


def white(optimizer, **protocol):
    """What whitening an optimizer gains in dB, and p."""
    return gain(("none", optimizer, "whitened"), ("none", optimizer), **protocol)


def solutions(optimizer, method="none", rows=None, equation="poisson", points="fixed", every=None, **length):
    """Errors of an equation's solution, by seed."""
    found = {"equation": equation, "points": points, **length}
    runs = chosen(r for r in results("poisson") if found.items() <= r["settings"].items())
    return errors(r for r in runs if arm(r) == ("none", optimizer, method, every, rows))


def times(own, other):
    """How many times the other's error an arm has, in the geometric mean over seeds, and p."""
    found = compared(own, other, math.log10)
    return 10**found.difference, found.p


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


def behind_features(optimizer, held_out=None):
    """What whitening gives an optimizer behind Fourier features in equal time, and p."""
    runs = [r for r in results("fourier") if "time_of" in r["settings"] and r["settings"].get("held_out") == held_out]
    white, bare = (errors(r for r in runs if arm(r)[:3] == ("none", optimizer, how)) for how in ("whitened", "none"))
    return compared(white, bare, psnr)[:2]


PAGE = [
    ("whitening gives SOAP {:.1f} dB (p = {:.3f}), Muon {:.1f} (p = {:.2f}) and Adam {:.1f}", lambda: [
        *behind_features("soap"), *behind_features("muon"), behind_features("adam")[0]]),
    ("Pixels held out lose {:.1f} dB to SOAP's (p = {:.3f}), {:.1f} to Muon's, and gain {:.1f} on Adam's", lambda: [
        -behind_features("soap", True)[0], behind_features("soap", True)[1], -behind_features("muon", True)[0],
        behind_features("adam", True)[0]]),
    ("`Whitened` is worth {:.0f} to {:.0f} dB", lambda: (lambda gains: [min(gains), max(gains)])([
        gain(("none", o, "whitened"), ("none", o))[0] for o in ("adam", "muon", "soap")])),
    ("is worth {:.1f} dB to Adam** (p = {:.3f}), {:.1f} less than `Whitened` (p = {:.2f}). With Muon it loses {:.1f}",
     lambda: [*(number for found in (gain(("none", "adam", "mac"), ("none", "adam")), gain(
         ("none", "adam", "whitened"), ("none", "adam", "mac"))) for number in found[:2]), -gain(
             ("none", "muon", "mac"), ("none", "muon"))[0]]),
    ("and raises Adam's** (p = {:.3f})", lambda: [p for ratio, p in [heated("adam")] if ratio < 1]),
]  # fmt: skip
