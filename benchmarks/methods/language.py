"""The methods of a language model, each behind an optimizer of its own; a run brings the damping."""

from functools import partial

from adiv_optim.corrections import Proportional
from adiv_optim.gauge import NetworkGauge

from .images import BATCH_IDEAL, BY_MEAN, HELD, SCALED, SOLVED, WHITE, WHITE_16
from .method import Method, Search

#: Of the language model, as its searches begin: learning rates and dampings.
_RATES, _DAMPINGS = (1e-3, 3e-3, 1e-2, 3e-2), (0.3, 1.0, 3.0)
#: Of MAC, whose mean direction has one eigenvalue of d times the mean: a damping of 3 is hardly one.
_MAC_DAMPINGS = (1.0, 10.0, 100.0)

LANGUAGE: dict[str, Method] = {
    "adamw": Method("AdamW", "tab:blue", optimizer="adamw", studies="norm-free",
        searches=(Search("char-lm", ("layernorm", "rmsnorm", "dyt", "none"), _RATES),
        Search("char-lm-wrappers", ("layernorm", "none"), _RATES[:3]),
        Search("char-lm-wrappers", ("dyt",), (3e-4, *_RATES[:3])),
        Search("char-lm-wrappers", ("affine-like",), _RATES))),
    "muon": Method("Muon", "tab:orange", optimizer="muon", studies="norm-free",
        searches=(Search("char-lm", ("layernorm", "rmsnorm", "dyt", "none"), _RATES),
        Search("char-lm-2000", ("layernorm",), _RATES[1:3], (3.0,)))),
    "batch-ideal-adamw": Method("batch-ideal, AdamW", "black", correction=BATCH_IDEAL, optimizer="adamw",
        searches=(Search("char-lm", ("layernorm",), _RATES, _DAMPINGS),)),
    "whitened-adamw": Method("whitened AdamW", "indigo", by_inputs=WHITE, optimizer="adamw", studies="norm-free-others",
        searches=(Search("char-lm", ("layernorm",), _RATES, _DAMPINGS, ((3e-3, 0.1), (1e-2, 0.1))),
        Search("char-lm", ("none",), (3e-3,), (0.3, 1.0), ((1e-2, 1.0),)))),
    "whitened-muon": Method("whitened Muon", "tab:purple", by_inputs=WHITE, optimizer="muon",
        studies="norm-free-others", searches=(Search("char-lm", ("layernorm",), _RATES, _DAMPINGS, ((1e-2, 10.0),)),
        Search("char-lm", ("none",), (1e-2,), _DAMPINGS))),
    "whitened-adamw-16": Method("whitened AdamW, rank 16", "magenta", by_inputs=WHITE_16, optimizer="adamw",
        studies="norm-free-others", searches=(Search("char-lm", ("layernorm",), _RATES[1:3], _DAMPINGS),
        Search("char-lm", ("none",), _RATES[:3], (0.3, 1.0)))),
    "whitened-muon-16": Method("whitened Muon, rank 16", "tab:pink", by_inputs=WHITE_16, optimizer="muon",
        studies="norm-free-others", searches=(Search("char-lm", ("layernorm",), _RATES[1:], _DAMPINGS, ((1e-2, 10.0),)),
        Search("char-lm", ("none", "rmsnorm", "dyt"), _RATES[1:3], (1.0, 3.0)),
        Search("char-lm-2000", ("layernorm",), _RATES[1:3], (3.0,)))),
    **{
        f"whitened-{name.lower()}-{rows}-rows": Method(
            f"whitened {name}, {rows} rows", color, by_inputs=partial(WHITE, max_rows=rows), optimizer=name.lower()
        )
        for name, rows, color in (
            ("AdamW", 64, "slateblue"),
            ("AdamW", 256, "navy"),
            ("Muon", 64, "plum"),
            ("Muon", 256, "orchid"),
        )
    },
    "mac-adamw": Method("MAC, AdamW", "peru", by_inputs=BY_MEAN, optimizer="adamw",
        searches=(Search("char-lm", ("layernorm",), _RATES[:3], _MAC_DAMPINGS),)),
    "mac-muon": Method("MAC, Muon", "sienna", by_inputs=BY_MEAN, optimizer="muon",
        searches=(Search("char-lm", ("layernorm",), _RATES[:3], _MAC_DAMPINGS),)),
    "sgd": Method("SGD, momentum 0.9", "tab:gray", optimizer="sgd",
        searches=(Search("char-lm", ("layernorm",), (0.03, 0.1, 0.3, 1.0)),)),
    "whitened-sgd": Method("whitened SGD, momentum 0.9", "tab:olive", by_inputs=WHITE, optimizer="sgd",
        searches=(Search("char-lm", ("layernorm",), (0.03, 0.1, 0.3, 1.0), (1.0, 3.0)),)),
    "schedulefree": Method("schedule-free AdamW", "tab:green", optimizer="schedulefree",
        searches=(Search("char-lm", ("layernorm", "none"), _RATES),)),
    "soap": Method("SOAP", "tab:brown", optimizer="soap", studies="norm-free-others",
        searches=(Search("char-lm", ("layernorm", "none"), _RATES),)),
    "whitened-soap": Method("whitened SOAP", "#637939", by_inputs=WHITE, optimizer="soap",
        searches=(Search("char-lm", ("layernorm", "none"), _RATES[1:3], _DAMPINGS),)),
    "proportional-adamw": Method("proportional, AdamW", "tab:cyan", correction=Proportional(), optimizer="adamw",
        searches=(Search("char-lm-wrappers", ("layernorm", "none"), _RATES[:3]),
        Search("char-lm-wrappers", ("dyt",), (3e-4, *_RATES[:3])))),
    "input-scaled-adamw": Method("input-scaled AdamW", "#c5b0d5", by_inputs=SCALED, optimizer="adamw",
        studies="norm-free"),
    "input-held-adamw": Method("input-scaled AdamW, held", "#9467bd", by_inputs=HELD, optimizer="adamw",
        studies="norm-free"),
    "input-scaled-muon": Method("input-scaled Muon", "#ff9896", by_inputs=SCALED, optimizer="muon",
        studies="norm-free"),
    "input-held-muon": Method("input-scaled Muon, held", "#d62728", by_inputs=HELD, optimizer="muon",
        studies="norm-free"),
    "input-scaled-soap": Method("input-scaled SOAP", "#8c6d31", by_inputs=SCALED, optimizer="soap",
        studies="norm-free-scaled"),
    "input-scaled-normuon": Method("input-scaled NorMuon", "#ce6dbd", by_inputs=SCALED, optimizer="normuon",
        studies="norm-free-scaled"),
    "preconditioned-adamw": Method("DoPr (preconditioned AdamW)", "#17becf", by_inputs=SOLVED, optimizer="adamw",
        studies="norm-free-others"),
    "preconditioned-muon": Method("Newton-Muon (preconditioned Muon)", "#9edae5", by_inputs=SOLVED, optimizer="muon",
        studies="norm-free-others"),
    "normuon": Method("NorMuon", "#e377c2", optimizer="normuon", studies="norm-free-others"),
    "kron": Method("Kron (PSGD)", "#f7b6d2", optimizer="kron", studies="norm-free-others"),
    "mars": Method("MARS", "#c49c94", optimizer="mars", studies="norm-free-others"),
    "kfac": Method("K-FAC (singd)", "#bcbd22", optimizer="kfac", studies="norm-free-others"),
    "unit-consistent-adamw": Method("unit-consistent AdamW", "crimson", gauge=NetworkGauge(), optimizer="adamw",
        searches=(Search("char-lm-wrappers", ("layernorm", "none", "dyt"), _RATES),)),
}  # fmt: skip
