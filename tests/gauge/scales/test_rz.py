"""gauge.rz_scaling, uc_adjoint and uc_inverse: what defines them, at float64 precision, against slow forms."""

import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from adiv_optim.gauge import rz_scaling, uc_adjoint, uc_inverse
from adiv_optim.gauge.scales import balance, rz
from tests.helpers.cases import needs_cuda

MEANS = 1e-12
RECONSTRUCTION = 1e-14  # a dozen roundings of 1.1e-16
# log W' is an orthogonal projection of log W, so rounding of log W (here |log W| < 50, 1e-14) is not magnified; that of
# row and column sums is, by at most gap^(-1/2), under 100 for every support below.
INVARIANCE = 1e-12


pytestmark = pytest.mark.usefixtures("in_float64")


def sparse(*shape: int, density: float = 0.5) -> Tensor:
    return torch.randn(shape) * (torch.rand(shape) < density)


def bidiagonal(n: int) -> Tensor:
    return torch.diag(torch.randn(n)) + torch.diag(torch.randn(n - 1), 1)


def zero_lines() -> Tensor:
    weight = torch.randn(5, 6)
    weight[2] = 0
    weight[:, [0, 4]] = 0
    return weight


#: Three components, the second a single entry, with their rows and columns interleaved.
def disconnected() -> Tensor:
    weight = torch.block_diag(torch.randn(3, 4), torch.randn(1, 1), sparse(4, 3) + torch.eye(4, 3))
    return weight[torch.randperm(8)][:, torch.randperm(8)]


MATRICES = {
    "square": lambda: torch.randn(5, 5),
    "wide": lambda: torch.randn(3, 8),
    "tall": lambda: torch.randn(8, 3),
    "row": lambda: torch.randn(1, 6),
    "column": lambda: torch.randn(6, 1),
    "number": lambda: torch.randn(1, 1),
    "uneven": lambda: torch.randn(7, 6) ** 9,
    "one-zero": lambda: torch.randn(6, 5).index_put_((torch.tensor(2), torch.tensor(3)), torch.tensor(0.0)),
    "sparse-wide": lambda: sparse(6, 11),
    "sparse-tall": lambda: sparse(11, 6),
    "diagonal": lambda: torch.diag(torch.randn(6)),
    "bidiagonal-60": lambda: bidiagonal(60),
    "triangular": lambda: torch.randn(7, 7).tril(),
    "disconnected": disconnected,
    "zero-lines": zero_lines,
    "all-zero": lambda: torch.zeros(3, 4),
    "batch": lambda: torch.randn(2, 3, 4, 5),
    "batch-some-sparse": lambda: torch.stack(
        [torch.randn(5, 4), sparse(5, 4), torch.zeros(5, 4), torch.randn(5, 4), torch.eye(5, 4)]
    ),
    "complex": lambda: torch.randn(4, 5, dtype=torch.complex128),
    "complex-sparse": lambda: torch.randn(4, 5, dtype=torch.complex128) * (sparse(4, 5) != 0),
    "transposed": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "transposed-sparse": lambda: sparse(3, 4, 5).permute(2, 0, 1),
}
#: One of every code path: a closed form or a solve, by rows or by columns, with lines of zeros, with several members.
SOME = ["wide", "sparse-wide", "sparse-tall", "disconnected", "zero-lines", "batch-some-sparse", "complex-sparse"]
each_matrix = pytest.mark.parametrize("build", MATRICES.values(), ids=MATRICES)


def deviation_of_means(canonical: Tensor, kernel_dims: int = 0) -> float:
    """Greatest |log| of a geometric mean of the non-zero entries of a row or column."""
    support = canonical != 0
    logs = torch.where(support, canonical.abs(), 1.0).log()
    places = tuple(range(-kernel_dims, 0))
    means = [
        logs.sum((dim - kernel_dims, *places)) / support.sum((dim - kernel_dims, *places)).clamp(min=1)
        for dim in (-1, -2)
    ]
    return max(mean.abs().max().item() for mean in means)


def largest_ratio(found: Tensor, wanted: Tensor) -> float:
    """Greatest relative deviation of an entry; zeros must be where they were."""
    assert torch.equal(found == 0, wanted == 0)
    return ((found - wanted).abs() / wanted.abs().clamp(min=1e-300)).max().item()


def scaled(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return rows[..., :, None] * weight * columns[..., None, :]


def units(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Random scales over some ten orders of magnitude."""
    return (4 * torch.randn(weight.shape[:-1])).exp(), (4 * torch.randn(*weight.shape[:-2], weight.shape[-1])).exp()


def swept(weight: Tensor, sweeps: int) -> Tensor:
    """The definition, literally: take row means from the logarithms, then column means, and again."""
    support = weight != 0
    logs = torch.where(support, weight.abs(), 1.0).log()
    for _ in range(sweeps):
        for dim in (-1, -2):
            logs = logs - logs.sum(dim, keepdim=True) / support.sum(dim, keepdim=True).clamp(min=1) * support
    return torch.where(support, logs.exp() * weight.sgn(), 0.0)


@pytest.mark.parametrize("name", ["square", "bidiagonal-60", "disconnected", "zero-lines", "batch-some-sparse"])
def test_one_entry_off_by_a_billionth_is_noticed(name):
    canonical = rz_scaling(MATRICES[name]()).canonical
    first = tuple(canonical.nonzero()[0])
    canonical[first] *= 1 + 1e-9
    assert deviation_of_means(canonical) > MEANS


@each_matrix
def test_product_is_the_weight_and_geometric_means_of_rows_and_columns_are_one(build):
    weight = build()
    found = rz_scaling(weight)
    assert deviation_of_means(found.canonical) <= MEANS
    assert found.canonical.shape == weight.shape
    assert found.canonical.dtype == weight.dtype
    assert (found.row_scale > 0).all()
    assert (found.column_scale > 0).all()
    assert largest_ratio(scaled(found.canonical, found.row_scale, found.column_scale), weight) <= RECONSTRUCTION
    wrong = scaled(found.canonical, found.row_scale, found.column_scale * (1 + 1e-13))
    assert not weight.any() or largest_ratio(wrong, weight) > RECONSTRUCTION


@each_matrix
def test_canonical_form_is_invariant_under_diagonal_scalings(build):
    weight = build()
    found = rz_scaling(scaled(weight, *units(weight))).canonical
    assert largest_ratio(found, rz_scaling(weight).canonical) <= INVARIANCE


def test_dividing_by_row_means_alone_is_not_invariant():
    weight = sparse(6, 8)
    rows, columns = units(weight)
    support = weight != 0

    def by_rows(weight: Tensor) -> Tensor:
        mean = torch.where(support, weight.abs(), 1.0).log().sum(-1) / support.sum(-1).clamp(min=1)
        return weight / mean.exp()[:, None]

    assert largest_ratio(by_rows(rows[:, None] * weight), by_rows(weight)) <= INVARIANCE
    assert largest_ratio(by_rows(scaled(weight, rows, columns)), by_rows(weight)) > 1e-1


@pytest.mark.parametrize("name", SOME)
def test_alternating_sweeps_agree(name):
    weight = MATRICES[name]()
    wanted = swept(weight, 3000)
    assert deviation_of_means(wanted) <= MEANS  # the reference has converged
    assert largest_ratio(rz_scaling(weight).canonical, wanted) <= INVARIANCE


def test_sweeps_of_a_chain_converge_where_the_solve_is():
    weight = bidiagonal(12)
    found = rz_scaling(weight).canonical
    assert largest_ratio(swept(weight, 3000), found) <= INVARIANCE
    # Few sweeps solve what has no zeros, and are far from it here.
    assert largest_ratio(swept(weight, 10), found) > 1e-3
    assert largest_ratio(swept(torch.ones(4, 5).exp(), 1), torch.ones(4, 5)) <= INVARIANCE


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 3)])
@pytest.mark.parametrize("positions", [6])
def test_one_pass_is_the_solution_of_the_least_squares(shape, positions):
    logs = torch.randn(2, *shape, positions)
    rows, columns = rz._one_pass(logs)
    found = balance.balance(torch.full((2, *shape), float(positions)), logs.sum(-1))
    for one_pass, solved in zip((rows, columns), found, strict=True):
        assert (one_pass - solved).abs().max() <= 1e-14
    assert (rows - logs.mean((-1, -2))).abs().max() > 1e-2  # the gauge is part of the claim


@each_matrix
def test_rows_and_columns_carry_half_of_every_component(build):
    """Of all c in (cD, E/c), the one by which both have the same product over the component's entries."""
    weight = build()
    found = rz_scaling(weight)
    support = (weight != 0).double()
    rows, columns = found.row_scale.log(), found.column_scale.log()
    # The component of every row by brute force: rows reached from it through columns.
    reach = (support @ support.mT).sign()
    for _ in range(6):
        reach = (reach @ reach).sign()
    from_rows = (reach @ (support.sum(-1) * rows)[..., None])[..., 0]
    owners = (reach @ support).sign()  # component × column
    from_columns = (owners @ (support.sum(-2) * columns)[..., None])[..., 0]
    assert (from_rows - from_columns).abs().max() <= MEANS * max(1, from_rows.abs().max().item())
    if weight.any():
        moved = (reach @ (support.sum(-1) * (rows + 1e-3))[..., None])[..., 0]
        assert (moved - from_columns).abs().max() > MEANS


@pytest.mark.parametrize("name", ["square", "bidiagonal-60", "disconnected", "batch-some-sparse"])
def test_a_factor_is_shared_evenly_and_a_transpose_exchanges_the_scales(name):
    weight = MATRICES[name]()
    found, larger = rz_scaling(weight), rz_scaling(4 * weight)
    occupied = (weight != 0).any(-1)
    assert largest_ratio(larger.row_scale, torch.where(occupied, 2.0, 1.0) * found.row_scale) <= INVARIANCE
    transposed = rz_scaling(weight.mT)
    assert largest_ratio(transposed.row_scale, found.column_scale) <= INVARIANCE
    assert largest_ratio(transposed.column_scale, found.row_scale) <= INVARIANCE


def test_rows_and_columns_of_zeros_keep_scale_one():
    weight = zero_lines()
    found = rz_scaling(weight)
    assert found.row_scale[2] == 1
    assert (found.column_scale[[0, 4]] == 1).all()
    kept = rz_scaling(weight[[0, 1, 3, 4]][:, [1, 2, 3, 5]])  # as if they were not there
    assert largest_ratio(found.row_scale[[0, 1, 3, 4]], kept.row_scale) <= INVARIANCE
    assert (kept.row_scale != 1).all()
    zeros = rz_scaling(torch.zeros(2, 3))
    assert torch.equal(zeros.row_scale, torch.ones(2))
    assert torch.equal(zeros.column_scale, torch.ones(3))


def test_members_of_a_batch_are_told_apart():
    weight = MATRICES["batch-some-sparse"]()
    found = rz_scaling(weight)
    for index in range(len(weight)):
        alone = rz_scaling(weight[index])
        for part, wanted in zip(found, alone, strict=True):
            assert largest_ratio(part[index], wanted) <= RECONSTRUCTION
    assert largest_ratio(found.row_scale[:1], found.row_scale[3:4]) > 1e-3
    assert torch.equal(found.canonical[0], rz_scaling(weight[:1]).canonical[0])  # bit for bit without its neighbours


def test_batches_larger_than_a_chunk_are_solved_in_pieces(monkeypatch):
    weight = sparse(5, 4, 3)
    wanted = rz_scaling(weight)
    monkeypatch.setattr(rz, "CHUNK", 25)
    calls = []
    monkeypatch.setattr(rz, "balance", lambda *args: calls.append(args) or balance.balance(*args))
    for part, other in zip(rz_scaling(weight), wanted, strict=True):
        assert largest_ratio(part, other) <= RECONSTRUCTION
    assert [len(counts) for counts, _ in calls] == [2, 2, 1]


# Conjugate gradients and the factorisation


@pytest.fixture
def solvers(monkeypatch):
    """What was called, with conjugate gradients tried at every size."""
    calls = []
    monkeypatch.setattr(balance, "DIRECT", 0)
    for name in ("conjugate_gradients", "_factor"):
        original = getattr(balance, name)

        def traced(*args, name=name, original=original):
            result = original(*args)
            calls.append((name, result[1] if name == "conjugate_gradients" else True))
            return result

        monkeypatch.setattr(balance, name, traced)
    return calls


@pytest.mark.parametrize("name", [*SOME, "batch", "row"])
def test_conjugate_gradients_agree_with_the_factorisation(name, solvers, monkeypatch):
    weight = MATRICES[name]()
    found = rz_scaling(weight)
    assert ("_factor", True) not in solvers
    monkeypatch.setattr(balance, "DIRECT", math.inf)
    direct = rz_scaling(weight)
    for part, other in zip(found, direct, strict=True):
        assert largest_ratio(part, other) <= INVARIANCE
    assert deviation_of_means(found.canonical) <= MEANS


def test_a_long_chain_falls_back_on_the_factorisation(solvers):
    weight = bidiagonal(200)
    found = rz_scaling(weight)
    assert solvers == [("conjugate_gradients", False), ("_factor", True)]
    assert deviation_of_means(found.canonical) <= MEANS
    assert largest_ratio(rz_scaling(scaled(weight, *units(weight))).canonical, found.canonical) <= 10 * INVARIANCE


def test_work_on_a_chain_is_bounded(solvers, monkeypatch):
    """34,781 sweeps are what alternation takes for a bidiagonal matrix of 60; here steps are counted, not seconds."""
    products = []
    original = balance._apply
    monkeypatch.setattr(balance, "_apply", lambda *args: products.append(1) or original(*args))
    monkeypatch.setattr(balance, "DIRECT", 256)
    assert deviation_of_means(rz_scaling(bidiagonal(60)).canonical) <= MEANS
    assert solvers == [("_factor", True)]
    assert len(products) <= 10
    assert deviation_of_means(swept(bidiagonal(60), 300)) > MEANS


@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_components_of_shuffled_chains(length):
    order = torch.randperm(2 * length + 3)
    adjacent = torch.eye(2 * length + 3, dtype=torch.bool)
    for first in (0, length):
        path = order[first : first + length]
        adjacent[path[:-1], path[1:]] = adjacent[path[1:], path[:-1]] = True
    (label,) = balance._components(adjacent[None])
    groups = [order[:length], order[length : 2 * length], *order[2 * length :].split(1)]
    for group in groups:
        assert (label[group] == group.min()).all()
    assert len(label.unique()) == len(groups)


# Convolutions


CONVOLUTIONS = {
    "conv1d": lambda: nn.Conv1d(3, 4, 5),
    "conv2d": lambda: nn.Conv2d(3, 4, (2, 3)),
    "conv2d-groups": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "conv2d-depthwise": lambda: nn.Conv2d(3, 6, 3, groups=3),
    "conv2d-channels-last": lambda: nn.Conv2d(6, 4, 3, groups=2).to(memory_format=torch.channels_last),
    "conv3d": lambda: nn.Conv3d(4, 4, 2, groups=2),
}


@pytest.mark.parametrize("build", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_kernels_scale_by_channel_and_group(build, holes):
    layer = build()
    weight, groups, kernel_dims = layer.weight.detach(), layer.groups, layer.weight.dim() - 2
    if holes:
        weight[torch.rand_like(weight) < 0.4] = 0
        weight[0, 0] = 0

    def multiplied(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Eq. 21, one channel pair at a time."""
        result = weight.clone()
        out, inputs = weight.shape[:2]
        for o in range(out):
            for i in range(inputs):
                result[o, i] *= rows[o] * columns[o // (out // groups) * inputs + i]
        return result

    found = rz_scaling(weight, groups=groups, kernel_dims=kernel_dims)
    assert found.row_scale.shape == (layer.out_channels,)
    assert found.column_scale.shape == (layer.in_channels,)
    assert largest_ratio(multiplied(found.canonical, found.row_scale, found.column_scale), weight) <= RECONSTRUCTION
    blocks = found.canonical.unflatten(0, (groups, -1))
    assert deviation_of_means(blocks, kernel_dims) <= MEANS
    rows, columns = torch.randn(layer.out_channels).exp(), torch.randn(layer.in_channels).exp()
    moved = rz_scaling(multiplied(weight, rows, columns), groups=groups, kernel_dims=kernel_dims)
    assert largest_ratio(moved.canonical, found.canonical) <= INVARIANCE
    if groups > 1 and weight.shape[1] > 1:  # one matrix for all groups would be another answer
        assert largest_ratio(rz_scaling(weight, kernel_dims=kernel_dims).canonical, found.canonical) > 1e-3


def test_a_stack_of_kernels_is_a_batch():
    weight = sparse(3, 4, 2, 3, 3, density=0.8)
    weight[1] = torch.randn(4, 2, 3, 3)
    found = rz_scaling(weight, groups=2, kernel_dims=2)
    assert found.column_scale.shape == (3, 4)
    for index in range(3):
        for part, wanted in zip(found, rz_scaling(weight[index], groups=2, kernel_dims=2), strict=True):
            assert largest_ratio(part[index], wanted) <= RECONSTRUCTION


def test_one_by_one_kernel_is_its_matrix():
    weight = sparse(4, 6)
    kernel = rz_scaling(weight[:, :, None, None], kernel_dims=2)
    matrix = rz_scaling(weight)
    assert torch.equal(kernel.canonical[:, :, 0, 0], matrix.canonical)
    assert torch.equal(kernel.row_scale, matrix.row_scale)


# The adjoint and the inverse


@pytest.mark.parametrize("build", [MATRICES[name] for name in SOME], ids=SOME)
def test_adjoint_is_the_transpose_between_inverse_scales(build):
    weight = build()
    found = rz_scaling(weight)
    wanted = weight.mH / found.column_scale[..., :, None] / found.row_scale[..., None, :]
    assert largest_ratio(uc_adjoint(weight), wanted) <= RECONSTRUCTION


@pytest.mark.parametrize("name", ["wide", "sparse-tall", "disconnected", "zero-lines", "complex"])
def test_adjoint_does_not_see_units_which_the_transpose_does(name):
    weight = MATRICES[name]()
    other = scaled(weight, *units(weight))
    assert largest_ratio(uc_adjoint(other), uc_adjoint(weight)) <= INVARIANCE
    assert largest_ratio(other.mH, weight.mH) > 1


def low_rank(rows: int, columns: int, rank: int) -> Tensor:
    return torch.randn(rows, rank) @ torch.randn(rank, columns)


def low_rank_with_zeros() -> Tensor:
    weight = torch.block_diag(low_rank(3, 4, 1), low_rank(4, 3, 2))
    weight[1] = 0
    return weight


INVERSES = {
    "invertible": (lambda: torch.randn(5, 5), True),
    "diagonal": (lambda: torch.diag(torch.randn(5)), True),
    "wide": (lambda: torch.randn(3, 6), False),
    "tall": (lambda: torch.randn(6, 3), False),
    "rank-2-of-5": (lambda: low_rank(7, 5, 2), False),
    "rank-1": (lambda: low_rank(4, 4, 1), False),
    "rank-deficient-zeros": (low_rank_with_zeros, False),
    "batch": (lambda: torch.stack([low_rank(4, 5, 2), low_rank(4, 5, 3)]), False),
    "all-zero": (lambda: torch.zeros(2, 3), None),
}
each_inverse = pytest.mark.parametrize(("build", "invertible"), INVERSES.values(), ids=INVERSES)


def distance(found: Tensor, wanted: Tensor, unit: Tensor) -> float:
    """Greatest entry of found − wanted once both are rid of their units, relative to the greatest of wanted."""
    return ((found - wanted) / unit).abs().max().item() / max((wanted / unit).abs().max().item(), 1e-300)


@each_inverse
def test_inverse_follows_a_change_of_units(build, invertible):
    weight = build()
    rows, columns = units(weight)
    rows, columns = rows * torch.randn_like(rows).sign(), columns * torch.randn_like(columns).sign()
    found = uc_inverse(scaled(weight, rows, columns))
    wanted = scaled(uc_inverse(weight), 1 / columns, 1 / rows)
    # Entries are compared in canonical units: a rounding of the inverse's greatest entry may be all of its least.
    base = rz_scaling(scaled(weight, rows, columns))
    unit = scaled(torch.ones_like(found), 1 / base.column_scale, 1 / base.row_scale)
    # The pseudo-inverse magnifies the 1e-14 of the canonical form by at most the condition number of W', below 1e3.
    assert distance(found, wanted, unit) <= 1e-11
    plain = distance(
        torch.linalg.pinv(scaled(weight, rows, columns), rtol=1e-13),
        scaled(torch.linalg.pinv(weight, rtol=1e-13), 1 / columns, 1 / rows),
        unit,
    )
    if invertible is False:
        assert plain > 1e-3


@each_inverse
def test_inverse_is_a_generalised_inverse(build, invertible):
    weight = build()
    inverse = uc_inverse(weight)
    assert (weight @ inverse @ weight - weight).abs().max() <= 1e-12 * weight.abs().max().clamp(min=1)
    assert (inverse @ weight @ inverse - inverse).abs().max() <= 1e-11 * inverse.abs().max().clamp(min=1)
    if invertible:
        assert (inverse @ weight - torch.eye(5)).abs().max() <= 1e-12
    elif invertible is False:
        pseudo = torch.linalg.pinv(weight, rtol=1e-13)
        assert (inverse - pseudo).abs().max() > 1e-3  # not Moore and Penrose's


def test_inverse_takes_a_cutoff():
    weight = torch.diag(torch.tensor([1.0, 1.0])) + 1e-4 * torch.randn(2, 2) + torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert torch.linalg.matrix_rank(uc_inverse(weight)) == 2
    assert torch.linalg.matrix_rank(uc_inverse(weight, rtol=1e-2)) == 1


# Dtypes, shapes, autograd, errors


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.complex64, 1e-6)],
)
@pytest.mark.parametrize("holes", [False, True])
def test_lower_precision_rounds_the_float64_result(dtype, tolerance, holes):
    weight = (sparse(6, 5) if holes else torch.randn(6, 5)).to(dtype)
    found = rz_scaling(weight)
    wanted = rz_scaling(weight.to(torch.complex128 if dtype.is_complex else torch.float64))
    for part, exact in zip(found, wanted, strict=True):
        assert part.dtype == (dtype if exact is wanted.canonical else dtype.to_real())
        assert largest_ratio(part.to(exact.dtype), exact) <= tolerance
    assert uc_inverse(weight).dtype == dtype
    assert uc_adjoint(weight).dtype == dtype


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0, 2, 3), (2, 3, 0)])
def test_empty_dimensions(shape):
    weight = torch.empty(shape)
    found = rz_scaling(weight)
    assert found.canonical.shape == shape
    assert torch.equal(found.row_scale, torch.ones(shape[:-1]))
    assert torch.equal(found.column_scale, torch.ones(*shape[:-2], shape[-1]))
    assert uc_inverse(weight).shape == weight.mT.shape


def test_no_group_of_rows_at_all():
    assert rz_scaling(torch.empty(0, 3, 2, 2), groups=4, kernel_dims=2).column_scale.shape == (12,)


def test_result_has_no_graph_and_the_weight_is_untouched():
    for weight in (torch.randn(3, 4), sparse(3, 4)):
        before = weight.clone()
        weight.requires_grad_()
        outputs = [*rz_scaling(weight), uc_adjoint(weight), uc_inverse(weight)]
        assert not any(output.requires_grad for output in outputs)
        assert torch.equal(weight, before)
        assert not any(output.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for output in outputs)
    copied = pickle.loads(pickle.dumps(rz_scaling(weight)))
    assert type(copied) is rz.RZScaling


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("holes", [False, True])
def test_nan_and_inf_are_named(value, holes):
    weight = torch.eye(3) if holes else torch.ones(3, 3)
    weight[1, 2] = weight[2, 0] = value
    for function in (rz_scaling, uc_adjoint, uc_inverse):
        with pytest.raises(ValueError, match=r"2 of the 9 entries .*\(3, 3\).*at \[1, 2\].*last finite weights"):
            function(weight)
    weight[1, 2] = weight[2, 0] = 1e300
    rz_scaling(weight)


def test_scales_out_of_range_are_named():
    weight = torch.full((40, 40), 1e-30, dtype=torch.float32)
    weight[0] = 1e30
    with pytest.raises(ValueError, match=r"float32.*float64"):
        rz_scaling(weight)
    assert rz_scaling(weight.double()).row_scale.isfinite().all()
    # A chain of 300 orders of magnitude, of entries that are ordinary.
    chain = torch.eye(200) * 30 + torch.diag(torch.full((199,), 1 / 30), 1)
    with pytest.raises(ValueError, match=r"shape \(200, 200\) is exp\(±\d+\.\d\)"):
        rz_scaling(chain.float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused(dtype):
    for function in (rz_scaling, uc_adjoint, uc_inverse):
        with pytest.raises(TypeError, match=r"floating point, such as weight\.float"):
            function(torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("shape", "options", "match"),
    [
        ((3,), {}, r"shape \(3,\).*at least 2 dimensions"),
        ((3, 4, 5), {"kernel_dims": 2}, "kernel_dims=2.*at least 4 dimensions"),
        ((3, 4), {"kernel_dims": -1}, "kernel_dims=-1"),
        ((3, 4), {"groups": 2}, "groups is 2.*3 rows"),
        ((3, 4), {"groups": 0}, "groups is 0"),
    ],
)
def test_wrong_shapes_are_named(shape, options, match):
    with pytest.raises(ValueError, match=match):
        rz_scaling(torch.ones(shape), **options)


@needs_cuda
@pytest.mark.parametrize("name", ["wide", "bidiagonal-60", "disconnected", "batch-some-sparse"])
def test_cuda_gives_the_same(name):
    weight = MATRICES[name]()
    for part, wanted in zip(rz_scaling(weight.cuda()), rz_scaling(weight), strict=True):
        assert part.is_cuda
        assert largest_ratio(part.cpu(), wanted) <= INVARIANCE
    assert uc_inverse(weight.cuda()).is_cuda
