"""The rule that says which parameter step attention logits ask for."""

from dataclasses import dataclass

from .._linalg.limits import check_count, check_not_negative, given


@dataclass(frozen=True)
class AttentionIdeal:
    r"""Take the step of the query and key projections that moves the attention logits by their own gradient.

    .. math:: \theta = J^\top (JJ^\top + \lambda I)^{-1} g, \qquad
              \lambda = \text{damping} \cdot \mathrm{tr}(JJ^\top) / \text{logits},

    per head, with :math:`g = \partial L / \partial Y` and J the derivative of the logits
    :math:`Y = s\,(\tilde X \tilde W_q^\top)(\tilde X \tilde W_k^\top)^\top` by both projections. A plain step moves
    them to first order by :math:`-\eta s^2 (A g B + C g A)` (Bird 2025, Eq. 63, with its second term's indices
    put right), :math:`A = \tilde X \tilde X^\top`, :math:`B = KK^\top`, :math:`C = QQ^\top`; the paper leaves the
    correction open. Without damping this one moves them by :math:`-\eta g`, to `tolerance`, where that can be reached:
    for one sequence, generically if tokens ≤ min(head_dim, columns of :math:`\tilde X`). Elsewhere it comes as close
    as least squares allows, by the smallest step that does. It is never uphill, however early the iteration stops. As
    damping → ∞ it is the plain direction. The damping means the same whatever the units of X and W.

    **It is not additive over micro-batches** (nor is `adiv_optim.BatchIdeal`): each backward is ideal by itself.

    Args:
        damping: the ridge, as a share of the mean eigenvalue of JJᵀ; at least 0.
        joint: solve for all sequences of the batch at once. False solves each sequence as if it were alone and
            adds the steps up: cheaper for short sequences, ideal for a sequence only without the others' pull.
        tolerance: the relative residual that conjugate gradients stop at; None is 10 × machine precision. Few logits
            with damping are solved for directly.
        max_iterations: of conjugate gradients, at most. Stopping early is damping too.

    Raises:
        ValueError: damping is negative or not finite, tolerance negative, or max_iterations less than 1.

    Example:
        >>> import torch
        >>> from adiv_optim import attention
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> w_q, w_k = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 1.0], [0.0, 1.0]], requires_grad=True)
        >>> rule = attention.AttentionIdeal(damping=0.0, tolerance=None)
        >>> g = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
        >>> attention.logits(x, w_q, w_k, num_heads=1, correction=rule).backward(g)
        >>> step = {"q_weight": w_q.grad, "k_weight": w_k.grad}
        >>> moved = attention.effective_logit_update(x, w_q, w_k, g, num_heads=1, gradients=step)
        >>> torch.allclose(moved, -g, atol=1e-5)
        True
    """

    damping: float = 1e-3
    joint: bool = True
    tolerance: float | None = 1e-3
    max_iterations: int = 100

    def __post_init__(self) -> None:
        check_not_negative("AttentionIdeal", damping=self.damping, **given(tolerance=self.tolerance))
        check_count("AttentionIdeal", max_iterations=self.max_iterations)


def check_rule(rule: object) -> AttentionIdeal:
    """Return `rule`, or raise a TypeError that names its type."""
    if isinstance(rule, AttentionIdeal):
        return rule
    if rule is AttentionIdeal:
        raise TypeError("attention: the correction is the class AttentionIdeal itself; write AttentionIdeal().")
    raise TypeError(
        f"attention: the correction is {rule!r} of type {type(rule).__name__}; attention logits take an "
        "attention.AttentionIdeal or None. Corrections of rows do not mend logits: use adiv_optim.attach for the "
        "value and output projections."
    )
