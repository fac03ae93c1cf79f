"""The private names of torch that the library uses do what it takes them to do."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from adiv_optim import _torch
from adiv_optim._torch import backward_pass, keeps_graph, plain_tensor, reached_by


def test_all_are_there():
    assert all(hasattr(_torch, name) for name in _torch.__all__)
    in_transforms = "get_unwrapped is_batchedtensor is_functorch_wrapped_tensor is_gradtrackingtensor "
    in_transforms += "is_legacy_batchedtensor maybe_get_bdim peek_interpreter_stack"
    assert all(hasattr(_torch.functorch, name) for name in in_transforms.split())


def test_a_backward_pass_is_told_from_the_next_and_says_where_it_goes():
    layer, seen = nn.Linear(2, 2), []
    weight = get_gradient_edge(layer.weight).node
    x = torch.ones(1, 2, requires_grad=True)
    output = layer(x).sum()
    output.grad_fn.register_prehook(lambda _: seen.append((backward_pass(), keeps_graph(), reached_by(weight))))
    output.backward(retain_graph=True)
    torch.autograd.grad(output, layer.weight, create_graph=True)
    torch.autograd.grad(output, x)
    numbers, kept, how = zip(*seen, strict=True)
    assert len(set(numbers)) == 3
    assert backward_pass() == -1 not in numbers
    assert (kept, how) == ((True, True, False), ("backward", "grad", ""))


def test_a_tensor_that_keeps_its_numbers_elsewhere_stays():
    class Named(Tensor):
        pass

    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert plain_tensor(nested) is nested
    assert type(plain_tensor(torch.ones(2).as_subclass(Named))) is Tensor
    parameter = nn.Parameter(torch.ones(2))
    assert plain_tensor(parameter).data_ptr() == parameter.data_ptr()
