"""What pages say of results, with places for the numbers, and where these are to be read."""

from statistics import fmean

from benchmarks.digests import verdicts

from . import quotes_fields as fields
from .measured import (
    BATCHNORM,
    IDEAL,
    NONE,
    STORES,
    WHITE,
    above_held,
    at_32,
    cnn_price,
    free,
    freed,
    ideal_steps,
    interval,
    lead,
    longer,
    measurements,
    mlp,
    muons_step,
    other_pairs,
    p,
    ranked_at_length,
    speed,
    trials,
    tuned_cnn,
    unnormalised,
    whitened_steps,
)

#: What the README says holds after Holm's correction, and what alone; beginnings of claims.
SURVIVE = (
    *(f"… `Whitened` {name} without a normaliser is ahead of {name}" for name in ("Adam", "Muon", "SOAP")),
    *(f"Poisson's equation after 60 seconds: `Whitened` SOAP has less than half the error of {name}"
      for name in ("Muon", "Adam")),
    "`BatchIdeal` with SGD leads the tuned tanh MLP after 15 epochs",
    "… and plain SGD after 40",
    "`Whitened(rank=16)` AdamW without normalisers is ahead of AdamW with LayerNorm",
    "`Whitened` AdamW is ahead of AdamW with LayerNorm",
    "… of rank 16, AdamW",
    "Norm-free by `InputScaled(hold=True)` with Muon: level with LayerNorm after 400 steps",
)  # fmt: skip
ALONE = "… and without normalisers ahead of Muon alone, after 400"


def counted() -> list[int]:
    """Claims of this library: all, those that hold, those that do so after Holm's correction, do not, undecided."""
    own = [(found.holds, q) for source, _, found, q in verdicts.judged(STORES) if "This library" in source]
    verdict = [holds for holds, _ in own]
    after = sum(holds is True and q is not None and q < 0.05 for holds, q in own)
    return [len(own), verdict.count(True), after, verdict.count(False), verdict.count(None)]


def structural() -> list[str]:
    """How many of the paper's claims of structural forms with tanh are decided, and hold, none after Holm."""
    own = [(found.holds, q) for source, claim, found, q in verdicts.judged(STORES) if "Bird" in source
           and "tanh" in claim.text and any(part in claim.text for part in ("ffine-like", "tructural"))
           and found.holds is not None]  # fmt: skip
    held = [q for holds, q in own if holds]
    words = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    return [words[len(own)], words[len(held)]] if min(q for q in held if q is not None) > 0.05 else []


def after(start: str) -> float:
    """Holm's p of the claim that begins so, and holds."""
    (found,) = [q for _, claim, found, q in verdicts.judged(STORES) if found.holds and claim.text.startswith(start)]
    assert found is not None
    return found


def held_alone() -> list[float]:
    """Holm's p of what holds alone, if all else survives."""
    survive, alone = [after(start) for start in SURVIVE], after(ALONE)
    return [alone] if max(survive) < 0.05 <= alone else []


#: Page → what it says, with places for numbers, and what these are.
QUOTES = {
    "README.md": [
        ("Of {} [claims of this library](docs/verdicts.md) {} hold, {} after Holm's correction; {} do not, {} are "
         "undecided. Among the {} are gains of coordinate networks, Poisson's equation against Muon and Adam, "
         "`BatchIdeal` against plain SGD, `Whitened` AdamW with and without norms, and `InputScaled` level with "
         "LayerNorm; not `InputScaled` against Muon ({:.1f})", lambda: [
             *counted(), counted()[2], *held_alone()]),
        ("(95 % of the difference from {:+.1f} to {:+.1f}); with Muon it gains nothing", lambda: interval(
            tuned_cnn(WHITE), tuned_cnn(BATCHNORM))),
        ("after 2,000 steps is {:.3f} nats behind LayerNorm whose embeddings have a learning rate of their own; with "
         "such a rate as well {:.3f}, and with one LayerNorm, before the head, {:.3f} ahead (p = {:.2f}, {:.1f} after "
         "Holm)", lambda: [longer(embedding_lr=None)[1][0], longer()[1][0], *(
             lambda d, q: [-d, q, after("… and with a single LayerNorm, before the head")])(
                 *longer("head-layernorm")[1])]),
        *fields.FIELDS,
        ("from {:.1f} to {:.1f} % (five seeds, p < 0.001; {} trials), where BatchNorm reaches {:.1f} % ({} trials) and "
         "MAC {:.1f} %. Muon reaches {:.1f} %", lambda: [
             *(fmean(tuned_cnn(m)) for m in (NONE, WHITE) if p(tuned_cnn(NONE), tuned_cnn(WHITE)) < 0.001),
             trials(WHITE), fmean(tuned_cnn(BATCHNORM)), trials(BATCHNORM), *(
                 fmean(tuned_cnn(*pair)) for pair in (("mac",), (NONE, "muon")))]),
        ("DyT with SGD too close to tell (p = {:.2f})", lambda: lead(
            "mlp-tuned", IDEAL, "dyt", optimizer="sgd", activation="tanh")[1:]),
        ("it ends {:.1f} points below affine-like layers after 100", at_32),
        ("after 15 epochs {:.1f} % ({} trials); the best of "
         "[{} pairs of another method and an optimizer](docs/results/mlp.md#every-method-with-every-optimizer) has "
         "{:.1f} % (DyT with SGD, {} trials, p = {:.2f}), tuned SGD {:.1f} % | {:.1f} times", lambda: [
             fmean(mlp(IDEAL, "sgd")), trials(IDEAL, "sgd", "mlp-tuned", activation="tanh"), other_pairs(),
             fmean(mlp("dyt", "sgd")), trials("dyt", "sgd", "mlp-tuned", activation="tanh"), lead(
                 "mlp-tuned", IDEAL, "dyt", optimizer="sgd", activation="tanh")[1],
             fmean(mlp(NONE, "sgd")), ideal_steps()[0]]),
        ("| [{:.0f} to {:.0f} dB](docs/results/fields.md#coordinate-networks)", fields.PAGE[1][1]),
        ("| {:.1f} times that with Adam, BatchNorm {:.1f}; with 512 pixels {:.1f} |", lambda: [*(
            speed("coordinates", own)[0] for own in ("whitened Adam", "BatchNorm, Adam")), fields.in_batches()]),
        ("| about [{:.1f} times](docs/results/convolutions.md) |", lambda: [cnn_price(WHITE)]),
        ("| [{:.2f} times](docs/results/costs.md#whitened)",
         lambda: speed("whitened", "AdamW, batch 16, every 10, rank 16")[:1]),
        ("after 400 steps a test loss {:.2f} nats below AdamW's (p < 0.001), {:.2f} above Muon's | {:.2f} times, Muon "
         "{:.1f} |",
         lambda: [*(sign * d for sign, (d, q) in zip((-1, 1), (
             free("whitened-adamw-16", twin, "layernorm", None)[1] for twin in ("adamw", "muon")), strict=True)
             if q < 0.001), speed("whitened", "AdamW, batch 16, every 10, rank 16")[0], muons_step()]),
        ("`Whitened` gains {:.3f} nats (p < 0.001), with `rank=16` {:.3f} (p = {:.2f}) | {:.2f} times; with `rank=16` "
         "{:.2f} |", lambda: [*(-d for d, q in [free("whitened-muon", "muon", "layernorm", None)[1]] if q < 0.001), *(
             lambda d, q: [-d, q])(*free("whitened-muon-16", "muon", "layernorm", None)[1]), *(
                 whitened_steps(16, each)[1] for each in ("", ", rank 16"))]),
        ("after 400 steps {:.2f} nats below AdamW with LayerNorm (p < 0.001), {:.2f} below AdamW with these "
         "embeddings; Muon alone is {:.2f} better still",
         lambda: [-d for d, q in [free("whitened-adamw-16", "adamw")[1]] if q < 0.001] + [
             unnormalised(1.0, own) - unnormalised(drawn, other) for own, drawn, other in (
                 ("adamw", 1.0, "whitened-adamw-16"), ("whitened-adamw-16", 1.0, "muon"))]),
        ("({:+.3f} nats, 95 % from {:+.3f} to {:+.3f}): {:.3f} less than Muon with these embeddings (p = {:.3f}), "
         "{:.2f} less than with GPT-2's; behind after 2,000 | {:.2f} times |",
         lambda: [free("input-held-muon", "muon")[1][0], *interval(*freed("input-held-muon", "muon")), *above_held(
             "muon"), unnormalised(None) - unnormalised(1.0, "input-held-muon"),
                  speed("input-scaled", "Muon, batch 16, held")[0]]),
        ("`InputScaled` takes {:.3f} nats off Muon without LayerNorm", lambda: above_held("muon")[:1]),
        ("[{:.1f} to {:.1f} times](docs/results/costs.md#unitconsistent) the optimizer's with 10 M parameters, {:.1f} "
         "to {:.1f} with 0.3 M", lambda: [*speed("unit-consistent", "10.2 M"), *speed("unit-consistent", "0.3 M")]),
        ("of its {} claims of structural forms with tanh {} hold, none of them after Holm's correction", structural),
    ],
    "docs/results/mlp.md": [
        ("DyT with SGD is {:.1f} points below (p = {:.2f})", lambda: lead(
            "mlp-tuned", IDEAL, "dyt", optimizer="sgd", activation="tanh")),
        ("(Spearman's ρ {:+.2f}, p = {:.4f}); with leaky ReLU they do not (ρ {:+.2f}, p = {:.2f})", lambda: [
            *ranked_at_length("tanh"), *ranked_at_length("leaky-relu")]),
        ("at batch 32 with tanh it ends {:.1f} points below affine-like layers", at_32),
    ],
    "docs/results/convolutions.md": [
        ("{:.1f} points over no normaliser (p < 0.001), {:.1f} below `Whitened` (p = {:.2f})", lambda: [*(
            gain for gain, p in [lead("cnn-pool-tuned", "mac", NONE, optimizer="adam")] if p < 0.001), *lead(
                "cnn-pool-tuned", "whitened", "mac", optimizer="adam")]),
    ],
    "docs/results/unit-consistency.md": [
        ("it is {:.1f} points behind BatchNorm** (p < 0.001)", lambda: [-gain for gain, p in [
            lead("uc-long", "uc-network", "batchnorm")] if p < 0.001]),
    ],
    "docs/results/costs.md": [
        ("cost {:.0f} to {:.0f} times a training step", lambda: [round(t, -1) if t > 100 else t for t in speed("layers",
         "jacobian.backward")]),
        ("one measurement of `divergence` {:.1f} to {:.1f} training steps", measurements),
        ("a step costs {:.2f} to {:.2f}× at 1,024 rows", lambda: speed("input-scaled", "batch 16")),
        ("A step of `UnitConsistent` costs {:.1f} to {:.1f} times that of foreach AdamW",
         lambda: speed("unit-consistent", "memory fresh")),
        ("step, and {:.1f} to {:.1f} times where the allocator keeps it; {:.1f} to {:.1f} times with 0.3 M",
         lambda: [*speed("unit-consistent", "memory kept"), *speed("unit-consistent", "0.3 M")]),
        ("Memory is {:.1f} times the optimizer's", lambda: [speed("unit-consistent", "10.2 M", of="memory_ratio")[0]]),
    ],
    "docs/results/language-model.md": [
        ("`Whitened` takes {:.2f} nats off AdamW and {:.3f} off Muon", lambda: [
            -free(f"whitened-{m}", m, "layernorm", None)[1][0] for m in ("adamw", "muon")]),
        ("`InputScaled(hold=True)` takes {:.3f} nats off Muon", lambda: above_held("muon")[:1]),
        ("Muon to within {:.3f} nats of Muon with LayerNorm (p = {:.3f})", lambda: free("muon", "muon")[1]),
        ("the test loss of its LayerNorm counterpart** with Muon (95 % of the difference from {:+.3f} to {:+.3f})",
         lambda: interval(*freed("input-held-muon", "muon"))),
        ("SOAP ends {:.3f} above it (p = {:.2f})", lambda: above_held("soap")),
        ("After 2,000 steps it is {:.3f} nats above LayerNorm, with a learning rate of their own for the embeddings of "
         "both {:.3f}, and with one LayerNorm, before the head, {:.3f} below", lambda: [
             longer(embedding_lr=None)[1][0], longer()[1][0], -longer("head-layernorm")[1][0]]),
    ],
    "docs/coordinates/unit-consistent.md": [
        ("costs {:.1f} to {:.1f} times", lambda: speed("unit-consistent", "10.2 M"))],
    "docs/results/fields.md": fields.PAGE,
    "docs/layers/affine-like.md": [
        ("costs {:.0f} and {:.0f} % more", lambda: [100 * t - 100 for t in speed("structural", "AffineLikeLinear",
         "compiled")])],
}  # fmt: skip
