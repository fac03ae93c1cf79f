"""The recipes of docs/clients.md: frameworks that build or call the optimizer take the steps of the plain loop."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from adiv_optim import Whitened
from tests.helpers.loops import DIFFERENT, EXACT, deviation, weights
from tests.helpers.modules import Model
from tests.helpers.remembered import rows_counted
from tests.helpers.seeds import manual_seed

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("frameworks", "in_float64")]

LR, DAMPING, STEPS = 0.01, 0.1, 4


def network():
    manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def points():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(16, 2, generator=generator), torch.rand(16, 1, generator=generator)


def adam(params, **settings):
    # A greater eps than torch's: without it Adam makes steps of rounding errors where a gradient is 0.
    return torch.optim.Adam(params, **{"lr": LR, "eps": 1e-3, **settings})


def whitened(model, inner=None):
    return Whitened(inner or adam(model.parameters()), model, damping=DAMPING)


def train(model, optimizer, loss, steps=STEPS):
    """The plain loop."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def trained(model, loss, steps=STEPS, wrap=whitened):
    """The weights after the plain loop; and after that of the bare optimizer, which must differ."""
    bare = copy.deepcopy(model)
    train(bare, adam(bare.parameters()), loss, steps)
    optimizer = wrap(model)
    train(model, optimizer, loss, steps)
    assert deviation(weights(bare), weights(model)) > DIFFERENT
    return weights(model)


def regression(model):
    x, y = points()
    return mse_loss(model(x), y)


def all_treated(optimizer):
    coverage = optimizer.coverage()
    return isinstance(optimizer, Whitened) and coverage.element_share == 1 and len(coverage.treated) > 0


class TestSkorch:
    def regressor(self, **settings):
        skorch = pytest.importorskip("skorch")

        class Regressor(skorch.NeuralNetRegressor):
            def initialize_optimizer(self):
                super().initialize_optimizer()
                self.optimizer_ = whitened(self.module_, self.optimizer_)
                return self

        fixed = {"train_split": None, "batch_size": 16, "verbose": 0, "max_epochs": STEPS}
        return Regressor(network, optimizer=torch.optim.Adam, **{"lr": LR, "optimizer__eps": 1e-3, **fixed, **settings})

    def fit(self, net):
        x, y = points()
        return net.partial_fit(x.numpy(), y.numpy())

    def test_steps_are_those_of_the_plain_loop(self):
        net = self.fit(self.regressor())
        assert all_treated(net.optimizer_)
        assert deviation(weights(net.module_), trained(network(), regression)) <= EXACT

    def test_continues_from_saved_parameters(self, tmp_path):
        files = {"f_params": tmp_path / "weights.pt", "f_optimizer": tmp_path / "optimizer.pt"}
        first = self.fit(self.regressor())
        first.save_params(**files)
        second = self.regressor().initialize()
        second.load_params(**files)
        assert deviation(weights(self.fit(second).module_), weights(self.fit(first).module_)) == 0

    def test_settings_reach_the_inner_optimizer(self):
        base = pytest.importorskip("sklearn.base")
        net = base.clone(self.regressor(optimizer__betas=(0.5, 0.9))).initialize()
        net.set_params(optimizer__lr=0.5)
        (group,) = net.optimizer_.inner.param_groups
        assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.9))


class TestStableBaselines3:
    """In float32, as its observations are: the same operations in the same order, to the bit."""

    def policy(self):
        policies = pytest.importorskip("stable_baselines3.common.policies")

        class Policy(policies.ActorCriticPolicy):
            def _build(self, lr_schedule):
                super()._build(lr_schedule)
                self.optimizer = whitened(self, self.optimizer)

        return Policy

    def agent(self):
        torch.set_default_dtype(torch.float32)
        chosen = {"optimizer_class": torch.optim.Adam, "optimizer_kwargs": {"eps": 1e-3}, "net_arch": [8]}
        fixed = {"n_steps": 8, "learning_rate": LR, "seed": 0, "device": "cpu", "policy_kwargs": chosen}
        return pytest.importorskip("stable_baselines3").A2C(self.policy(), "CartPole-v1", **fixed)

    def test_steps_are_those_of_the_plain_loop(self):
        callbacks = pytest.importorskip("stable_baselines3.common.callbacks")
        rollouts = []

        class Record(callbacks.BaseCallback):
            def _on_step(self):
                return True

            def _on_rollout_end(self):
                state = np.random.get_state()
                rollouts.append(next(copy.deepcopy(self.model.rollout_buffer).get()))
                np.random.set_state(state)  # training is to draw the same order next

        agent = self.agent()
        policy = self.agent().policy
        agent.learn(8 * STEPS, callback=Record())
        assert len(rollouts) == STEPS
        assert all_treated(agent.policy.optimizer)
        for batch in rollouts:
            values, log_prob, _ = policy.evaluate_actions(batch.observations, batch.actions.long().flatten())
            policy_loss = -(batch.advantages * log_prob).mean()
            loss = policy_loss + agent.vf_coef * mse_loss(batch.returns, values.flatten())
            policy.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), agent.max_grad_norm)
            policy.optimizer.step()
        assert deviation(weights(agent.policy), weights(policy)) == 0

    def test_loads_back_wrapped(self, tmp_path):
        agent = self.agent().learn(32)
        agent.save(tmp_path / "agent")
        loaded = type(agent).load(tmp_path / "agent")
        optimizer = loaded.policy.optimizer
        assert all_treated(optimizer)
        found, wanted = rows_counted(optimizer), rows_counted(agent.policy.optimizer)
        assert found == wanted
        assert min(found.values()) > 0
        assert deviation(weights(loaded.policy), weights(agent.policy)) == 0
        loaded.set_env(agent.get_env())
        loaded.learn(16)

    @pytest.mark.parametrize("algorithm", ["SAC", "TD3", "DQN"])
    def test_policies_of_several_networks(self, algorithm, tmp_path):
        base = getattr(pytest.importorskip(f"stable_baselines3.{algorithm.lower()}.policies"), f"{algorithm}Policy")

        class Policy(base):
            def _build(self, lr_schedule):
                super()._build(lr_schedule)
                if algorithm == "DQN":
                    self.optimizer = whitened(self.q_net, self.optimizer)
                    return
                for network in (self.actor, self.critic):
                    network.optimizer = whitened(network, network.optimizer)

        torch.set_default_dtype(torch.float32)
        kind = getattr(pytest.importorskip("stable_baselines3"), algorithm)
        game = "CartPole-v1" if algorithm == "DQN" else "Pendulum-v1"
        agent = kind(Policy, game, learning_starts=8, seed=0, device="cpu", policy_kwargs={"net_arch": [8]})
        agent.learn(32).save(tmp_path / "agent")
        loaded = kind.load(tmp_path / "agent").policy
        networks = [loaded] if algorithm == "DQN" else [loaded.actor, loaded.critic]
        assert all(all_treated(network.optimizer) for network in networks)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
class TestPina:
    def test_steps_are_those_of_the_plain_loop(self):
        pytest.importorskip("pina")
        from pina import Condition, Trainer
        from pina.domain import CartesianDomain
        from pina.equation import Equation, FixedValue
        from pina.operator import laplacian
        from pina.optim import TorchOptimizer
        from pina.problem import SpatialProblem
        from pina.solver import PhysicsInformedSingleModelSolver

        class Poisson(SpatialProblem):
            output_variables = ["u"]  # noqa: RUF012
            spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
            domains = {"inside": spatial_domain, "edge": CartesianDomain({"x": [0, 1], "y": 0.0})}  # noqa: RUF012
            conditions = {  # noqa: RUF012
                "inside": Condition(domain="inside", equation=Equation(lambda x, u: laplacian(u, x) + 1)),
                "edge": Condition(domain="edge", equation=FixedValue(0.0)),
            }

        problem, model = Poisson(), network()
        problem.discretise_domain(12, "random")

        class WhitenedAdam(torch.optim.Adam):
            def __new__(cls, params, **settings):
                return whitened(model, adam(params, **settings))

        solver = PhysicsInformedSingleModelSolver(problem, model, optimizer=TorchOptimizer(WhitenedAdam, lr=LR))
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        Trainer(solver, max_epochs=STEPS, accelerator="cpu", shuffle=False, **quiet).train()
        assert all_treated(solver.optimizer.instance)
        inside, edge = (problem.discretised_domains[name].tensor for name in ("inside", "edge"))
        assert deviation(weights(model), trained(network(), partial(poisson, inside, edge))) <= EXACT


def poisson(inside, edge, model):
    inside = inside.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
    curvatures = [torch.autograd.grad(slope[:, d].sum(), inside, create_graph=True)[0][:, d] for d in (0, 1)]
    return (sum(curvatures) + 1).square().mean() + model(edge).square().mean()


class TestDeepXDE:
    @pytest.fixture
    def deepxde(self, capsys):
        deepxde = pytest.importorskip("deepxde")
        deepxde.config.set_default_float("float64")
        yield deepxde
        deepxde.config.set_default_float("float32")

    def model(self, deepxde, net):
        x, y = points()
        return deepxde.Model(deepxde.data.DataSet(x.numpy(), y.numpy(), 3 + x.numpy(), y.numpy()), net)

    def net(self, deepxde):
        net = deepxde.nn.FNN([2, 8, 1], "tanh", "Glorot uniform")
        net.load_state_dict(dict(zip(net.state_dict(), network().state_dict().values(), strict=True)))
        return net

    def test_steps_are_those_of_the_plain_loop(self, deepxde):
        net = self.net(deepxde)
        optimizer = whitened(net)
        model = self.model(deepxde, net)
        model.compile(optimizer)
        model.train(iterations=STEPS, display_every=1, verbose=0)
        assert all_treated(optimizer)
        assert deviation(weights(net), trained(self.net(deepxde), regression)) <= EXACT

    def test_continues_from_a_checkpoint(self, deepxde, tmp_path):
        first, second = self.net(deepxde), self.net(deepxde)
        model, again = self.model(deepxde, first), self.model(deepxde, second)
        model.compile(whitened(first))
        model.train(iterations=STEPS, verbose=0)
        path = model.save(str(tmp_path / "model"), verbose=0)
        again.compile(whitened(second))
        again.restore(path, verbose=0)
        assert all_treated(again.opt)
        for each in (model, again):
            each.train(iterations=STEPS, verbose=0)
        assert deviation(weights(second), weights(first)) == 0


@pytest.mark.filterwarnings("ignore:Whitened treats less than half")
@pytest.mark.filterwarnings("ignore:.*received unexpected keyword arguments:UserWarning")  # its Trainer hands over all
def test_neuraloperator_takes_the_steps_of_the_plain_loop():
    """In float32, of which its spectral weights are; as above to the bit."""
    neuralop, models = pytest.importorskip("neuralop"), pytest.importorskip("neuralop.models")
    torch.set_default_dtype(torch.float32)

    def net():
        manual_seed(0)
        return models.FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2)

    inputs = torch.randn(STEPS, 3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    batches, loss = [{"x": x, "y": x.square()} for x in inputs], neuralop.losses.LpLoss(d=2, reduction="sum")
    model, plain = net(), net()
    optimizer, plain_optimizer = whitened(model), whitened(plain)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = neuralop.Trainer(model=model, n_epochs=1, device="cpu", verbose=False)
    trainer.train(loader, {}, optimizer, schedule, training_loss=loss, eval_losses={})
    for batch in batches:
        train(plain, plain_optimizer, lambda model, batch=batch: loss(model(batch["x"]), batch["y"]), 1)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


class TestKeras:
    def test_steps_are_those_of_the_plain_loop(self):
        keras, body, kind = pytest.importorskip("keras"), network(), {"dtype": "float64"}
        model = keras.Sequential([keras.Input((2,), **kind), keras.layers.TorchModuleWrapper(body, **kind)])
        optimizer = whitened(body, adam(model.parameters()))
        train(model, optimizer, regression)
        assert all_treated(optimizer)
        assert deviation(weights(body), trained(network(), regression)) <= EXACT

    def test_dense_layers_of_keras_are_refused(self):
        keras = pytest.importorskip("keras")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        with pytest.raises(ValueError, match="ParameterDict is not a layer whose rows are known"):
            whitened(model)


def with_torchs_linear(model, kind):
    """The model with layers of torch in place of those of a class, with the same weights."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is kind:
                outputs, inputs = layer.weight.shape
                plain = nn.Linear(inputs, outputs, bias=layer.bias is not None)
                plain.load_state_dict(layer.state_dict())
                setattr(parent, name, plain)
    return model


def graphs():
    """A network on a graph, the class of its linear layers, a loss, and what takes the plain step."""
    geometric = pytest.importorskip("torch_geometric.nn")
    parts = {"first": geometric.SAGEConv(5, 8), "second": geometric.GATConv(8, 3)}
    net = Model(lambda net, x, edges: net.second(net.first(x, edges).relu(), edges), **parts)
    x, edges = torch.randn(12, 5), torch.randint(12, (2, 40))
    plain = {"second.att_src", "second.att_dst", "second.bias"}
    return net, geometric.Linear, lambda net: cross_entropy(net(x, edges), torch.arange(12) % 3), plain


def flow():
    zuko, x, context = pytest.importorskip("zuko"), torch.randn(12, 3), torch.randn(12, 2)
    flow = zuko.flows.RealNVP(3, 2, transforms=2, hidden_features=[8])
    return flow, zuko.nn.Linear, lambda flow: -flow(context).log_prob(x).mean(), set()


@pytest.mark.parametrize("build", [graphs, flow])
def test_steps_of_declared_layers_are_those_of_torchs_linear_layers(build, monkeypatch):
    model, kind, loss, plain = build()
    monkeypatch.setattr(kind, "input_rows", lambda layer, rows: rows, raising=False)
    twin = with_torchs_linear(copy.deepcopy(model), kind)
    optimizer = whitened(model)
    train(model, optimizer, loss)
    assert optimizer.coverage().skipped.keys() == plain
    assert len(optimizer.coverage().treated) == len(weights(model)) - len(plain)
    assert deviation(weights(model), trained(twin, loss)) <= EXACT


def test_masked_layers_of_zuko_stay_plain(monkeypatch):
    zuko = pytest.importorskip("zuko")
    monkeypatch.setattr(zuko.nn.Linear, "input_rows", lambda layer, rows: rows, raising=False)
    with pytest.raises(ValueError, match="MaskedLinear is a subclass of Linear, whose weight may multiply"):
        whitened(zuko.flows.MAF(3, 2, transforms=2, hidden_features=[8]))
