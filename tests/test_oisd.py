"Invariants of OISD, by the card's numbers and numbering; those of the single formulas stand in nbs/13_oisd.ipynb as well."
import copy, math
from types import SimpleNamespace
import pytest
import torch
from tiny import random_model
from rlworkbench.advantages import group_advantages
from rlworkbench.experiment import describe, evaluate
from rlworkbench.losses import jsd
from rlworkbench.method import Compose, Method, Step
from rlworkbench.methods.oisd import OISD, Lens, by_sign, lens_report, look_divergence, shuffled, sign_weights, think_divergence, weighted_mean
from rlworkbench.policies import add_lora, load_policy
from rlworkbench.rollouts import split_head
from rlworkbench.trainer import Looks, Trainer, training_config
from rlworkbench.worlds.base import make_world

LAYERS, P, T = 4, 5, 6
WORLD = make_world("chain", steps=2)


@pytest.fixture(scope="module")
def policy(): return load_policy("chain-deep", device="cpu")


@pytest.fixture
def model():
    model = random_model(width=64, layers=LAYERS).double()
    with torch.no_grad(): model.model.norm.weight.copy_(torch.linspace(.5, 2., 64))   # with equal weights a second norm would do nothing
    return model


def batch(pad=0, seed=0):
    "Four rollouts of several lengths; `pad` columns more of left padding."
    g = torch.Generator().manual_seed(seed)
    ids, lengths = torch.randint(3, 19, (4, P + T), generator=g), torch.tensor([6, 4, 1, 5])
    seen = torch.ones_like(ids)
    for row, n in zip(seen, lengths): row[P + n:] = 0
    return torch.cat([torch.zeros(4, pad, dtype=ids.dtype), ids*seen], 1), torch.cat([torch.zeros(4, pad, dtype=ids.dtype), seen], 1)


ADVANTAGES = torch.tensor([1.5, -.5, .25, -1.25], dtype=torch.float64)


def step_of(model, method, advantages=ADVANTAGES, pad=0):
    "What the trainer would hand to `auxiliary_loss`, from one forward pass."
    ids, seen = batch(pad)
    with Looks(model, method.wants) as looks: model(ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp_min(0))
    hidden, layers, attentions = looks.take(T)
    mask = seen[:, -T:]
    run = SimpleNamespace(policy=SimpleNamespace(model=model), args=SimpleNamespace(seed=0), state=SimpleNamespace(global_step=0), log={})
    run.log_metric = lambda name, value: run.log.update({name: value})
    if method._lens is None: method._lens = Lens(model)
    return Step(None, None, None, None, None, mask, (advantages[:, None]*mask), hidden, run, layers, attentions)


def gradients(model, loss):
    named = dict(model.named_parameters())
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), torch.autograd.grad(loss, list(named.values()), allow_unused=True))}


def loss_of(model, method, **kw): return method.auxiliary_loss(step_of(model, method, **kw))


def run(policy, out, method, *, updates=2, learning_rate=1e-3, **settings):
    args = training_config(out, num_problems=2, num_generations=4, updates=updates, seed=3, max_completion_length=20, learning_rate=learning_rate, **{**method.training, **settings})
    trainer = Trainer(copy.deepcopy(policy), WORLD, WORLD.problems(8, seed=1), method, args)
    trainer.train()
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ---------------------------------------------------------------- 1: nothing to learn, and switched off
@pytest.mark.parametrize("weights", (dict(lambda_attn=0), dict(lambda_think=0), dict()))
def test_i1_without_advantages_there_is_no_loss_and_no_gradient(model, weights):
    loss = loss_of(model, OISD(**weights), advantages=torch.zeros(4, dtype=torch.float64))
    assert loss.item() == 0 and all((g == 0).all() for g in gradients(model, loss).values())
    assert max(g.abs().max() for g in gradients(model, loss_of(model, OISD(**weights))).values()) > 1e-4


def test_i1_with_both_weights_zero_it_is_grpo_token_for_token(policy, tmp_path):
    texts = {}
    class Ear(Method):
        def __init__(self): self.heard = []
        def rewards(self, rollouts, rewards): self.heard.append(rollouts.completion_ids.tolist()); return rewards
    plain, off = (run(policy, tmp_path/name, Compose(method, Ear())) for name, method in (("a", Method()), ("b", OISD(lambda_think=0, lambda_attn=0))))
    assert plain.method[Ear].heard == off.method[Ear].heard and same(plain.policy.model, off.policy.model)
    assert OISD(lambda_think=0, lambda_attn=0).wants == ()


def test_i1_watching_trains_nothing(policy, tmp_path):
    plain, watched = run(policy, tmp_path/"a", Method(), updates=1), run(policy, tmp_path/"b", OISD(lambda_think=0, lambda_attn=0, watch=True, probe=(1, 5)), updates=1)
    assert torch.equal(plain.rollouts.completion_ids, watched.rollouts.completion_ids)
    for a, b in zip(plain.policy.model.parameters(), watched.policy.model.parameters()): torch.testing.assert_close(a, b, atol=1e-4, rtol=0)   # explicit attention rounds otherwise
    log = watched.state.log_history[0]
    assert {"jsd_think_pos", "jsd_think_neg", "jsd_attn_pos", "jsd_attn_neg", "lens_jsd_1", "lens_agree_5", "lens_entropy_5"} <= set(log) and "auxiliary_loss" not in log
    assert .3 < log["jsd_think_pos"] < math.log(2) and log["lens_jsd_5"] < log["lens_jsd_1"]


# ---------------------------------------------------------------- 2: the last layer has nothing to learn from itself
def test_i2_the_last_block_as_student(model):
    far, own = OISD(layer=2), OISD(layer=LAYERS)
    loss = loss_of(model, own)
    assert abs(loss.item()) < 1e-10
    assert max(g.abs().max() for g in gradients(model, loss).values()) < 1e-7
    assert max(g.abs().max() for g in gradients(model, loss_of(model, far)).values()) > 1e-3


# ---------------------------------------------------------------- 3, 4: the divergence and its gradient
def logs(*p): return torch.tensor(p, dtype=torch.float64).log()


def test_i3_values():
    p = logs(.7, .2, .1)
    for q, wanted in ((logs(.4, .4, .2), .0462008), (logs(.1, .2, .7), .2531016)):
        assert abs(jsd(p, q).item() - wanted) < 1e-7 and abs(jsd(q, p).item() - wanted) < 1e-7
    a, b = torch.tensor([1., 0.]), torch.tensor([0., 1.])
    assert abs(look_divergence(a[None, None, None], b[None, None, None]).item() - .6931472) < 1e-6


def test_i4_gradient_for_the_logits_of_the_student():
    z = logs(.4, .4, .2).requires_grad_()
    jsd(z, logs(.7, .2, .1)).backward()
    torch.testing.assert_close(z.grad, torch.tensor([-.0727363, .0484909, .0242454], dtype=torch.float64), atol=1e-7, rtol=0)
    assert abs(z.grad.sum()) < 1e-12
    z = logs(.4, .4, .2).requires_grad_()                # the same numbers through the softmax of an attention
    look_divergence(z.softmax(-1)[None, None, None], logs(.7, .2, .1).exp()[None, None, None]).sum().backward()
    torch.testing.assert_close(z.grad, torch.tensor([-.0727363, .0484909, .0242454], dtype=torch.float64), atol=1e-7, rtol=0)


# ---------------------------------------------------------------- 5: the signed weight
def test_i5_token_mean_of_signed_divergences():
    d, A, mask = torch.tensor([[.0462008, .2531016], [.2531016, 9.]]), torch.tensor([[1., 1.], [-1., -1.]]), torch.tensor([[1, 1], [1, 0]])
    for mode, wanted in dict(signed=.0154003, abs=.1841347, positive=.0997675).items(): assert abs(weighted_mean(d, A, mask, mode).item() - wanted) < 1e-6
    assert abs(((.0462008 + .2531016)/2 - .2531016)/2 + .0517252) < 1e-6          # the mean of the rollouts' means is another number
    rows = [weighted_mean(d[k:k+1], A[k:k+1], mask[k:k+1]).item()*int(mask[k].sum()) for k in (0, 1)]
    assert abs(sum(rows)/3 - .0154003) < 1e-6
    assert weighted_mean(d, A, torch.zeros_like(mask)) == 0                       # nothing trained


@pytest.mark.parametrize("mode", ("signed", "positive", "abs"))
def test_i5_the_method_uses_the_mode_and_gradients_stay_off_the_weights(model, mode):
    method = OISD(sign_mode=mode, lambda_attn=0)
    step = step_of(model, method)
    d = think_divergence(method._lens, method._lens.head, step.layers[2], step.hidden, step.mask)
    wanted = (d*sign_weights(step.advantages, mode)).sum()/step.mask.sum()
    torch.testing.assert_close(method.auxiliary_loss(step), wanted)
    assert not sign_weights(torch.ones(2, requires_grad=True), mode).requires_grad


@pytest.mark.parametrize("sign", (1, -1))
def test_i5_better_rollouts_come_nearer_and_worse_ones_go_away(model, sign):
    method, A = OISD(lambda_attn=0), sign*torch.ones(4, dtype=torch.float64)
    step = step_of(model, method, advantages=A)
    teacher, before = method._lens.head(step.hidden).detach(), step.mask.bool()
    far = jsd(method._lens(step.layers[2]), teacher)[before].mean().item()
    for _ in range(5):                                   # the teacher is held: blocks that both share would move it as well
        for p, g in zip(model.parameters(), gradients(model, weighted_mean(jsd(method._lens(step.layers[2]), teacher), step.advantages, step.mask)).values()): p.data -= .002*g
        step = step_of(model, method, advantages=A)
        now = jsd(method._lens(step.layers[2]), teacher)[before].mean().item()
        assert (now - far)*sign < -1e-5 and now < math.log(2)
        far = now


# ---------------------------------------------------------------- 6: where the gradient goes
def test_i6_think_reaches_nothing_above_the_taught_block(model):
    found = gradients(model, loss_of(model, OISD(layer=2, lambda_attn=0)))
    for n, g in found.items():
        if ".layers." in n and int(n.split(".")[2]) >= 2: assert (g == 0).all(), n
        elif n != "lm_head.bias": assert g.abs().max() > 0, n                     # blocks 1 and 2, embedding, norm, head


def test_i6_look_reaches_queries_and_keys_only(model):
    found = gradients(model, loss_of(model, OISD(layer=2, lambda_think=0)))
    for n, g in found.items():
        own = n.startswith("model.layers.1.")
        moved = n == "model.embed_tokens.weight" or n.startswith("model.layers.0.") or own and any(k in n for k in ("q_proj", "k_proj", "q_norm", "k_norm", "input_layernorm"))
        assert (g.abs().max() > 0) == moved, n


def test_i6_the_look_at_block_one_does_not_move_its_values_either(model):
    found = gradients(model, loss_of(model, OISD(layer=1, lambda_think=0)))
    assert {n.split(".")[-2] for n, g in found.items() if g.abs().max() > 0} == {"embed_tokens", "input_layernorm", "q_proj", "k_proj", "q_norm", "k_norm"}


def test_i6_a_detached_head_learns_nothing_and_the_blocks_learn_the_same(model):
    free, fixed = (gradients(model, loss_of(model, OISD(layer=2, lambda_attn=0, detach_head=d))) for d in (False, True))
    for n in ("model.norm.weight", "lm_head.weight", "lm_head.bias"): assert free[n].abs().max() > 0 and (fixed[n] == 0).all(), n
    for n in free:
        if ".layers." in n: torch.testing.assert_close(free[n], fixed[n], atol=1e-12, rtol=1e-9)


# ---------------------------------------------------------------- 7: the teacher is a constant
def test_i7_a_constant_copy_of_the_teacher_gives_the_same_gradients(model):
    method = OISD(layer=2)
    wanted = gradients(model, loss_of(model, method))
    step, other = step_of(model, method), step_of(model, method)
    logits, looks = method._lens.head(other.hidden).detach().clone(), other.attentions[LAYERS].detach().clone()
    think = jsd(method._lens(step.layers[2]), logits)
    loss = weighted_mean(think, step.advantages, step.mask) + .1*weighted_mean(look_divergence(step.attentions[2], looks), step.advantages, step.mask)
    for n, g in gradients(model, loss).items(): torch.testing.assert_close(g, wanted[n], atol=1e-12, rtol=1e-9)
    step = step_of(model, method)                        # and with a teacher that learns they would be others
    p, q = method._lens.head(step.hidden).log_softmax(-1), method._lens(step.layers[2]).log_softmax(-1)
    m = torch.logaddexp(p, q) - math.log(2)
    both = ((p.exp()*(p - m) + q.exp()*(q - m)).sum(-1)/2)
    torch.testing.assert_close(both*step.mask, think.detach()*step.mask)
    assert gradients(model, weighted_mean(both, step.advantages, step.mask))["model.layers.3.mlp.up_proj.weight"].abs().max() > 1e-3


# ---------------------------------------------------------------- 8: heads
def test_i8_heads_are_averaged_first():
    student, teacher = torch.tensor([[.8, .2, 0.], [.2, .3, .5]])[None, None], torch.tensor([.1, .2, .7]).expand(1, 1, 2, 3)
    assert abs(look_divergence(student, teacher).item() - .1296538) < 1e-6
    assert abs(look_divergence(student, teacher, "each").item() - .2097222) < 1e-6
    torch.testing.assert_close(student.mean(2)[0, 0], torch.tensor([.5, .25, .25]))
    assert look_divergence(student.flip(2), teacher) == look_divergence(student, teacher)


def test_i8_the_method_takes_the_setting(model):
    each, mean = (loss_of(model, OISD(lambda_think=0, heads=h)).item() for h in ("each", "mean"))
    step = step_of(model, method := OISD(lambda_think=0))
    for got, h in ((each, "each"), (mean, "mean")):
        assert abs(got - .1*weighted_mean(look_divergence(step.attentions[2], step.attentions[LAYERS], h), step.advantages, step.mask).item()) < 1e-12
    assert abs(each - mean) > 1e-4


# ---------------------------------------------------------------- 9: which positions count
def test_i9_only_states_that_predict_trained_tokens_count(model):
    method = OISD(layer=2)
    step = step_of(model, method)
    before = method.auxiliary_loss(step)
    off = (step.mask == 0)
    for d in (step.layers, step.attentions):
        for l in d: d[l] = torch.where(off.view(*off.shape, *[1]*(d[l].dim() - 2)), torch.rand_like(d[l]), d[l])
    step.hidden = torch.where(off[..., None], torch.randn_like(step.hidden), step.hidden)
    assert torch.equal(method.auxiliary_loss(step), before)
    step.layers[2] = step.layers[2] + (~off)[..., None]*torch.eye(1, 64, dtype=torch.float64)
    assert not torch.allclose(method.auxiliary_loss(step), before)


def test_i9_the_first_column_is_the_last_state_of_the_prompt(model):
    method = OISD(layer=2)
    step, (ids, seen) = step_of(model, method), batch()
    with torch.no_grad(): out = model(ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp_min(0), output_hidden_states=True)
    real = step.mask.bool()
    torch.testing.assert_close(step.layers[2].detach()[real], out.hidden_states[2][:, P - 1:-1][real], atol=1e-5, rtol=1e-4)   # fast attention rounds otherwise
    torch.testing.assert_close(method._lens.head(step.hidden).detach()[real], out.logits[:, P - 1:-1][real].double(), atol=1e-4, rtol=1e-4)


def test_i9_padding_changes_nothing(model):
    model = model.float()                                # explicit attention over padding is NaN in float64: its mask does not fit the float32 of its softmax
    plain, padded = (loss_of(model, OISD(layer=2), pad=pad) for pad in (0, 3))
    torch.testing.assert_close(plain, padded, atol=1e-6, rtol=1e-5)
    for a, b in zip(gradients(model, plain).values(), gradients(model, padded).values()): torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_i9_chunks_change_nothing(model):
    whole, parts = (gradients(model, loss_of(model, OISD(lambda_attn=0, chunk=n))) for n in (8192, 3))
    for n in whole: torch.testing.assert_close(whole[n], parts[n], atol=1e-12, rtol=1e-9)


# ---------------------------------------------------------------- 10: the convention of the advantages
def test_i10_advantages_are_over_the_sample_deviation():
    a = group_advantages(torch.tensor([1., 0., 0., 0.]), torch.zeros(4, dtype=torch.long), eps=0)
    torch.testing.assert_close(a, torch.tensor([1.5, -.5, -.5, -.5]))
    r = torch.tensor([1., 0., 0., 0.])
    torch.testing.assert_close((r - r.mean())/r.std(correction=0), torch.tensor([1.7321, -.5774, -.5774, -.5774]), atol=1e-4, rtol=0)   # the other convention


# ---------------------------------------------------------------- the lens, the placebo, the trap
def test_the_norm_is_applied_once(model):
    lens, step = Lens(model), step_of(model, OISD(layer=LAYERS, lambda_attn=0))
    torch.testing.assert_close(lens(step.layers[LAYERS]), lens.head(step.hidden))          # block L, normed once, is the final state
    assert (lens(step.hidden) - lens.head(step.hidden)).abs().max() > .1                    # normed twice it is not
    assert lens_report(lens, {LAYERS: step.layers[LAYERS]}, step.hidden, step.mask)[f"lens_agree_{LAYERS}"] == 1
    with pytest.raises(ValueError, match="Linear has none of norm, final_layernorm"): Lens(SimpleNamespace(get_decoder=lambda: torch.nn.Linear(1, 1), get_output_embeddings=lambda: None, config=SimpleNamespace(get_text_config=lambda: None)))


def test_tied_embeddings_move_with_the_lens(policy):
    method, tied = OISD(layer=1, lambda_attn=0), policy.model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    ids = torch.randint(3, 15, (2, 9))
    def grad(frozen):
        with Looks(tied, method.wants) as looks: tied(ids)
        hidden, layers, _ = looks.take(4)
        lens = Lens(tied)
        d = think_divergence(lens.fixed if frozen else lens, lens.head, layers[1].detach(), hidden, torch.ones(2, 4))   # the state is held, so only norm and head are left
        return torch.autograd.grad(d.sum(), tied.model.embed_tokens.weight, allow_unused=True)[0] if d.requires_grad else None
    assert grad(False).abs().max() > 0 and grad(True) is None


def test_shuffled_keeps_the_sizes_and_the_generators():
    A, mask = torch.tensor([[2., 2., 0.], [-1., -1., -1.], [0., 0., 0.], [-1., 0., 0.]]), torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]])
    torch.manual_seed(0); first = torch.rand(1); torch.manual_seed(0)
    mixed = shuffled(A, mask, seed=1)
    assert torch.rand(1) == first
    assert sorted(mixed[:, 0].tolist()) == [-1, -1, 0, 2] and (mixed == mixed[:, :1]).all()
    assert torch.equal(mixed, shuffled(A, mask, seed=1)) and any(not torch.equal(mixed, shuffled(A, mask, seed=s)) for s in (2, 3, 4))


def test_shuffled_pulls_otherwise_but_reports_by_the_true_sign(model):
    true, mixed = OISD(lambda_attn=0), OISD(lambda_attn=0, shuffle=True)
    a, b = step_of(model, true), step_of(model, mixed)
    assert not torch.allclose(true.auxiliary_loss(a), mixed.auxiliary_loss(b)) and a.run.log == b.run.log


def test_masked_keys_do_nothing():
    z = torch.tensor([[1., 2., -math.inf], [3., -math.inf, -math.inf]]).requires_grad_()
    teacher = torch.tensor([[.9, .1, 0.], [1., 0., 0.]])
    d = look_divergence(z.softmax(-1)[None, :, None], teacher[None, :, None])
    d.sum().backward()
    assert z.grad.isfinite().all() and (z.grad[z.isinf()] == 0).all() and z.grad[0, 0].abs() > .01 and d[0, 1] < 1e-6


def test_by_sign_leaves_out_what_does_not_occur():
    d, A, mask = torch.tensor([[.1, .3], [.5, .7]]), torch.tensor([[1., 1.], [0., 0.]]), torch.tensor([[1, 0], [1, 1]])
    assert by_sign(d, A, mask) == {"pos": pytest.approx(.1)} and by_sign(d, A*0, mask) == {}


# ---------------------------------------------------------------- in the trainer
def test_two_updates_repeat_and_are_finite(policy, tmp_path):
    first, second = (run(policy, tmp_path/name, OISD()) for name in "ab")
    assert same(first.policy.model, second.policy.model) and all(p.isfinite().all() for p in first.policy.model.parameters())
    assert not same(first.policy.model, run(policy, tmp_path/"c", Method()).policy.model) and first.method.state_dict() == {}


def test_works_beside_another_method_and_under_lora(policy, tmp_path):
    class Shorter(Method):
        def rewards(self, rollouts, rewards): return rewards - .01*rollouts.lengths
    trainer = run(policy, tmp_path/"a", Compose(Shorter(), OISD(probe=(3,))))
    assert "jsd_think_pos" in trainer.state.log_history[0] and trainer.state.log_history[0]["auxiliary_loss"] != 0
    adapted = copy.deepcopy(policy); adapted.model = add_lora(adapted.model, 4)
    trainer = run(adapted, tmp_path/"b", OISD())
    assert trainer.state.log_history[0]["auxiliary_loss"] != 0 and all(p.isfinite().all() for p in trainer.policy.model.parameters())


def test_slices_of_a_batch_give_the_mean_of_their_losses(policy, tmp_path):
    "Gradient accumulation: every slice is divided by its own tokens, and the slices by their number, as in the trainer's own loss."
    found = []
    class Watched(OISD):
        def auxiliary_loss(self, step):
            loss = super().auxiliary_loss(step)
            decoder, head, _ = split_head(step.run.model)
            with torch.no_grad():
                p, q = (head(x).log_softmax(-1) for x in (step.hidden, decoder.norm(step.layers[self.layer])))
                m = torch.logaddexp(p, q) - math.log(2)
                d = ((p.exp()*(p - m)).sum(-1) + (q.exp()*(q - m)).sum(-1))/2
                found.append((loss.item(), ((step.advantages*d*step.mask).sum()/step.mask.sum()).item(), int(step.mask.sum())))
            return loss
    trainer = run(policy, tmp_path, Watched(lambda_attn=0), updates=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    (a, by_hand_a, n_a), (b, by_hand_b, n_b) = found
    assert a == pytest.approx(by_hand_a, abs=1e-5) and b == pytest.approx(by_hand_b, abs=1e-5) and abs(a) + abs(b) > 1e-4
    assert trainer.state.log_history[0]["auxiliary_loss"] == pytest.approx((a + b)/2, abs=1e-6)
    assert n_a != n_b and abs((a + b)/2 - (a*n_a + b*n_b)/(n_a + n_b)) > 1e-6      # the mean over all tokens would be another number


def test_what_cannot_work_is_refused_by_name(policy, tmp_path):
    for layer in (0, 6, 7, -1):
        with pytest.raises(ValueError, match=f"layer={layer}: .*choose from 1 to 5"): run(policy, tmp_path, OISD(layer=layer))
    with pytest.raises(ValueError, match="needs gradient_checkpointing=False"): run(policy, tmp_path, OISD(), gradient_checkpointing=True)
    with pytest.raises(ValueError, match="sign_mode='both' is unknown: use one of signed, positive, abs"): OISD(sign_mode="both")
    with pytest.raises(ValueError, match="heads='sum'"): OISD(heads="sum")
    with pytest.raises(ValueError, match="lambda_attn=-1"): OISD(lambda_attn=-1)
    with pytest.raises(ValueError, match="must all be .B,T."): weighted_mean(torch.ones(2, 2), torch.ones(2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="must both be .B,T,heads,K."): look_divergence(torch.ones(2, 3, 4), torch.ones(2, 3, 4))


def test_arms_are_told_apart_by_their_settings():
    found = [describe(m) for m in (OISD(), OISD(sign_mode="abs"), OISD(shuffle=True), OISD(layer=3), OISD(lambda_attn=.2), OISD(heads="each"), OISD(detach_head=True))]
    assert all(found[0] != other for other in found[1:]) and not any(k.startswith("_") for k in found[0])


def test_the_shipped_policy_has_something_to_choose_and_layers_to_read(policy):
    world = make_world("chain", steps=4)
    start = evaluate(policy, world, world.problems(64, seed=0, split="test"), samples=8, max_completion_length=44)
    text = "".join(start.completions)
    assert .25 < start.accuracy < .45 and start.mixed_frac > .7                       # 512 samples carry two points, problems as much again
    assert .4 < text.count("[")/(text.count("[") + text.count(">")) < .6
    assert policy.model.config.num_hidden_layers == 6 and policy.n_params < 350_000
