"""What the page of the language model says of results, and what several pages say of networks without normalisers."""

from statistics import fmean, median

from .measured import AFFINE, NONE, p, plus
from .measured_language import (
    at_equal_seconds,
    beside_all,
    beside_paired,
    by_some_rows,
    deep,
    equal,
    faster,
    faster_twins,
    free,
    less,
    longer,
    losses,
    one_norm,
    residual,
)

#: What tames the residual stream in other ways than smaller steps.
NORMALISED = ("layernorm", "rmsnorm", "dyt", "derf", "skip-init")
#: What the first paragraphs of several pages say of networks without normalisers.
LEAD = (
    "the test loss of its LayerNorm counterpart (p = {:.2f}), and {:.3f} nats more after 2,000. A separate learning "
    "rate for the embeddings makes that {:.3f}, and one LayerNorm, before the head, {:.3f} less than the counterpart",
    lambda: [free("input-held-muon", "muon")[1][1], longer(best_twin=True)[1][0], faster()[1][0], -one_norm()[1][0]],
)
LANGUAGE_MODEL = [
    ("{:.3f} above on test with AdamW (p = {:.2f}), {:.3f} with Muon (p = {:.2f})",
     lambda: [*by_some_rows("adamw", 256), *by_some_rows("muon", 256)]),
    ("64 rows it is {:.3f} above with AdamW (p = {:.2f}), {:.3f} with Muon (p = {:.2f})",
     lambda: [*by_some_rows("adamw", 64), *by_some_rows("muon", 64)]),
    ("takes {:.2f} nats off AdamW and {:.3f} off Muon", lambda: [
        -free(f"whitened-{m}", m, "layernorm", None)[1][0] for m in ("adamw", "muon")]),
    ("it is {:.3f} below Muon on validation and {:.3f} on test (rank 16: {:.3f} and "
     "{:.3f}), and {:.3f} and {:.3f} below SOAP",
     lambda: less("whitened-muon", "muon") + less("whitened-muon-16", "muon") + less("whitened-muon", "soap")),
    ("for SOAP**, with LayerNorm (p = {:.2f} on test) or without a normaliser (p = {:.2f})", lambda: [
        p(*(losses(norm, method, "test_loss") for method in ("whitened-soap", "soap")))
        for norm in ("layernorm", "none")]),
    ("After 2,000 steps rank 16 is {:.3f} and {:.3f} below Muon", lambda: less("whitened-muon-16", "muon",
     file="char-lm-2000")),
    ("{:.3f} below on validation and {:.3f} on test (rank 16: {:.3f} and {:.3f}), by medians {:.3f} and {:.3f}",
     lambda: less("whitened-adamw", "adamw") + less("whitened-adamw-16", "adamw") + less("whitened-adamw", "adamw",
         by=median)),
    ("gains {:.2f} on validation and {:.2f} on test**", lambda: less("batch-ideal-adamw", "adamw")),
    ("by medians it gains {:.3f} and {:.3f}, and p is {:.2f}", lambda: [*less("batch-ideal-adamw", "adamw",
     by=median), p(
        *(losses("layernorm", m, "test_loss") for m in ("batch-ideal-adamw", "adamw")))]),
    ("{:.3f} and {:.3f} on validation, a quarter", lambda: [fmean(losses(NONE, m)) for m in ("muon",
     "whitened-muon")]),
    ("it is {:.3f} below on validation (p = {:.2f}) and {:.3f} below on test (p = {:.2f})",
     lambda: [x for d, q in free("input-held-muon", "muon") for x in (-d, q)]),
    ("it is {:.3f} below on validation and {:.3f} above on test",
     lambda: plus([d for d, _ in free("input-scaled-muon", "muon")], "-+")),
    ("is {:.3f} behind LayerNorm on validation with Muon, and {:.3f} with AdamW",
     lambda: [free(m, m, drawn=None)[0][0] for m in ("muon", "adamw")]),
    ("`hold` it is {:.3f} below LayerNorm on validation and {:.3f} below on test",
     lambda: plus([d for d, _ in free("input-held-muon", "muon", "gains")], "--")),
    ("(SkipInit) it is {:.3f} to {:.3f} behind with embeddings of deviation 1",
     lambda: (lambda found: [min(found), max(found)])([
        d for m, twin in (("muon", "muon"), ("input-held-muon", "muon"), ("adamw", "adamw"))
        for d, _ in free(m, twin, "skip-init")])),
    ("embeddings, is {:.3f} and {:.3f} above", lambda: plus([d for d, _ in free("muon", "muon")], "++")),
    ("{:.3f} below LayerNorm on validation and {:.3f} on test", lambda: plus([d for d, _ in free("adamw", "adamw")],
     "--")),
    ("{:.3f} and {:.3f} below without `hold`, {:.3f} and {:.3f} above with it",
     lambda: plus([d for m in ("input-scaled-adamw", "input-held-adamw") for d, _ in free(m, "adamw")], "--++")),
    ("it is {:.3f} behind it on validation and {:.3f} on test. NorMuon", lambda: [
        s - h for (s, _), (h, _) in zip(free("soap", "muon"), free("input-held-muon", "muon"), strict=True)]),
    ("MARS are {:.3f}, {:.3f}, {:.3f} and {:.3f} above LayerNorm on validation", lambda: plus([
        free(m, twin)[0][0] for m, twin in (("normuon", "normuon"), ("preconditioned-muon", "muon"),
                                            ("kron", "kron"), ("mars", "mars"))], "++++")),
    ("Muon is {:.3f} above it there, and {:.3f} on test", lambda: plus([
        d for d, _ in free("whitened-muon", "muon")], "++")),
    ("falls to {:.3f} on validation and to {:.3f} on test, and SOAP's on test to {:.3f}", lambda: plus([
        *(d for d, _ in free("input-scaled-normuon", "normuon")), free("input-scaled-soap", "soap")[1][0]], "+++")),
    ("by {:.3f} on validation and {:.3f} on test, with rank 16 by {:.3f} and {:.3f}", lambda: plus([
        d for m in ("whitened-adamw", "whitened-adamw-16") for d, _ in free(m, m)], "----")),
    ("rank 16 is {:.3f} below AdamW with LayerNorm on test (p < 0.001)",
     lambda: [-d for d, q in [free("whitened-adamw-16", "adamw")[1]] if q < 0.001]),
    ("it ends {:.3f} above AdamW's LayerNorm counterpart on validation, and {:.3f} below its own",
     lambda: [free("kfac", "adamw")[0][0], -free("kfac", "kfac")[0][0]]),
    ("it is within {:.3f} of Muon alone on validation (p = {:.2f} or more)",
     lambda: beside_all("muon", *NORMALISED)),
    ("by {:.3f} to {:.3f} (paired p < 0.005)", lambda: [
        d for *both, q in [beside_paired(1.0, "layernorm", "rmsnorm")] for d in both if q < 0.005]),
    ("With AdamW no p is below {:.2f}", lambda: beside_all("adamw", *NORMALISED)[1:]),
    LEAD,
    ("is {:.3f} behind its LayerNorm counterpart on validation (p = {:.2f}) and {:.3f} on test (p = {:.3f})",
     lambda: [x for pair in faster() for x in pair]),
    ("with the head's 0.003 for both {:.3f} (p = {:.4f}) and {:.3f} (p = {:.3f})",
     lambda: [x for pair in longer() for x in pair]),
    ("With 0.01 for both it is {:.3f} (p = {:.2f}) and {:.3f} (p = {:.4f}) behind",
     lambda: [x for pair in faster(1e-2) for x in pair]),
    ("ends {:.3f} below its LayerNorm counterpart on validation (p = {:.3f}) and {:.3f} below on test (p = {:.3f})",
     lambda: [x for d, q in one_norm() for x in (-d, q)]),
    ("ends {:.3f} above on validation (p = {:.3f}) and {:.3f} above on test (p = {:.2f})",
     lambda: [x for pair in one_norm("muon") for x in pair]),
    ("gains by 0.03 as well, {:.3f} on validation (p = {:.2f})",
     lambda: (lambda d, q: [-d, q])(*faster_twins(3e-2))),
    ("Muon alone ends {:.3f} below its LayerNorm counterpart on validation and {:.3f} on test (p < 0.001)",
     lambda: [-d for d, q in deep("muon") if q < 0.001]),
    ("ends {:.3f} and {:.3f} below, level with Muon alone (p = {:.2f} and {:.2f})",
     lambda: [-d for d, _ in deep("input-held-muon")] + [
         q for _, q in deep("input-held-muon", ("none", 1.0, "muon"))]),
    ("{:.3f} and {:.3f} above LayerNorm on validation with Muon, with embeddings of deviation {:.0f}, "
     "and {:.3f} and {:.3f} with AdamW", lambda: (lambda d: [*d[:2], 1, *d[2:]])(
         [free(k, k, norm)[0][0] for k in ("muon", "adamw") for norm in ("dyt", "derf")])),
    ("its RMS is {:.1f} at its largest, against {:.1f}", lambda: [residual(NONE, 1.0, "input-held-muon"),
     residual("layernorm", None, "muon")]),
    ("proportional gradients end {:.2f} behind and unit-consistent coordinates {:.2f} to {:.2f}",
     lambda: [less("adamw", "proportional-adamw", file="char-lm-wrappers")[1],
              *sorted(less("adamw", "unit-consistent-adamw", file="char-lm-wrappers"))]),
    ("{:.2f} on test, against {:.2f} and {:.2f} without and {:.2f} with LayerNorm", lambda: [
        fmean(losses(n, m, "test_loss", "char-lm-wrappers")) for n, m in (
            (AFFINE, "adamw"), (NONE, "proportional-adamw"), (NONE, "adamw"), ("layernorm", "adamw"))]),
    ("Muon ends {:.3f} (validation) and {:.3f} (test) below", lambda: [
        fmean(losses("layernorm", "whitened-muon-16", of)) - fmean(equal(432, of)) for of in ("validation_loss",
            "test_loss")]),
    ("Muon is level on validation (p = {:.2f}) and {:.3f} above on test (p = {:.2f}, three seeds", lambda: [
        at_equal_seconds("validation_loss")[1], *at_equal_seconds("test_loss")]),
]  # fmt: skip
