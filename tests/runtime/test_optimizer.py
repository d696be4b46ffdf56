"""Flat optimizers against torch.optim, and norms against torch.nn.utils."""

import itertools

import pytest
import torch

from runtime.optimizer import FlatOptimizer, OptimizerConfig, ParamGroup, clip_coefficient, local_square_sum

CONFIGS = {
    "adamw": OptimizerConfig("adamw", 1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw amsgrad": OptimizerConfig("adamw", 1e-2, weight_decay=0.1, amsgrad=True),
    "adamw maximize": OptimizerConfig("adamw", 1e-2, maximize=True),
    "sgd": OptimizerConfig("sgd", 1e-1),
    "sgd decay": OptimizerConfig("sgd", 1e-1, weight_decay=0.1),
    "sgd momentum": OptimizerConfig("sgd", 1e-1, momentum=0.9, weight_decay=0.1),
    "sgd dampening": OptimizerConfig("sgd", 1e-1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd nesterov": OptimizerConfig("sgd", 1e-1, momentum=0.9, nesterov=True),
}


def make_reference(config, params):
    groups = [{"params": [p], "weight_decay": d} for p, d in params]
    if config.name == "adamw":
        return torch.optim.AdamW(
            groups, config.lr, config.betas, config.eps, amsgrad=config.amsgrad, maximize=config.maximize
        )
    return torch.optim.SGD(
        groups, config.lr, config.momentum, config.dampening, nesterov=config.nesterov, maximize=config.maximize
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
def test_equals_torch_optim(name, dtype, tolerance):
    """Two parameters, one without decay, in flat shards cut elsewhere than between the parameters."""
    config = CONFIGS[name]
    sizes, decays = (37, 5), (config.weight_decay, 0.0)
    params = [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in sizes]
    reference = make_reference(config, list(zip(params, decays, strict=True)))
    cuts = [[20, 17], [5]]
    groups = [
        ParamGroup(f"{i}.{j}", part.clone(), decays[i])
        for i, p in enumerate(params)
        for j, part in enumerate(p.detach().split(cuts[i]))
    ]
    optimizer = FlatOptimizer(config, groups)
    for step in range(6):
        lr = config.lr / (1 + step)
        grads = [torch.randn(n, dtype=dtype) for n in sizes]
        for group in reference.param_groups:
            group["lr"] = lr
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        reference.step()
        optimizer.step(lr, [part.clone() for i, grad in enumerate(grads) for part in grad.split(cuts[i])])
        got = torch.cat([group.param for group in groups])
        assert (got - torch.cat([p.detach() for p in params])).abs().max() <= tolerance
    assert optimizer.step_count == 6
    for p, owned in zip(params, (slice(0, 2), slice(2, 3)), strict=True):
        states = list(optimizer.state_tensors().values())[owned]
        for key in config.state_names:
            got = torch.cat([state[key] for state in states])
            assert (got - reference.state[p][key]).abs().max() <= tolerance


def flat(config, n=10, **options):
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(n, dtype=torch.float64, generator=generator)
    return FlatOptimizer(config, [ParamGroup("w", param, **options)])


def test_groups_may_be_stepped_alone_and_in_any_order():
    config = CONFIGS["adamw"]
    grads = [torch.randn(3), torch.randn(4)]
    together, alone = (
        FlatOptimizer(config, [ParamGroup("a", torch.ones(3)), ParamGroup("b", torch.ones(4))]) for _ in range(2)
    )
    for _ in range(3):
        together.step(0.1, [grad.clone() for grad in grads])
        for index in (1, 0):
            alone.step_group(index, 0.1, grads[index].clone())
    assert all(torch.equal(a.param, b.param) for a, b in zip(together.groups, alone.groups, strict=True))


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25, dtype=torch.float64)])
def test_the_gradient_is_multiplied_by_the_scale(scale):
    grad = torch.randn(10, dtype=torch.float64)
    scaled, plain = flat(CONFIGS["sgd"]), flat(CONFIGS["sgd"])
    given = grad.clone()
    scaled.step(0.1, [given], grad_scale=scale)
    plain.step(0.1, [grad * 0.25])
    assert torch.equal(scaled.groups[0].param, plain.groups[0].param)
    assert torch.equal(given, grad * 0.25)


def test_decay_defaults_to_the_config_and_lr_scale_multiplies():
    grad = torch.zeros(10, dtype=torch.float64)
    default, twice, none = flat(CONFIGS["adamw"]), flat(CONFIGS["adamw"], lr_scale=2.0), flat(CONFIGS["adamw"], decay=0)
    before = none.groups[0].param.clone()
    for optimizer in (default, twice, none):
        optimizer.step(0.1, [grad])
    torch.testing.assert_close(default.groups[0].param, before * 0.99)
    torch.testing.assert_close(twice.groups[0].param, before * 0.98)
    assert torch.equal(none.groups[0].param, before)


def test_master_weights_keep_what_the_low_precision_copy_loses():
    param = torch.ones(4, dtype=torch.bfloat16)
    group = ParamGroup("w", param, master=param.float())
    optimizer = FlatOptimizer(OptimizerConfig("sgd"), [group])
    for _ in range(8):
        optimizer.step(1e-3, [torch.ones(4, dtype=torch.bfloat16)])
    torch.testing.assert_close(group.master, torch.full((4,), 1 - 8e-3))
    assert torch.equal(param, group.master.bfloat16())
    assert param[0] != 1


def test_an_empty_shard_is_stepped_and_counted():
    optimizer = flat(CONFIGS["adamw"], n=0)
    optimizer.step(0.1, [torch.zeros(0, dtype=torch.float64)])
    assert optimizer.step_count == 1


@pytest.mark.parametrize("name", ["adamw amsgrad", "sgd dampening"])
def test_saved_state_continues_exactly(name):
    config = CONFIGS[name]
    grads = [torch.randn(10, dtype=torch.float64) for _ in range(6)]
    whole, first = flat(config), flat(config)
    for grad in grads:
        whole.step(0.1, [grad.clone()])
    for grad in grads[:3]:
        first.step(0.1, [grad.clone()])
    saved = {group: {k: t.clone() for k, t in state.items()} for group, state in first.state_tensors().items()}
    resumed = FlatOptimizer(config, [ParamGroup("w", first.groups[0].param.clone())])
    resumed.load_state(saved, first.step_count)
    for grad in grads[3:]:
        resumed.step(0.1, [grad.clone()])
    assert torch.equal(resumed.groups[0].param, whole.groups[0].param)


def test_misuse_is_refused():
    optimizer = flat(CONFIGS["adamw"])
    with pytest.raises(ValueError, match="2 gradients for 1 groups"):
        optimizer.step(0.1, [torch.zeros(10), torch.zeros(10)])
    with pytest.raises(ValueError, match=r"group w: gradient \(9,\), parameter \(10,\)"):
        optimizer.step(0.1, [torch.zeros(9)])
    with pytest.raises(ValueError, match="the saved state has w/exp_avg, the optimizer"):
        optimizer.load_state({"w": {"exp_avg": torch.zeros(10)}}, 1)
    with pytest.raises(ValueError, match="w/exp_avg: saved"):
        optimizer.load_state({"w": {"exp_avg": torch.zeros(9), "exp_avg_sq": torch.zeros(9)}}, 1)
    with pytest.raises(ValueError, match="distinct names"):
        FlatOptimizer(CONFIGS["sgd"], [ParamGroup("a", torch.zeros(1)), ParamGroup("a", torch.zeros(1))])
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        OptimizerConfig("lion")
    with pytest.raises(ValueError, match="Nesterov"):
        OptimizerConfig("sgd", nesterov=True)


def test_config_from_a_programs_options():
    options = {"name": "adamw", "lr": 0.1, "betas": [0.8, 0.9], "schedule": "cosine", "warmup": 3}
    assert OptimizerConfig.from_options(options) == OptimizerConfig("adamw", 0.1, betas=(0.8, 0.9))


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torchs(norm, max_norm):
    grads = [torch.randn(n, dtype=torch.float64) for n in (7, 5, 3)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    wanted = torch.nn.utils.clip_grad_norm_(params, max_norm, norm)
    shares = [local_square_sum(grads[:1], norm), local_square_sum(grads[1:], norm)]
    total = max(shares) if norm == float("inf") else sum(shares) ** (1 / norm)
    torch.testing.assert_close(total, wanted, rtol=1e-15, atol=0)
    coefficient = clip_coefficient(total, max_norm)
    for p, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(grad * coefficient, p.grad, rtol=1e-15, atol=0)


def test_the_norm_of_low_precision_gradients_does_not_overflow():
    grads = [torch.full((1000,), 6e4, dtype=torch.float16)]
    assert local_square_sum(grads).dtype is torch.float64
    torch.testing.assert_close(local_square_sum(grads).sqrt().item(), 6e4 * 1000**0.5, rtol=1e-3, atol=0)


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_nothing_has_norm_zero(norm):
    assert local_square_sum([], norm) == 0
    assert local_square_sum([torch.zeros(0)], norm) == 0


def test_every_cut_of_a_buffer_gives_the_same_bits():
    """Elementwise kernels have vector bodies and scalar tails; the result must not show which one an element met."""
    config = CONFIGS["adamw"]
    param, grad = torch.randn(101, dtype=torch.float64), torch.randn(101, dtype=torch.float64)
    results = []
    for size in (101, 50, 7):
        parts = [ParamGroup(str(i), part.clone()) for i, part in enumerate(param.split(size))]
        optimizer = FlatOptimizer(config, parts)
        for _ in range(3):
            optimizer.step(0.1, [part.clone() for part in grad.split(size)])
        results.append(torch.cat([group.param for group in parts]))
    for a, b in itertools.pairwise(results):
        torch.testing.assert_close(a, b, rtol=1e-15, atol=0)
