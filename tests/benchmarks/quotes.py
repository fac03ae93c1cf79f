"""What pages say of results, with places for the numbers, and where these are to be read."""

import math
from statistics import fmean

from benchmarks.digests import verdicts
from benchmarks.digests.judges import reached
from benchmarks.studies import table1
from benchmarks.studies.table1 import PAPER, SIZES

from . import quotes_fields as fields
from .measured import (
    AFFINE,
    BATCHNORM,
    IDEAL,
    NONE,
    STORES,
    WHITE,
    above_plain,
    acc,
    ahead,
    at_32,
    at_all_sizes,
    at_length,
    below,
    below_none,
    best_at_length,
    best_epoch,
    beta,
    cnn,
    cnn_price,
    cosine,
    departed,
    followed,
    gains,
    gap,
    ideal_steps,
    in_paper_order,
    lead,
    long,
    losses_of,
    mlp,
    other_pairs,
    over_all_sizes,
    over_gauges,
    p,
    ranked,
    ranked_at_length,
    rate,
    results,
    seeds,
    speed,
    swept,
    trials_of,
    tuned,
    tuned_cnn,
    whitened_steps,
    widths,
)
from .measured_language import costs_adamw, faster, free, longer, one_norm, unnormalised
from .quotes_language import LANGUAGE_MODEL, LEAD

UC_OPTIMIZERS = ("sgd", "momentum", "adam")
#: Page → what it says, with places for numbers, and what these are.
QUOTES = {
    "README.md": [
        LEAD,
        ("Of {} [claims of this library](docs/verdicts.md) that hold, {} hold after Holm's", lambda: (
            lambda own: [len(own), sum(p is not None and p < 0.05 for p in own)])(
            [q for source, _, found, q in verdicts.judged(STORES) if found.holds and "This library" in source])),
        *fields.FIELDS,
        ("from {:.1f} to {:.1f} % (five seeds, p < 0.001), where BatchNorm reaches {:.1f} %. Muon reaches {:.1f} %",
         lambda: [*(fmean(tuned_cnn(m)) for m in (NONE, WHITE, BATCHNORM)
                                if p(tuned_cnn(NONE), tuned_cnn(WHITE)) < 0.001), fmean(tuned_cnn(NONE, "muon"))]),
        ("after 100 epochs it ends {:.1f} points below affine-like layers", lambda: at_32("tanh")[:1]),
        ("after 15 epochs {:.1f} %; the best of "
         "[{} other pairs of method and optimizer](docs/results/mlp.md#every-method-with-every-optimizer) has "
         "{:.1f} % (affine-like layers with Muon, p = {:.3f}), tuned SGD {:.1f} % | {:.1f} times", lambda: [
             fmean(mlp(IDEAL, "sgd")), other_pairs(), fmean(mlp(AFFINE, "muon")),
             p(mlp(IDEAL, "sgd"), mlp(AFFINE, "muon")),
             fmean(mlp(NONE, "sgd")), ideal_steps()[0]]),
        ("| [{:.0f} to {:.0f} dB](docs/results/fields.md#coordinate-networks)", fields.PAGE[1][1]),
        ("| {:.1f} times that with Adam, BatchNorm {:.1f} |", lambda: [
            speed("coordinates", own)[0] for own in ("whitened Adam", "BatchNorm, Adam")]),
        ("| [{:.1f} times](docs/results/convolutions.md) at most |", lambda: [cnn_price(WHITE)]),
        ("| [{:.2f} times](docs/results/costs.md#whitened)",
         lambda: speed("whitened", "AdamW, batch 16, every 10, rank 16")[:1]),
        ("after 400 steps a test loss {:.2f} nats below AdamW's (p = {:.3f}), {:.2f} above Muon's | {:.2f} times |",
         lambda: (lambda a, above: [-a[0], a[1], above[0], speed("whitened", "AdamW, batch 16, every 10, rank 16")[0]])(
             *(free("whitened-adamw-16", twin, "layernorm", None)[1] for twin in ("adamw", "muon")))),
        ("gains {:.3f} nats with a transformer (p = {:.2f})",
         lambda: (lambda d, q: [-d, q])(*free("whitened-muon-16", "muon", "layernorm", None)[1])),
        ("after 400 steps {:.2f} nats below AdamW with LayerNorm (p < 0.001), {:.2f} below AdamW with these embeddings",
         lambda: [-d for d, q in [free("whitened-adamw-16", "adamw")[1]] if q < 0.001] + [
             unnormalised(1.0, "adamw") - unnormalised(1.0, "whitened-adamw-16")]),
        ("(p = {:.2f}): {:.2f} nats less than Muon with these embeddings, {:.2f} less than with GPT-2's; {:.2f} more "
         "than LayerNorm after 2,000 | {:.2f} times |",
         lambda: [free("input-held-muon", "muon")[1][1], *(unnormalised(drawn) - unnormalised(1.0, "input-held-muon")
                  for drawn in (1.0, None)), longer(best_twin=True)[1][0],
                  speed("input-scaled", "Muon, batch 16, held")[0]]),
        ("[{:.1f} to {:.1f} times](docs/results/costs.md#unitconsistent) the optimizer's",
         lambda: speed("unit-consistent", "10.2 M")),
    ],
    "docs/results/mlp.md": [
        ("(Spearman's ρ {:+.2f}, p = {:.4f})", lambda: in_paper_order("tanh")),
        ("is not** (−{:.2f}, p = {:.2f})", lambda: (lambda rank, q: (-rank, q))(*in_paper_order("leaky-relu"))),
        ("BatchNorm leads**, by {:.1f} to {:.1f} points over `BatchIdeal`", lambda: (
            lambda found: [min(found), max(found)])([
                lead("table1-reduced", {"method": BATCHNORM}, {"method": IDEAL}, activation="leaky-relu", batch_size=n)
                for n in SIZES])),
        ("gives affine-like layers {:.1f} % with tanh; here they reach {:.1f}", lambda: [
            PAPER[AFFINE, "tanh"][0] + PAPER[AFFINE, "tanh"][2] * (128 - fmean(SIZES)),
            fmean(at_length(AFFINE)[-1])]),
        ("with the paper's means is {:+.2f} (p = {:.4f}) and {:+.2f} (p = {:.2f})", lambda: [
            *ranked_at_length("tanh"), *ranked_at_length("leaky-relu")]),
        ("ends {:.1f} and {:.1f} points above the paper's figures", lambda: [
            -over_all_sizes(BATCHNORM, a)[1] for a in ("tanh", "leaky-relu")]),
        ("ρ is {:+.2f} there (p = {:.2f})", lambda: ranked_at_length("leaky-relu", without=BATCHNORM)),
        ("No other method is more than {:.1f} points above the paper's", lambda: [max(
            -over_all_sizes(m, a)[1] for m, a in PAPER if m != BATCHNORM)]),
        ("`Proportional` ends {:.1f} points below no normaliser with tanh (p = {:.2f}) and {:.1f} below with "
         "leaky ReLU (p < 0.001). `Disproportional` ends below it, and with leaky ReLU at {:.1f} %", lambda: [
            *below_none("proportional", "tanh"),
            *(d for d, q in [below_none("proportional", "leaky-relu")] if q < 0.001),
            fmean(at_all_sizes("disproportional", "leaky-relu"))]),
        ("end {:.1f} points above BatchNorm (p = {:.2f})", lambda: (lambda own, other: [
            fmean(own) - fmean(other), p(own, other)])(*(at_length(m)[-1] for m in (AFFINE, BATCHNORM)))),
        ("highest after {} epochs, {:.2f} %, and that of the plain network after {}, {:.2f} %. After 100 its training "
         "loss is {:.2f}, against {:.2f}, and its accuracy {:.1f} points below",
         lambda: [*best_at_length(IDEAL), *best_at_length(NONE), *(fmean(at_length(m, of="train_loss")[-1]) for m in (
             IDEAL, NONE)), fmean(at_length(NONE)[-1]) - fmean(at_length(IDEAL)[-1])]),
        ("{:.1f} points more after 20 epochs (p = {:.3f}). After 100 it is {:.1f} (p = {:.2f})",
         lambda: [*departed("centred"), *departed("centred", file="departures-long")]),
        ("lose {:.1f} points after 20 epochs (p = {:.2f}) and {:.1f} after 100 (p = {:.2f})",
         lambda: [x for file in ("departures", "departures-long") for d, q in [departed("jpeg", file=file)]
                  for x in (-d, q)]),
        ("{:.1f} points at most. Without biases they lose {:.1f} (p = {:.2f}). The plain network loses {:.1f} to "
         "{:.1f} points",
         lambda: [max(abs(departed(d)[0]) for d in ("xavier", "he", "zero-bias")), -departed("no-bias")[0],
                          departed("no-bias")[1], *sorted(-departed(d, NONE)[0] for d in ("xavier", "he"))]),
        ("in place of the last gives {:.1f} points", lambda: [best_epoch()]),
        ("Along the {} runs of CIFAR-10 with tuned settings, one seed each, the rank correlation of the cosine with "
         "the accuracy is {:.2f} (p = {:.2f})", lambda: [len(results("mechanism")), *ranked("cosine")]),
        ("without its four runs it is {:+.2f} (p = {:.2f})", lambda: ranked("cosine", without=IDEAL)),
        ("goes with a higher accuracy ({:+.2f}, p = {:.2f}), and without `BatchIdeal` hardly ({:+.2f}, p = {:.2f})",
         lambda: [*ranked("gain_spread"), *ranked("gain_spread", without=IDEAL)]),
        ("after 100 epochs it ends {:.1f} points below affine-like layers", lambda: at_32("tanh")[:1]),
        ("one point above affine-like layers, within errors (p = {:.2f})", lambda: [p(
            *(seeds("cifar10", method=m, activation="tanh") for m in (IDEAL, AFFINE)))]),
        ("it ends {:.1f} points below affine-like layers with tanh (p < 0.001) and {:.1f} below with leaky ReLU (p < "
         "0.001). Its accuracy falls as the batch grows, by {:.1f} points per hundred",
         lambda: [below for a in ("tanh", "leaky-relu") for below, q in [at_32(a)] if q < 0.001] + [
             -100 * table1.line(table1.series(results("table1"))[IDEAL, "tanh"]).slope]),
        ("layers are {:.1f} points better with Muon than with Adam (p < 0.001), {:.1f} below `BatchIdeal`",
         lambda: (lambda muon, adam, ideal: [x for x in (fmean(muon) - fmean(adam), fmean(ideal) - fmean(muon))
                                             if p(muon, adam) < 0.001])(
             mlp(AFFINE, "muon"), mlp(AFFINE, "adam"), mlp(IDEAL, "sgd"))),
        ("with {:.1f} % with SGD and {:.1f} % with momentum. The best of the others is affine-like layers with Muon, "
         "{:.1f} % (p = {:.3f}): the lead is {:.1f} points, where at equal optimizers it is {:.1f} with SGD and {:.1f} "
         "with momentum",
         lambda: (lambda sgd, momentum, muon: [
             fmean(sgd), fmean(momentum), fmean(muon), p(sgd, muon), fmean(sgd) - fmean(muon),
             fmean(sgd) - fmean(mlp(AFFINE, "sgd")), fmean(momentum) - fmean(mlp(AFFINE, "momentum"))])(
             mlp(IDEAL, "sgd"), mlp(IDEAL, "momentum"), mlp(AFFINE, "muon"))),
        ("{:.1f} % against {:.1f} % without (p = {:.2f}). With Adam it gains {:.1f} points",
         lambda: [*(fmean(mlp(m, "muon")) for m in (IDEAL, NONE)), gains(IDEAL, "muon")[1], *gains(IDEAL, "adam")[0]]),
        ("BatchNorm is {:.1f} to {:.1f} points below no normaliser with every optimizer, LayerNorm {:.1f} to {:.1f}. "
         "RMSNorm is {:.1f} to {:.1f} below", lambda: [
             x for m in (BATCHNORM, "layernorm", "rmsnorm") for x in losses_of(m)]),
        ("gain {:.1f} to {:.1f} points with every optimizer** (p = {:.2f} or less). L2 norm gains {:.1f} with Muon and "
         "{:.1f} with Adam", lambda: [
             *(lambda found, q: [found[0], found[-1], q])(*gains(AFFINE)), *gains("l2norm", "muon")[0],
             *gains("l2norm", "adam")[0]]),
        ("with any optimizer, and is {:.1f} points below Muon alone with Muon", lambda: [-gains(WHITE, "muon")[0][0]]),
        ("`Proportional` loses {:.1f} to {:.1f} points", lambda: losses_of("proportional")),
        ("With Muon it loses {:.1f}", lambda: [-gains("input-scaled", "muon")[0][0]]),
        ("a cosine of {:.2f} at most", lambda: [max(followed(IDEAL, "cosine"))]),
        ("wins by {:.1f} to {:.1f} points at equal length.** Within 15 epochs it passes the "
         "paper's best mean over batch sizes, {:.2f} %",
         lambda: [long(IDEAL) - long(NONE), tuned(IDEAL) - tuned("l2norm", "adam"), PAPER[AFFINE, "tanh"][0]]),
        ("it passes {:.0f} %", lambda: [math.floor(long(IDEAL))]),
        ("{:.1f} against {:.1f} %. After 15 epochs they and L2 norm are {:.1f} points ahead",
         lambda: [long(AFFINE, "adam"), long(NONE), tuned(AFFINE, "adam") - tuned(NONE)]),
        ("gains little: {:.1f} %, against {:.1f} % with SGD and {:.1f} %", lambda: [tuned(IDEAL, "adam"),
         tuned(IDEAL), tuned(AFFINE, "adam")]),
        ("had been seen to end at {:.1f} %", lambda: [tuned(IDEAL, epochs=30)]),
        ("within {:.1f} points of its best at every learning rate from 0.3 to 3 and at every batch "
         "size, and within {:.1f} points at 0.1",
         lambda: [below(0.3, 1.0, 3.0), below(0.1)]),
        ("{:.1f} against {:.1f} at batch 8, {:.1f} against {:.1f} at 32 and {:.1f} against {:.1f} at 128",
         lambda: [rate(b, m) for b in (8, 32, 128) for m in (NONE, "batch-ideal-default")]),
        ("starts at a cosine of {:.2f} to {:.2f} and keeps {:.2f} to {:.2f}",
         lambda: [*cosine("batch-ideal, 0.001", "start"), *cosine("batch-ideal, 0.001", "trained")]),
        ("With 0.3 the cosine starts at {:.2f} to {:.2f} and falls to {:.2f} to {:.2f}, where the plain network has "
         "{:.2f} to {:.2f}", lambda: [*cosine("batch-ideal, 0.3", "start"), *cosine("batch-ideal, 0.3", "trained"),
                               *cosine("none", "trained")]),
        ("LayerNorm's {:.1f} %", lambda: [max(fmean(r["test_accuracy"][-1]) for r in results("digits-tuned"))]),
    ],
    "docs/results/costs.md": [
        ("in a plain loop, takes {:.1f} and {:.1f} times as long", ideal_steps),
        ("cost {:.0f} % on a large layer", lambda: [100 * speed("layers",
         "Linear (512, 1024, 1024), Disproportional")[1] - 100]),
        ("shows: {:.0f} to {:.0f} % there", lambda: [
            100 * speed("layers", "Linear (128, 512, 512), P")[0] - 100, 100 * speed("layers",
                "Linear (32, 3072, 32)")[1] - 100]),
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
    "docs/results/convolutions.md": [
        ("{:.2f} % with rank 16 (p = {:.2f}), {:.2f} % with all of the covariance, BatchNorm {:.2f} %. LayerNorm has "
         "{:.2f} %, no normaliser {:.2f} %",
         lambda: [fmean(tuned_cnn(WHITE)), p(tuned_cnn(WHITE), tuned_cnn(BATCHNORM)), *(
             fmean(tuned_cnn(m)) for m in ("whitened", BATCHNORM, "layernorm", NONE))]),
        ("At 10⁻³ whitening is {:.1f} points behind BatchNorm", lambda: [ahead(BATCHNORM, WHITE)[1]]),
        ("give it {:.1f} points more, and BatchNorm {:.1f}",
         lambda: [fmean(tuned_cnn(m)) - cnn(m, "cnn-pool") for m in (WHITE, BATCHNORM)]),
        ("They give {:.1f} to the network without normalisers: of the {:.1f} points that whitening gains over it "
         "at 10⁻³, {:.1f} are left (p < 0.001)", lambda: [
             fmean(tuned_cnn(NONE)) - cnn(NONE, "cnn-pool"), ahead(WHITE, NONE)[1],
             *(fmean(tuned_cnn(WHITE)) - fmean(tuned_cnn(NONE)) for q in [p(tuned_cnn(WHITE), tuned_cnn(NONE))]
               if q < 0.001)]),
        ("Whitening had {} and {} trials, for its damping, BatchNorm {}", lambda: [
            trials_of(m, o) for m, o in ((WHITE, "adam"), (WHITE, "muon"), (BATCHNORM, "adam"))]),
        ("{:.2f} % with rank 16, {:.2f} % without (p = {:.2f}). Muon alone brings the network without normalisers "
         "{:.1f} points above Adam's. BatchNorm leads with {:.2f} %, {:.1f} ahead of none (p = {:.3f})",
         lambda: (lambda w, n, b: [fmean(w), fmean(n), p(w, n), fmean(n) - fmean(tuned_cnn(NONE)), fmean(b),
                                   fmean(b) - fmean(n), p(b, n)])(*(tuned_cnn(m, "muon") for m in (WHITE, NONE,
                                                                                                 BATCHNORM)))),
        ("gains {:.1f} points over no normaliser without pooling**: {:.1f} behind BatchNorm, "
         "about its error (p = {:.2f}, n = {}), and {:.1f} ahead of LayerNorm",
         lambda: [ahead(WHITE, NONE)[0], ahead(BATCHNORM, WHITE)[0], p(seeds("cnn", method=WHITE), seeds("cnn",
             method=BATCHNORM)),
                  len(seeds("cnn", method=WHITE)), ahead(WHITE, "layernorm")[0]]),
        ("With pooling it gains {:.1f}: level with RMSNorm, {:.1f} behind LayerNorm and {:.1f} behind BatchNorm",
         lambda: [ahead(WHITE, NONE)[1], ahead("layernorm", WHITE)[1], ahead(BATCHNORM, WHITE)[1]]),
        ("gains {:.1f} and {:.1f}**, at about five", lambda: ahead(IDEAL, NONE)),
        ("is {:.1f} and {:.1f} points ahead of no normaliser and well", lambda: ahead("l2-patch", NONE)),
        ("affine-like form is {:.1f} and {:.1f} behind no normaliser", lambda: ahead(NONE, AFFINE)),
        ("it is {:.1f} and {:.1f} behind", lambda: ahead(NONE, "proportional")),
        ("{:.0f} % with pooling, {:.0f} ± {:.0f} % without", lambda: [
            cnn("disproportional", "cnn-pool"), cnn("disproportional"), (v := seeds("cnn",
                method="disproportional")) and
            (sum((x - fmean(v)) ** 2 for x in v) / 2 / 3) ** 0.5]),
    ],
    "docs/results/unit-consistency.md": [
        ("ends {:.1f}, {:.1f} and {:.1f} points below the plain SGD, momentum and Adam (three seeds each, p = {:.2f}, "
         "{:.2f}, {:.2f})",
         lambda: (lambda pairs: [*(fmean(a) - fmean(b) for a, b in pairs), *(p(*pair) for pair in pairs)])([
             [reached("uc-sweep", m, optimizer=o)(STORES) for m in (NONE, "uc-network")] for o in UC_OPTIMIZERS])),
        ("within {:.1f} points of itself with SGD, and within {:.1f} with Adam",
         lambda: [over_gauges("uc-network", o) for o in ("sgd", "adam")]),
        ("Adam by {:.1f} to {:.1f} points at every", lambda: above_plain("uc-network")),
        ("where SGD is {:.1f} points below its best", lambda: [swept(NONE, "sgd") - swept(NONE, "sgd", lr=0.1)]),
        ("{:.1f} % against {:.1f} % (p = {:.3f}, n = {})", lambda: [swept("uc-layer", "adam"), swept(NONE, "adam"), p(
            *(seeds("uc-sweep", method=m, optimizer="adam") for m in ("uc-layer", NONE))), len(seeds("uc-sweep",
                method="uc-layer", optimizer="adam"))]),
        ("{:.1f} % at best", lambda: [max(swept("uc-layer", o) for o in ("sgd", "momentum"))]),
        ("is {:.1f} points ahead of all of them", lambda: [swept(BATCHNORM, "sgd") - max(
            swept(m, o) for m in (NONE, "uc-network", "uc-layer") for o in ("sgd", "momentum", "adam"))]),
    ],
    "docs/results/isometry.md": [
        ("{:.2f} and {:.2f}, {:.3f} and {:.3f}", lambda: [gap(a, v) for a in ("sigmoid", "tanh") for v in ("layernorm",
         "mean-field")]),
        ("With ReLU it is {:.3f} against {:.4f}, with GELU {:.1f} against {:.3f}",
         lambda: [gap(a, v) for a in ("ReLU", "GELU") for v in ("mean-field", "layernorm")]),
        ("noise of about {:.2f}", lambda: [gap("GELU", "layernorm")]),
        ("the gap is {:.1f} and not {:.4f}", lambda: [gap("ReLU", v) for v in ("normalised-first", "layernorm")]),
        ("{:.3f} against {:.3f} there", lambda: [gap("tanh", v) for v in ("mean-field", "xavier")]),
        ("is {:.2f} from it, and {:.2f} with mean-field", lambda: [gap("ReLU", v, "error") for v in ("layernorm",
         "mean-field")]),
        ("from {:.2f} to {:.2f} over the last two norms", lambda: [widths(9), widths(15)]),
        ("is −{:.2f} after two epochs, the paper's effect; with seven activations that is p = {:.2f}",
         lambda: [-beta("the loss at the end of training").statistic, beta("the loss at the end of training").pvalue]),
        ("It is {:+.2f} at the end", lambda: [beta("the loss at the end of epoch 1").statistic]),
        ("test accuracy it is −{:.2f}", lambda: [-beta("test accuracy").statistic]),
    ],
    "docs/results/language-model.md": LANGUAGE_MODEL,
    "docs/corrections/batch-ideal.md": [
        ("end within {:.1f} points of the best", lambda: [below(0.3, 1.0, 3.0)]),
        ("{:.1f} % after fifteen epochs with", lambda: [tuned(IDEAL, "adam")]),
        ("against {:.1f} with SGD", lambda: [tuned(IDEAL)]),
        ("it ends {:.1f} points below plain SGD", lambda: [tuned(IDEAL) - tuned(IDEAL, "momentum")]),
        ("as good with either ({:.1f} and {:.1f})", lambda: [
            acc("cifar10-tuned", method=IDEAL, activation="leaky-relu", optimizer=o) for o in ("adam", "sgd")]),
    ],
    "docs/coordinates/whitened.md": [
        ("rank 16 costs {:.2f}× (AdamW) and {:.2f}× (Muon)", lambda: [speed("whitened",
         f"{o}, batch 16, every 10, rank 16")[0] for o in ("AdamW", "Muon")]),
        ("it ends {:.1f} points behind BatchNorm without pooling, and {:.1f} with", lambda: ahead(BATCHNORM, WHITE)),
        ("LayerNorm ends {:.3f} ahead of it, and in a CNN BatchNorm {:.1f} points", lambda: [
            free("whitened-muon-16", "muon")[1][0],
            fmean(tuned_cnn(BATCHNORM, "muon")) - fmean(tuned_cnn(WHITE, "muon"))]),
        ("the language model ends {:.3f} ahead of its LayerNorm counterpart",
         lambda: [-free("whitened-adamw-16", "adamw")[1][0]]),
    ],
    "docs/index.md": [
        ("gives {:.0f} to {:.0f} dB to a network", fields.PAGE[1][1]),
        ("ends {:.2f} nats below AdamW with it", lambda: [-free("whitened-adamw-16", "adamw")[1][0]]),
    ],
    "docs/results/index.md": fields.INDEX,
    "docs/results/fields.md": fields.PAGE,
    "docs/coordinates/input-scaled.md": [
        ("{:.3f} behind on validation, {:.3f} on test, after 2,000", lambda: [d for d, _ in faster()]),
        ("before the head, it is {:.3f} and {:.3f} ahead", lambda: [-d for d, _ in one_norm()]),
        ("{:.3f} and {:.3f} without it", lambda: [d for d, _ in longer()]),
        ("it costs {:.3f} nats on test (p = {:.3f}), and with `hold` {:.3f} (p < 0.001)",
         lambda: [*costs_adamw("scaled"), *(d for d, q in [costs_adamw("held")] if q < 0.001)]),
        ("then ends {:.3f} ahead of its LayerNorm counterpart", lambda: [-free("adamw", "adamw")[1][0]])],
    "docs/coordinates/unit-consistent.md": [
        ("costs {:.1f} to {:.1f} times", lambda: speed("unit-consistent", "10.2 M")),
        ("ends {:.1f} to {:.1f} points above it", lambda: above_plain("uc-network")),
        ("ends {:.1f} to {:.1f} above plain Adam", lambda: [-d for d in above_plain("uc-layer")][::-1])],
    "docs/layers/affine-like.md": [
        ("costs {:.0f} and {:.0f} % more", lambda: [100 * t - 100 for t in speed("structural", "AffineLikeLinear",
         "compiled")])],
}  # fmt: skip
