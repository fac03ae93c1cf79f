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
    in_paper_order,
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
    wide,
)

#: What the first paragraphs of several pages say of networks without normalisers.
LEAD = (
    "the test loss of its LayerNorm counterpart (95 % of the difference from {:+.3f} to {:+.3f}). After 2,000 it is "
    "{:.3f} nats above LayerNorm whose embeddings have a learning rate of their own; with such a rate as well {:.3f}, "
    "and with one LayerNorm, before the head, {:.3f} below",
    lambda: [
        *interval(*freed("input-held-muon", "muon")),
        longer(embedding_lr=None)[1][0],
        longer()[1][0],
        -longer("head-layernorm")[1][0],
    ],
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
        ("after 15 DyT with SGD is {:.1f} points below (p = {:.2f})", lambda: lead(
            "mlp-tuned", IDEAL, "dyt", optimizer="sgd", activation="tanh")),
        ("(Spearman's ρ {:+.2f}, p = {:.4f})", lambda: in_paper_order("tanh")),
        ("is not** (−{:.2f}, p = {:.2f})", lambda: (lambda rank, q: (-rank, q))(*in_paper_order("leaky-relu"))),
        ("with the paper's means is {:+.2f} (p = {:.4f}) and {:+.2f} (p = {:.2f})", lambda: [
            *ranked_at_length("tanh"), *ranked_at_length("leaky-relu")]),
        ("after 100 epochs it ends {:.1f} points below affine-like layers", at_32),
        ("with SGD `Proportional` ends {:.1f} points below no normaliser, `Disproportional` {:.1f}", lambda: [
            lead("mlp-tuned", "none", rival, optimizer="sgd", activation="tanh")[0]
            for rival in ("proportional", "disproportional")]),
        ("affine-like layers end {:.1f} points below no normaliser, `Proportional` {:.1f} and `Disproportional` {:.1f}",
         lambda: [lead("mlp-one-row", "none", rival)[0]
                  for rival in ("affine-like", "proportional", "disproportional")]),
        ("end at {:.1f} % after 15 epochs (three seeds), {:.1f} points below `BatchIdeal` with SGD (p < 0.001)", wide),
        ("has {:.1f} % on held-out data, where theirs has {:.1f}", lambda: [max(
            r["score"] for r in STORES["mlp-wide-tuned"].read("search") if r["settings"]["method"] == m)
            for m in (NONE, "affine-like")]),
        ("BatchNorm leads there, {:.1f} points ahead of `BatchIdeal` (p < 0.001)", lambda: [ahead for ahead, p in [
            lead("cifar10-tuned", BATCHNORM, IDEAL, activation="leaky-relu", optimizer="adam")] if p < 0.001]),
        ("explicit √d, level with absorbed, is {:.1f} points ahead of LayerNorm", lambda: lead(
            "elementwise", "dyt-sqrt-d", "layernorm")[:1]),
    ],
    "docs/results/convolutions.md": [
        ("{:.1f} points over no normaliser (p < 0.001), {:.1f} below `Whitened` (p = {:.2f})", lambda: [*(
            gain for gain, p in [lead("cnn-pool-tuned", "mac", NONE, optimizer="adam")] if p < 0.001), *lead(
                "cnn-pool-tuned", "whitened", "mac", optimizer="adam")]),
        ("and above LayerNorm (p = {:.2f})", lambda: [q for d, q in [lead("cnn", WHITE, "layernorm")] if d > 0]),
        ("Whitening gains {:.1f} points with SOAP** (p < 0.001)", lambda: [gain for gain, p in [
            lead("cnn-pool-tuned", "whitened", "none", optimizer="soap")] if p < 0.001]),
    ],
    "docs/results/unit-consistency.md": [
        ("it is {:.1f} points behind BatchNorm** (p < 0.001)", lambda: [-gain for gain, p in [
            lead("uc-long", "uc-network", "batchnorm")] if p < 0.001]),
    ],
    "docs/results/costs.md": [
        ("in a plain loop, takes {:.1f} and {:.1f} times as long", ideal_steps),
        ("cost {:.0f} % on a large layer", lambda: [100 * speed("layers",
         "Linear (512, 1024, 1024), Disproportional")[1] - 100]),
        ("shows: {:.0f} to {:.0f} % there", lambda: [
            100 * speed("layers", "Linear (128, 512, 512), P")[0] - 100, 100 * speed("layers",
                "Linear (32, 3072, 32)")[1] - 100]),
        ("slower with fewer: {:.2f} times with 128 rows, {:.2f} with 32", lambda: [speed("batch-ideal", f"({rows}, ")[0]
            for rows in (128, 32)]),
        ("one measurement costs {:.1f} to {:.1f} training steps, and {:.1f} with affine-like layers", measurements),
        ("costs {:.1f} to {:.1f} times a linear layer", lambda: speed("layers", "Linear", "BatchIdeal")),
        ("and {:.1f} to {:.1f} times a convolution", lambda: speed("layers", "Conv2d", "BatchIdeal")),
        ("cost {:.0f} to {:.0f} times a training step", lambda: [round(t, -1) if t > 100 else t for t in speed("layers",
         "jacobian.backward")]),
        ("{:.1f} GB per row", lambda: [1024 * (1024 * 1024 + 1024) * 4 / 1e9]),
        ("rank 16 costs {:.2f}× (AdamW) and {:.2f}× (Muon)**; without a rank {:.2f}× and {:.2f}×",
         lambda: whitened_steps(16, ", rank 16", "")),
        ("and {:.2f}× and {:.2f}× if 256 of the rows count", lambda: whitened_steps(16, ", 256 rows")),
        ("it costs {:.2f}× and {:.2f}×**, and rank 16 costs {:.2f}× and {:.2f}×",
         lambda: whitened_steps(128, "", ", rank 16")),
        ("With 256 rows all of it costs {:.2f}× and {:.2f}×", lambda: whitened_steps(128, ", 256 rows")),
        ("step costs {:.2f} to {:.2f}× at 1,024 rows**", lambda: speed("input-scaled", "batch 16")),
        ("{:.3f}× with AdamW, {:.3f}× with `hold` too, and {:.3f}× with Muon", lambda: [
            *speed("input-scaled", "AdamW, batch 16"), speed("input-scaled", "Muon, batch 16")[0]]),
        ("quartiles can tell: {:.2f} to {:.2f}×", lambda: speed("input-scaled", "batch 128")),
        ("A step costs {:.1f} to {:.1f} times that of foreach AdamW", lambda: speed("unit-consistent", "memory fresh")),
        ("step, and {:.1f} to {:.1f} times where the allocator keeps it",
         lambda: speed("unit-consistent", "memory kept")),
        ("Memory is {:.1f} times the optimizer's", lambda: [speed("unit-consistent", "10.2 M", of="memory_ratio")[0]]),
        ("Python: {:.1f} to {:.1f} times with 0.3 M", lambda: speed("unit-consistent", "0.3 M")),
        ("costs {:.0f} and {:.0f} % more than RMSNorm", lambda: [100 * t - 100 for t in speed("structural",
         "AffineLikeLinear", "compiled")]),
        ("between {:.2f} and {:.2f} times a convolution and BatchNorm", lambda: speed("structural", "PatchNorm",
         "compiled")),
        ("{:.1f} times as fast for the plain network and {:.1f} times with a correction; on "
         "tensors already in memory {:.1f} and {:.1f} times",
         lambda: [speed("trainer", source, m)[0] for source in ("image files", "in memory") for m in (NONE,
             "proportional")]),
    ],
    "docs/results/language-model.md": [
        LEAD,
        ("is level on validation and {:.3f} above on test (p = {:.3f})", lambda: [n for (_, q), test in [free(
            "muon", "muon")] for n in test if q > 0.05]),
        ("SOAP ends {:.3f} above it (p = {:.2f}), Muon alone {:.3f} (p = {:.3f})", lambda: [
            *above_held("soap"), *above_held("muon")]),
        ("takes {:.2f} nats off AdamW and {:.3f} off Muon", lambda: [
            -free(f"whitened-{m}", m, "layernorm", None)[1][0] for m in ("adamw", "muon")]),
        ("is {:.3f} behind its LayerNorm counterpart on validation (p = {:.2f}) and {:.3f} on test (p = {:.3f})",
         lambda: [x for pair in longer() for x in pair]),
        ("ends {:.3f} below its LayerNorm counterpart on validation (p = {:.3f}) and {:.3f} below on test (p = {:.3f})",
         lambda: [x for d, q in longer("head-layernorm") for x in (-d, q)]),
    ],
    "docs/coordinates/whitened.md": [
        ("rank 16 costs {:.2f}× (AdamW) and {:.2f}× (Muon)", lambda: whitened_steps(16, ", rank 16"))],
    "docs/coordinates/unit-consistent.md": [
        ("costs {:.1f} to {:.1f} times", lambda: speed("unit-consistent", "10.2 M"))],
    "docs/index.md": [
        ("gives {:.0f} to {:.0f} dB to a ReLU network", fields.PAGE[1][1]),
        ("ends {:.2f} nats below AdamW with it", lambda: [-free("whitened-adamw-16", "adamw")[1][0]]),
    ],
    "docs/results/index.md": [
        *fields.INDEX,
        ("without norms `InputScaled` takes {:.3f} nats off Muon", lambda: above_held("muon")[:1]),
    ],
    "docs/results/fields.md": fields.PAGE,
    "docs/layers/affine-like.md": [
        ("costs {:.0f} and {:.0f} % more", lambda: [100 * t - 100 for t in speed("structural", "AffineLikeLinear",
         "compiled")])],
}  # fmt: skip
