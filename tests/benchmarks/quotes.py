"""What pages say of results, with places for the numbers, and where these are to be read."""

from . import quotes_fields as fields
from .measured import (
    IDEAL,
    NONE,
    above_held,
    at_32,
    free,
    freed,
    interval,
    lead,
    longer,
    measurements,
    ranked_at_length,
    speed,
)

#: Page → what it says, with places for numbers, and what these are.
QUOTES = {
    "README.md": [
        ("whitening learns {:.1f} dB less than SOAP alone", lambda: [-fields.behind_features("soap", True)[0]]),
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
