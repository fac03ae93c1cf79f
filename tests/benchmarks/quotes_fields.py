"""What pages say of coordinate networks and physics-informed networks, and where the numbers are to be read."""

from statistics import median

from benchmarks.fields.report import arm, chosen, compared, errors
from benchmarks.studies.coordinates import psnr

from .measured import results


def fitted(norm, optimizer, method="none"):
    """Errors on the crops of the network of ten layers."""
    wanted = {"network": "relu", "size": 64}
    runs = [r for r in results("coordinates") if wanted.items() <= r["settings"].items()]
    whole = chosen(r for r in runs if "batch_size" not in r["settings"])
    return errors(r for r in whole if arm(r) == (norm, optimizer, method, None, None))


def gain(own, other):
    """The difference of two arms in dB, and its p."""
    return compared(fitted(*own), fitted(*other), psnr)[:2]


def solved(optimizer, method="none", rows=None):
    """Errors of Poisson's equation, by seed."""
    found = {"equation": "poisson", "points": "fixed", "seconds": 60.0}
    runs = chosen(r for r in results("poisson") if found.items() <= r["settings"].items())
    return list(errors(r for r in runs if arm(r) == ("none", optimizer, method, None, rows)).values())


WHITE_SOAP = ("none", "soap", "whitened")
FIELDS = [
    ("`Whitened` gives Adam {:.1f} dB, Muon {:.1f} and SOAP {:.1f} (each p < 0.001)", lambda: [
        d for d, p in (gain(("none", o, "whitened"), ("none", o)) for o in ("adam", "muon", "soap")) if p < 0.001]),
    ("is ahead of\nMuon with BatchNorm by {:.1f} dB (p = {:.2f}); ten crops cannot tell it from SOAP with BatchNorm "
     "(p = {:.2f})".replace("\n", " "), lambda: [
        *gain(WHITE_SOAP, ("batchnorm", "muon")), gain(WHITE_SOAP, ("batchnorm", "soap"))[1]]),
    ("Whitened Adam is level with BatchNorm (p = {:.2f})", lambda: [
        gain(("none", "adam", "whitened"), ("batchnorm", "adam"))[1]]),
    ("median error {:.1g}; SOAP {:.1g}, LBFGS {:.1g}, Muon {:.1g}, Adam {:.1g}", lambda: [
        median(solved("soap", "whitened")), *(median(solved(o)) for o in ("soap", "lbfgs", "muon", "adam"))]),
]  # fmt: skip
PAGE = [
    ("`Whitened` is worth {:.0f} to {:.0f} dB", lambda: (lambda gains: [min(gains), max(gains)])([
        gain(("none", o, "whitened"), ("none", o))[0] for o in ("adam", "muon", "soap")])),
    ("divides the error of Muon and of Adam by about {}", lambda: {
        f"{median(solved(o)) / median(solved(o, 'whitened')):.0f}" for o in ("adam", "muon")}),
]  # fmt: skip
INDEX = [("coordinate networks gain {:.0f} to {:.0f} dB by `Whitened`", PAGE[0][1])]
