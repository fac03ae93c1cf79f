"""Conjugate gradients side by side: against a direct solution, for problems that end at different times."""

import pytest
import torch

from adiv_optim.gauge.rz import _descend, conjugate_gradients

pytestmark = pytest.mark.usefixtures("in_float64")


def test_solution_is_the_direct_one_but_where_it_stops_early():
    half = torch.randn(3, 6, 6)
    matrix, right = half @ half.mT + torch.eye(6), torch.randn(3, 6)
    wanted = torch.linalg.solve(matrix, right)

    def system(y):
        return (matrix @ y[..., None])[..., 0]

    found = conjugate_gradients(system, right, torch.full((3,), 1e-10), 20)
    assert (found - wanted).abs().max() <= 1e-9
    found = conjugate_gradients(system, right, torch.full((3,), 1e-10), 1)  # in each of four rounds
    assert (found - wanted).abs().max() > 1e-3


def test_restarts_take_away_what_rounding_leaves():
    values = torch.logspace(0, 9, 40)
    turn = torch.linalg.qr(torch.randn(40, 40)).Q
    matrix = (turn * values) @ turn.T
    right = matrix @ torch.randn(40)
    goal = 1e-15 * right.norm()
    found = conjugate_gradients(lambda y: matrix @ y, right, goal)
    once = _descend(lambda y: matrix @ y, right, goal, 2000)
    assert (right - matrix @ found).norm() <= (right - matrix @ once).norm()
    assert (right - matrix @ found).norm() <= 1e-13 * right.norm()


def test_problem_that_is_done_stays_while_others_go_on():
    matrix = torch.diag(torch.tensor([2.0, 4.0, 0.0]))  # singular: what lies outside of its range stays 0
    right = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [6.0, 0.0, 0.0]])
    found = conjugate_gradients(lambda y: y @ matrix, right, torch.full((3,), 1e-12), 5)
    assert torch.equal(found, torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]))
