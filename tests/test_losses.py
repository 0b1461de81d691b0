"Losses against plain loops and TRL's own loss, under padding, order, micro-batches and precision; the cases of the loss area."
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import tensor

from rlworkbench.advantages import group_advantages
from rlworkbench.losses import (LOSS_TYPES, aggregate, check_mask, cispo_loss, clipped_surrogate, entropy, forward_kl, gspo_loss, importance_weights, jsd, kl_estimate, masked_mean,
                                ratio_surrogate, reverse_kl, sequence_logps_ratio, token_logps, topk_tail, value_loss)

inf, nan = math.inf, math.nan
HOW = ("sequence_mean", "token_mean", "fixed_length")
SIZES = [(1, 1), (1, 6), (4, 1), (5, 9)]


def batch(seed, B=5, T=9, dtype=torch.float64):
    "Log-probabilities of two policies, advantages, ragged mask with an empty row where there is room."
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(B, T, generator=g, dtype=dtype) * 3
    logps = old + torch.randn(B, T, generator=g, dtype=dtype) * .4
    A = torch.randn(B, generator=g, dtype=dtype)
    lengths = torch.randint(1, T + 1, (B, 1), generator=g)
    if B > 2: lengths[2] = 0
    return logps, old, A, (torch.arange(T) < lengths).long()


def gradient(f, *tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    f(*leaves).backward()
    return [x.grad for x in leaves]


# every loss of the module as a number of one (B, T) input x, given an old (B, T), advantages and mask
LOSSES = {
    **{f"clipped_{how}": (lambda x, old, A, m, how=how: aggregate(clipped_surrogate(x, old, A), m, how, max_length=9)) for how in HOW},
    "dual_clip": lambda x, old, A, m: aggregate(clipped_surrogate(x, old, A, epsilon_high=.28, dual_clip=3.), m),
    "gspo": lambda x, old, A, m: aggregate(gspo_loss(x, old, A, m), m),
    "cispo": lambda x, old, A, m: aggregate(cispo_loss(x, old, A, cap=1.2), m, "token_mean"),
    **{kind: (lambda x, old, A, m, kind=kind: aggregate(kl_estimate(x, old, kind, mask=m)[0], m)) for kind in ("k1", "k2", "k3")},
    "weighted": lambda x, old, A, m: aggregate(clipped_surrogate(x, x.detach(), A) * importance_weights(x, old, m)[0], m),
    "weighted_sequence": lambda x, old, A, m: aggregate(clipped_surrogate(x, x.detach(), A) * importance_weights(x, old, m, level="sequence", mode="mask")[0], m),
    "value": lambda x, old, A, m: value_loss(x, None, old, m),
    "value_clipped": lambda x, old, A, m: value_loss(x, old, A[:, None] + old, m, clip=.2),
    "masked_mean": lambda x, old, A, m: masked_mean(x, m),
    **{f.__name__: (lambda x, old, A, m, f=f: aggregate(f(torch.stack([x, old, x * old], -1), torch.stack([old, x, old], -1)), m)) for f in (forward_kl, reverse_kl, jsd)},
    "entropy": lambda x, old, A, m: aggregate(entropy(torch.stack([x, old, x * old], -1)), m),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


# ---- plain loops

def loop_surrogate(logps, old, A, low, high, dual):
    out = []
    for new_row, old_row, a_row in zip(logps.tolist(), old.tolist(), A.tolist()):
        row = []
        for t, (x, y) in enumerate(zip(new_row, old_row)):
            a, ratio = a_row[t] if isinstance(a_row, list) else a_row, math.exp(x - y)
            loss = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            row.append(min(loss, -dual * a) if dual and a < 0 else loss)
        out.append(row)
    return tensor(out, dtype=torch.float64)


def loop_aggregate(loss, mask, how, max_length):
    rows = [[x for x, k in zip(r, m) if k] for r, m in zip(loss.tolist(), mask.tolist())]
    if how == "sequence_mean": return sum(sum(r) / len(r) if r else 0. for r in rows) / len(rows)
    total = sum(sum(r) for r in rows)
    return total / max(sum(len(r) for r in rows), 1) if how == "token_mean" else total / (len(rows) * max_length)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("B,T", SIZES)
@pytest.mark.parametrize("low,high,dual", [(.2, .2, None), (.2, .28, None), (.1, .3, 1.5), (.2, .2, 3.)])
def test_surrogate_and_aggregate_equal_the_loop(seed, B, T, low, high, dual):
    logps, old, A, mask = batch(seed, B, T)
    for advantages in (A, A[:, None] + torch.arange(T) - T / 2):
        loss = clipped_surrogate(logps, old, advantages, epsilon=low, epsilon_high=high, dual_clip=dual)
        assert torch.allclose(loss, loop_surrogate(logps, old, advantages, low, high, dual))
        for how in HOW:
            assert aggregate(loss, mask, how, max_length=T).item() == pytest.approx(loop_aggregate(loss, mask, how, T))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("B,T", SIZES)
def test_sequence_losses_and_weights_equal_the_loop(seed, B, T):
    logps, old, A, mask = batch(seed, B, T)
    ratio, loss, cispo = sequence_logps_ratio(logps, old, mask), gspo_loss(logps, old, A, mask, epsilon=.1, epsilon_high=.2), cispo_loss(logps, old, A, cap=1.2)
    token_w, token_frac = importance_weights(logps, old, mask, cap=1.3)
    seq_w, seq_frac = importance_weights(logps, old, mask, level="sequence", cap=1.3, mode="mask")
    above = []
    for i in range(B):
        d = [(logps[i, t] - old[i, t]).item() for t in range(T) if mask[i, t]]
        s, a = math.exp(sum(d) / max(len(d), 1)), A[i].item()
        assert ratio[i, 0].item() == pytest.approx(s) and loss[i, 0].item() == pytest.approx(-min(s * a, min(max(s, .9), 1.2) * a))
        w = math.exp(sum(d))
        assert seq_w[i, 0].item() == pytest.approx(w if w <= 1.3 else 0.)
        above += [math.exp(x) > 1.3 for x in d]
        for t in range(T):
            rho = math.exp((logps[i, t] - old[i, t]).item())
            assert cispo[i, t].item() == pytest.approx(-min(rho, 1.2) * a * logps[i, t].item())
            assert token_w[i, t].item() == pytest.approx(min(rho, 1.3) if mask[i, t] else 1.)
    assert token_frac.item() == pytest.approx(sum(above) / max(len(above), 1))
    rows = [math.exp(sum((logps[i, t] - old[i, t]).item() for t in range(T) if mask[i, t])) > 1.3 for i in range(B) if mask[i].any()]
    assert seq_frac.item() == pytest.approx(sum(rows) / max(len(rows), 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("B,T", SIZES)
@pytest.mark.parametrize("clip", [None, .2])
def test_value_loss_equals_the_loop(seed, B, T, clip):
    values, old, A, mask = batch(seed, B, T)
    returns, errors = A[:, None] + torch.sin(old * 9), []
    for i in range(B):
        for t in range(T):
            if not mask[i, t]: continue
            v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
            moved = o + min(max(v - o, -clip), clip) if clip else v
            errors.append(max((v - r)**2, (moved - r)**2))
    assert value_loss(values, old, returns, mask, clip=clip).item() == pytest.approx(sum(errors) / max(len(errors), 1) / 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("V", [2, 3, 8])
def test_divergences_equal_the_loop(seed, V):
    g = torch.Generator().manual_seed(seed)
    z, y = torch.randn(3, 2, V, generator=g, dtype=torch.float64), torch.randn(3, 2, V, generator=g, dtype=torch.float64) * 2
    kl = lambda a, b: sum(x * math.log(x / w) for x, w in zip(a, b))
    for i in range(3):
        for t in range(2):
            p, q = z[i, t].softmax(-1).tolist(), y[i, t].softmax(-1).tolist()
            assert forward_kl(z, y)[i, t].item() == pytest.approx(kl(q, p)) and reverse_kl(z, y)[i, t].item() == pytest.approx(kl(p, q))
            assert entropy(z)[i, t].item() == pytest.approx(-sum(x * math.log(x) for x in p))
            for beta in (.1, .5, .8):
                m = [(1 - beta) * x + beta * w for x, w in zip(p, q)]
                assert jsd(z, y, beta)[i, t].item() == pytest.approx((1 - beta) * kl(p, m) + beta * kl(q, m))
            for K in range(1, V + 1):
                ids = z.topk(K).indices
                kept = ids[i, t].tolist()
                p_k, q_k = ([d[v] for v in kept] + ([1 - sum(d[v] for v in kept)] if K < V else []) for d in (p, q))
                bucketed = forward_kl(topk_tail(z, ids), topk_tail(y, ids))[i, t].item()
                assert bucketed == pytest.approx(kl(q_k, p_k), abs=1e-9) and bucketed <= kl(q, p) + 1e-9
    assert torch.allclose(topk_tail(z, z.topk(1).indices).exp().sum(-1), torch.ones(3, 2, dtype=torch.float64))


def test_divergences_of_the_teacher_alone_have_no_gradient():
    z, y = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    for f in (forward_kl, reverse_kl, jsd):
        to_student, to_teacher = gradient(lambda a, b: f(a, b).sum() + 0 * b.sum(), z, y)
        assert to_student.abs().sum() > 0 and to_teacher.abs().sum() == 0
        assert torch.allclose(to_student.sum(-1), torch.zeros(4, dtype=torch.float64), atol=1e-12)   # logits: a constant shift is nothing
        assert torch.autograd.gradcheck(lambda a: f(a, y), z.clone().requires_grad_())
        assert torch.autograd.gradcheck(lambda a: f(topk_tail(a, z.topk(2).indices), topk_tail(y, z.topk(2).indices)), z.clone().requires_grad_())
    assert torch.allclose(gradient(lambda a: forward_kl(a, y).sum(), z)[0], z.softmax(-1) - y.softmax(-1))


def test_a_floor_for_the_student_would_cut_the_gradient():
    student, teacher = tensor([30., 0.]), tensor([0., 30.])          # log p of what the teacher wants is -30
    assert torch.allclose(gradient(lambda z: forward_kl(z, teacher), student)[0], tensor([1., -1.]))
    cut = gradient(lambda z: (teacher.softmax(-1) * (teacher.log_softmax(-1) - z.log_softmax(-1).clamp(min=-20))).sum(), student)[0]
    assert cut.abs().max() < 1e-6


# ---- TRL

@pytest.fixture(scope="module")
def trl_loss():
    "TRL's own `_compute_loss`, given log-probabilities instead of a model."
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

    def loss(loss_type, logps, old, A, mask, *, epsilon=.2, epsilon_high=.2, delta=None, beta=0., ref=None, level="token", max_length=12, items=None):
        model = SimpleNamespace(training=True)
        bare = SimpleNamespace(
            model=model, loss_type=loss_type, epsilon_low=epsilon, epsilon_high=epsilon_high, beta=beta, importance_sampling_level=level, max_completion_length=max_length,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1), current_gradient_accumulation_steps=1, aux_loss_enabled=False,
            top_entropy_quantile=1., off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False, _entropy_bonus_enabled=False,
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x), _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *a, **k: (logps, torch.zeros_like(logps), None))
        ids = torch.zeros(mask.shape, dtype=torch.long)
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask, "advantages": A, "old_per_token_logps": old,
                  "ref_per_token_logps": ref, "num_items_in_batch": mask.sum() if items is None else tensor(items)}
        return trainer._compute_loss(bare, model, inputs)
    return loss


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("options", [{}, {"epsilon": .1, "epsilon_high": .28}, {"delta": 1.5}])
@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_gradient_equal_trl(trl_loss, seed, loss_type, options, per_token):
    logps, old, A, mask = batch(seed)
    A = A[:, None] + torch.cos(old * 9) if per_token else A
    items = 57. if loss_type == "dapo" else None      # tokens of the whole accumulation window
    ours = {"dual_clip" if k == "delta" else k: v for k, v in options.items()}
    mine = lambda x: aggregate(clipped_surrogate(x, old, A, **ours), mask, LOSS_TYPES[loss_type], max_length=12, denominator=items)
    theirs = lambda x: trl_loss(loss_type, x, old, A, mask, items=items, **options)
    assert torch.allclose(mine(logps), theirs(logps), atol=1e-12)
    assert torch.allclose(gradient(mine, logps)[0], gradient(theirs, logps)[0], atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_kl_gspo_and_cispo_equal_trl(trl_loss, seed):
    logps, old, A, mask = batch(seed)
    ref = old + .3 * torch.sin(old * 7)
    pairs = [
        (lambda x: aggregate(clipped_surrogate(x, old, A) + .05 * kl_estimate(x, ref, mask=mask)[0], mask), lambda x: trl_loss("grpo", x, old, A, mask, beta=.05, ref=ref)),
        (lambda x: aggregate(gspo_loss(x, old, A, mask), mask), lambda x: trl_loss("grpo", x, old, A, mask, epsilon=3e-4, epsilon_high=4e-4, level="sequence")),
        (lambda x: aggregate(cispo_loss(x, old, A, cap=1.2), mask, "token_mean"), lambda x: trl_loss("cispo", x, old, A, mask, epsilon_high=1.2)),
    ]
    for mine, theirs in pairs:
        assert torch.allclose(mine(logps), theirs(logps), atol=1e-12)
        assert torch.allclose(gradient(mine, logps)[0], gradient(theirs, logps)[0], atol=1e-12)


# ---- invariances

@every_loss
@pytest.mark.parametrize("seed", range(2))
def test_padding_order_and_precision_change_nothing(name, seed):
    f, (logps, old, A, mask) = LOSSES[name], batch(seed)
    loss, (grad,) = f(logps, old, A, mask), gradient(lambda x: f(x, old, A, mask), logps)
    assert loss.dtype == torch.float64 and torch.equal(grad[mask == 0], torch.zeros((mask == 0).sum(), dtype=torch.float64))
    wide = [torch.cat([x, torch.full((5, 3), fill, dtype=x.dtype)], 1) for x, fill in ((logps, -7.), (old, -1.), (mask, 0))]
    assert torch.allclose(f(wide[0], wide[1], A, wide[2]), loss)
    order = tensor([3, 0, 4, 2, 1])
    assert torch.allclose(f(logps[order], old[order], A[order], mask[order]), loss)
    assert torch.allclose(f(logps.float(), old.float(), A.float(), mask.bool()).double(), loss, atol=1e-5)


@every_loss
def test_garbage_in_the_padding_reaches_neither_loss_nor_gradient(name):
    f, (logps, old, A, mask) = LOSSES[name], batch(0)
    dirty = torch.where(mask.bool(), old, -inf) if name not in ("forward_kl", "reverse_kl", "jsd", "entropy") else torch.where(mask.bool(), old, -1e6)
    loss, (grad,) = f(logps, dirty, A, mask), gradient(lambda x: f(x, dirty, A, mask), logps)
    assert torch.allclose(loss, f(logps, old, A, mask)) and torch.allclose(grad, gradient(lambda x: f(x, old, A, mask), logps)[0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cuts", [(1, 4), (2, 2, 1), (1, 1, 1, 1, 1)])
def test_micro_batches_with_a_shared_denominator_add_up(how, cuts):
    logps, old, A, mask = batch(1)
    D = {"sequence_mean": 5, "token_mean": mask.sum(), "fixed_length": 5 * 9}[how]
    whole = lambda x: aggregate(clipped_surrogate(x, old, A), mask, how, max_length=9)
    parts = lambda x, D: sum(aggregate(clipped_surrogate(a, b, c), m, how, max_length=9, denominator=D)
                             for a, b, c, m in zip(*(y.split(cuts) for y in (x, old, A, mask))))
    assert torch.allclose(parts(logps, D), whole(logps)) and torch.allclose(gradient(lambda x: parts(x, D), logps)[0], gradient(whole, logps)[0])
    # the wrong way: every micro-batch by its own count, then the mean over them
    if how == "token_mean": assert (parts(logps, None) / len(cuts) - whole(logps)).abs() > 1e-3


def test_a_rollout_split_over_two_masks_keeps_each_loss_its_own_denominator():
    m = tensor([[1, 1, 1, 1]])
    first, second = tensor([[1, 1, 0, 0]]), tensor([[0, 0, 0, 1]])
    both = aggregate(torch.ones(1, 4), first, "token_mean") + aggregate(torch.ones(1, 4), second, "token_mean")
    assert both == 2. and aggregate(torch.ones(1, 4) * first + torch.ones(1, 4) * second, m, "token_mean") == .75   # diluted


# ---- cases

def test_a5_length_normalisation():
    mask = (torch.arange(12) < tensor([[3], [9]])).long()
    logps = torch.full((2, 12), -1.)
    loss = clipped_surrogate(logps, logps, tensor([1., -1.]))
    assert [aggregate(loss, mask, how, max_length=12).item() for how in HOW] == [0., .5, .25]


@every_loss
@pytest.mark.parametrize("B,T", [(1, 1), (4, 16)])
def test_a6_everything_masked(name, B, T):
    logps, old, A, _ = batch(3, B, T)
    none = torch.zeros(B, T, dtype=torch.long)
    assert LOSSES[name](logps, old, A, none).item() == 0
    (grad,) = gradient(lambda x: LOSSES[name](x, old, A, none), logps)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_a6_an_optimiser_step_on_nothing_leaves_the_weights():
    w = torch.nn.Parameter(torch.ones(3))
    optimiser = torch.optim.AdamW([w], lr=.1, weight_decay=0.)
    aggregate(clipped_surrogate(w[None] - 2, w.detach()[None] - 2, tensor([1.])), torch.zeros(1, 3)).backward()
    optimiser.step()
    assert w.tolist() == [1., 1., 1.] and optimiser.state[w]["step"] == 1


def test_a7_denominator_follows_the_mask():
    mask = torch.zeros(2, 16, dtype=torch.long)
    mask[0, :4] = 1
    assert aggregate(torch.ones(2, 16), mask, "token_mean") == 1.                       # 4/4
    assert aggregate(torch.ones(2, 16), mask, "token_mean", denominator=20) == tensor(.2)   # the count before masking


def test_a8_clip_branches():
    loss = ratio_surrogate(tensor([[1.5], [.5], [1.5], [.5]]), tensor([1., 1., -1., -1.]), epsilon=.2)
    assert torch.allclose(loss, tensor([[-1.2], [-.5], [1.5], [.8]]))
    assert torch.allclose(clipped_surrogate(tensor([[1.5], [.5], [1.5], [.5]]).log(), torch.zeros(4, 1), tensor([1., 1., -1., -1.])), loss)


@pytest.mark.parametrize("mask", [[[1., .5]], [[2., 0.]], [[-100., 1.]], [[nan, 1.]]])
def test_a8_a_mask_that_is_not_binary_is_refused(mask):
    for refuse in (check_mask, lambda m: aggregate(torch.ones(1, 2), m), lambda m: masked_mean(torch.ones(1, 2), m), lambda m: value_loss(*[torch.ones(1, 2)] * 3, m),
                   lambda m: sequence_logps_ratio(*[torch.ones(1, 2)] * 2, m), lambda m: importance_weights(*[torch.ones(1, 2)] * 2, m)):
        with pytest.raises(ValueError, match="only 0 and 1"): refuse(tensor(mask))


@pytest.mark.parametrize("rewards,learns", [([1., 0., 1., 0.], True), ([1., 1., 1., 1.], False)])
def test_a9_first_loss_is_zero(rewards, learns):
    torch.manual_seed(0)
    logits, ids = torch.randn(4, 3, 5, requires_grad=True), torch.randint(5, (4, 3))
    logps = token_logps(logits, ids)
    loss = aggregate(clipped_surrogate(logps, logps, group_advantages(tensor(rewards), torch.zeros(4, dtype=torch.long))), torch.ones(4, 3))
    loss.backward()
    assert abs(loss.item()) < 1e-6 and (logits.grad.norm().item() > .1 if learns else logits.grad.norm().item() == 0)


def test_a10_kl_term():
    logps, ref = torch.zeros(1, 4), tensor([[0., .5, -.5, 20.]])
    kl, n_clamped = kl_estimate(logps, ref)
    assert torch.allclose(kl[0, :3], tensor([0., .14872, .10653]), atol=1e-5)
    assert kl[0, 3].item() == pytest.approx(math.exp(10) - 11, rel=1e-5) and n_clamped == 1
    assert kl_estimate(logps, ref * 1e30)[0].isfinite().all()


def test_a10_the_reference_changes_the_gradient_and_padding_never_counts():
    logps, mask = torch.zeros(1, 3), tensor([[1, 1, 0]])
    grads = [gradient(lambda x: aggregate(kl_estimate(x, tensor([[.5, d, 20.]]), mask=mask)[0], mask), logps)[0] for d in (.5, -.5)]
    assert torch.allclose(grads[0], tensor([[1 - math.exp(.5), 1 - math.exp(.5), 0.]]) / 2) and torch.allclose(grads[1][0, 1], tensor((1 - math.exp(-.5)) / 2))
    assert kl_estimate(logps, tensor([[.5, .5, 20.]]), mask=mask)[1] == 0


@pytest.mark.parametrize("kind,biased", [("k1", False), ("k2", True), ("k3", False)])
def test_kl_estimates_on_average(kind, biased):
    "Over the exact distribution: k1 and k3 are unbiased values; k2 and k3 have a useful gradient, k1's is 0."
    p, q = tensor([.5, .3, .2], dtype=torch.float64).log(), tensor([.3, .3, .4], dtype=torch.float64).log()
    expected = (p.exp() * kl_estimate(p[None], q[None], kind)[0][0]).sum()
    assert (abs(expected - reverse_kl(p, q)) < 1e-9) != biased
    (grad,) = gradient(lambda z: (p.exp() * kl_estimate(z.log_softmax(-1)[None], q[None], kind)[0][0]).sum(), p)
    (true,) = gradient(lambda z: reverse_kl(z, q), p)
    assert grad.abs().max() < 1e-9 if kind == "k1" else torch.allclose(grad, true) if kind == "k2" else (grad * true).sum() > 0


def test_a11_temperature_on_both_sides():
    z, ids = tensor([[3., 1., 0.]]), tensor([0])
    sampled = token_logps(z, ids, temperature=.6)
    assert sampled.item() == pytest.approx(-.0415, abs=1e-4)
    assert (token_logps(z, ids, temperature=.6) - sampled).exp().item() == 1.
    assert (sampled - token_logps(z, ids)).exp().item() == pytest.approx(1.1369, abs=1e-4)


@pytest.mark.parametrize("mode,kept", [("truncate", 3.), ("mask", 0.)])
def test_a12_ratio_cap(mode, kept):
    trainer, mask = torch.full((1, 100), -1.), torch.ones(1, 100)
    raw, none = importance_weights(trainer, trainer - .012, mask, level="sequence", cap=None)
    assert raw.item() == pytest.approx(3.3201, abs=1e-3) and none == 0
    weights, capped_frac = importance_weights(trainer, trainer - .012, mask, level="sequence", cap=3., mode=mode)
    assert weights.item() == kept and capped_frac == 1.
    token, token_frac = importance_weights(trainer, trainer - .012, mask, cap=3., mode=mode)
    assert torch.allclose(token, torch.full((1, 100), 1.0121), atol=1e-4) and token_frac == 0


def test_weights_carry_no_gradient():
    x = torch.full((1, 3), -1., requires_grad=True)
    assert not importance_weights(x, torch.full((1, 3), -2.), torch.ones(1, 3))[0].requires_grad


@pytest.mark.parametrize("how", ["grpo", "mean", ""])
def test_what_is_refused(how):
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match=f"got '{how}'"): aggregate(ones, ones, how)
    with pytest.raises(ValueError, match="max_length"): aggregate(ones, ones, "fixed_length")
    with pytest.raises(ValueError, match=r"x \(2,\), mask \(2, 2\)"): masked_mean(ones[0], ones)      # would broadcast
    with pytest.raises(ValueError, match=r"logps \(2, 2\), old_logps \(1, 2\)"): clipped_surrogate(ones, ones[:1], ones[0])
    with pytest.raises(ValueError, match=r"advantages \(3,\)"): cispo_loss(ones, ones, torch.ones(3))
    with pytest.raises(ValueError, match="old_values, got None"): value_loss(ones, None, ones, ones, clip=.2)
    with pytest.raises(ValueError, match="level"): importance_weights(ones, ones, ones, level="row")
    with pytest.raises(ValueError, match="kind"): kl_estimate(ones, ones, "k4")
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"): token_logps(ones[None], torch.zeros(1, 2, dtype=torch.long), 0)
    with pytest.raises(ValueError, match="dual_clip must be above"): ratio_surrogate(ones, ones, dual_clip=1.)
