"Invariants of REFT by the card's numbers, and what needs a sampler or a trainer."
import copy, math
from types import SimpleNamespace
import pytest
import torch
from rlworkbench.advantages import group_advantages
from rlworkbench.experiment import describe
from rlworkbench.method import Compose, Method
from rlworkbench.methods.reft import (REFT, OpenerSampler, all_wrong_iid, all_wrong_reft, allot, draw_openers, expected_distinct, first_clip, group_figures,
                                      opener_candidates, proposal_weight)
from rlworkbench.policies import Recipe, Stage, train_recipe
from rlworkbench.rollouts import TorchSampler
from rlworkbench.stats import pass_at_k
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world
from tests.tiny import constant_model, letters, random_model

WORLD = make_world("countdown")
MINI = Recipe("mini", "countdown", (Stage(25, 1e-2),), width=32, layers=1, context=64)
TOKENIZER = letters()      # 26 letters and signs behind <pad>, <bos>, <eos>


@pytest.fixture(scope="module")
def weights(): return train_recipe(MINI, progress=False)


class Parity(Method):
    "Rewards that do not depend on skill: the mini policy is never right, and without both outcomes nothing moves."
    def rewards(self, rollouts, rewards): return (rollouts.completion_ids.sum(1) % 2).float()


def prompts(policy, n, G): return [policy.encode(p.prompt) for p in WORLD.problems(n, seed=7) for _ in range(G)], torch.arange(n).repeat_interleave(G)


def run(weights, out, method, *, updates=3, seed=3, resume=None, save_steps=0, num_generations=4, **settings):
    args = training_config(out, num_problems=2, num_generations=num_generations, updates=updates, seed=seed, max_completion_length=14, learning_rate=1e-3,
                           save_steps=save_steps, **{**method.training, **settings})
    trainer = Trainer(copy.deepcopy(weights), WORLD, WORLD.problems(16, seed=1), method, args)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.policy.model.state_dict().values(), b.policy.model.state_dict().values(), strict=True))


def sampler(policy, seed=0, length=14, inner=None, **kw):
    torch.manual_seed(seed)
    return OpenerSampler(TorchSampler(policy.model, policy.tokenizer, length, **(inner or {})), **kw)


# ---------------------------------------------------------------- 1: K openers, each G/K times, among the top N
@pytest.mark.parametrize("k,n,G", ((4, 8, 8), (2, 8, 8), (1, 3, 4), (4, 20, 8)))
def test_i1_each_group_has_k_openers_of_the_top_n(weights, k, n, G):
    ids, group = prompts(weights, 6, G)
    r = sampler(weights, k=k, n=n).sample(ids, group=group)
    with torch.no_grad(): logits = weights.model(r.prompt_ids, attention_mask=r.prompt_mask, position_ids=(r.prompt_mask.cumsum(1) - 1).clamp_min(0)).logits[:, -1]
    logits[:, weights.tokenizer.all_special_ids] = -math.inf
    for g in range(6):
        first = r.completion_ids[group == g, 0]
        ids_, counts = first.unique(return_counts=True)
        assert len(ids_) == k and (counts == G//k).all()
        assert set(ids_.tolist()) <= set(logits[group == g][0].topk(n).indices.tolist())
    assert (r.policy_mask[:, 0] == 1).all() and (r.completion_mask[:, 0] == 1).all()
    assert (r.extras["opener_rank"] <= n + 3).all()


def test_i1_in_any_order_of_the_rows(weights):
    ids, group = prompts(weights, 4, 4)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    r = sampler(weights, k=4).sample([ids[i] for i in order], group=group[order])
    for g in range(4): assert len(r.completion_ids[group[order] == g, 0].unique()) == 4


def test_ranking_bans_special_tokens_and_breaks_ties_by_id():
    logits = torch.tensor([[9., 1., 9., 5., 5., 7., -1.]])
    assert opener_candidates(logits, 3).tolist() == [[0, 2, 5]]
    assert opener_candidates(logits, 3, {0, 2}).tolist() == [[5, 3, 4]]
    assert opener_candidates(logits, 99, {0}).tolist() == [[2, 5, 3, 4, 1, 6]]      # fewer than n are left: all of them
    assert logits[0, 0] == 9.                                                      # the input stays as it was
    assert opener_candidates(logits/2, 4).tolist() == opener_candidates(logits, 4).tolist()


def test_an_end_token_never_opens(weights):
    model = constant_model([5., 4., 6., *[0.]*25, 3.])                 # <eos> is the likeliest token everywhere
    policy = SimpleNamespace(model=model, tokenizer=TOKENIZER)
    r = sampler(policy, k=4, n=8).sample([[1, 5]]*32, group=torch.arange(4).repeat_interleave(8))
    assert not set(r.completion_ids[:, 0].tolist()) & {0, 1, 2}
    assert 28 in r.completion_ids[:, 0].tolist()
    banned = sampler(policy, k=4, n=8, banned=(28,)).sample([[1, 5]]*32, group=torch.arange(4).repeat_interleave(8))
    assert 28 not in banned.completion_ids[:, 0].tolist()


# ---------------------------------------------------------------- 2: what does not divide
def test_i2_a_group_that_does_not_divide_is_refused(weights, tmp_path):
    with pytest.raises(ValueError, match="num_generations=6 rollouts do not divide among k=4"): allot(torch.zeros(1, 4), 6)
    with pytest.raises(ValueError, match="num_generations=6"): run(weights, tmp_path, REFT(), num_generations=6)
    ids, group = prompts(weights, 2, 4)
    with pytest.raises(ValueError, match="whole groups"): sampler(weights).sample(ids[:7], group=group[:7])
    with pytest.raises(ValueError, match="two different prompts"): sampler(weights).sample(ids, group=torch.zeros(8))
    with pytest.raises(ValueError, match="`forced`"): sampler(weights).sample(ids, group=group, forced=[[3]]*8)


@pytest.mark.parametrize("bad,message", ((dict(opener_mode="greedy"), "opener_mode"), (dict(opener_loss="drop"), "opener_loss"), (dict(k=0), "k=0"), (dict(k=9), "k=9")))
def test_bad_settings_are_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message): REFT(**bad)


def test_too_few_candidates_are_refused():
    with pytest.raises(ValueError, match="k=4"): draw_openers(torch.tensor([[1, 2, 3]]), torch.rand(1, 3), 4)


# ---------------------------------------------------------------- 3: the limits
def test_i3_one_opener_is_the_argmax_and_all_openers_occur_once(weights):
    ids, group = prompts(weights, 5, 8)
    one, every = sampler(weights, k=1, n=1).sample(ids, group=group), sampler(weights, k=8, n=8).sample(ids, group=group)
    with torch.no_grad(): logits = weights.model(one.prompt_ids, attention_mask=one.prompt_mask, position_ids=(one.prompt_mask.cumsum(1) - 1).clamp_min(0)).logits[:, -1]
    logits[:, weights.tokenizer.all_special_ids] = -math.inf
    assert torch.equal(one.completion_ids[:, 0], logits.argmax(-1))
    for g in range(5): assert sorted(every.completion_ids[group == g, 0].tolist()) == sorted(logits[group == g][0].topk(8).indices.tolist())


# ---------------------------------------------------------------- 4: the placebo, and switched off
def test_i4_policy_mode_draws_like_the_policy():
    p = torch.tensor([.57, .2, .1, .06, .04, .02, .01])
    model = constant_model([-30., -30., -30., *p.log().tolist(), *[-30.]*18])
    policy = SimpleNamespace(model=model, tokenizer=None)
    seen = torch.zeros(7)
    s = sampler(policy, length=1, opener_mode="policy")
    for _ in range(4): seen += torch.bincount(s.sample([[1]]*4096, group=torch.arange(512).repeat_interleave(8)).completion_ids[:, 0] - 3, minlength=7)
    chi2 = ((seen - 16384*p)**2/(16384*p)).sum().item()
    assert chi2 < 22.5, seen        # 6 degrees of freedom: 99.9 %


def test_i4_forcing_what_the_policy_drew_changes_nothing(weights):
    "The same openers, forced: same tokens, log-probs and mask as the plain sampler, so the update is GRPO's."
    ids, group = prompts(weights, 4, 8)
    torch.manual_seed(5)
    plain = TorchSampler(weights.model, weights.tokenizer, 14).sample(ids, group=group)
    class Given(OpenerSampler):
        def pick(self, prompt_ids, G): return plain.completion_ids[:, 0].view(-1, G)
    torch.manual_seed(5)
    ours = Given(TorchSampler(weights.model, weights.tokenizer, 14)).sample(ids, group=group)
    for name in ("completion_ids", "completion_mask", "policy_mask", "stop"): assert torch.equal(getattr(ours, name), getattr(plain, name)), name
    torch.testing.assert_close(ours.logps, plain.logps)
    assert ours.n_new == plain.n_new


def test_off_is_grpo_token_for_token(weights, tmp_path):
    plain, off = run(weights, tmp_path/"a", Parity()), run(weights, tmp_path/"b", Compose(Parity(), REFT(opener_mode="off")))
    assert not all(torch.equal(a, b) for a, b in zip(plain.policy.model.parameters(), weights.model.parameters()))
    assert torch.equal(plain.rollouts.completion_ids, off.rollouts.completion_ids) and same(plain, off)
    assert 0 < off.method.metrics()["opener_top1"] < 1 and off.n_sampled == plain.n_sampled


# ---------------------------------------------------------------- 5: marginals
def test_i5_each_candidate_is_in_a_fifth_of_the_groups():
    torch.manual_seed(0)
    n = 20000
    drawn = allot(draw_openers(torch.arange(20).expand(n, 20), torch.rand(n, 20), 4), 8)
    included = torch.stack([(drawn == v).any(1).float().mean() for v in range(20)])
    assert (included - .2).abs().max() < .012                                   # 4.2 standard errors of .0028
    assert torch.equal((drawn == 3).sum(1).unique(), torch.tensor([0, 2]))
    assert abs((drawn == 19).sum(1).float().mean() - .4) < .024


# ---------------------------------------------------------------- 6, 8: the numbers of the card
def test_i6_distinct_openers_of_ordinary_sampling():
    p = torch.tensor([.57, .20, .10, .05, .03, *[.005]*10])
    assert abs(expected_distinct(p, 8) - 3.3465) < 1e-4
    assert abs((p.double()**8).sum().item() - .01115) < 1e-5                     # all eight coincide
    assert abs(1 - (1 - .005)**8 - .0393) < 1e-4                                 # a given rare one appears
    torch.manual_seed(0)
    drawn = torch.multinomial(p, 8*20000, replacement=True).view(20000, 8)
    assert abs(group_figures(drawn.flatten(), torch.zeros(160000, dtype=torch.bool), torch.arange(20000).repeat_interleave(8))["n_openers"] - 3.3465) < .03


def test_i8_all_wrong_groups():
    assert abs(all_wrong_iid(.02, .8, 8) - .8789) < 1e-4                         # (1-.016)^8
    # 4 of 20 solve: j of the 4 drawn are among them with C(4,j)C(16,4-j)/C(20,4); each has two rollouts that both fail with .2^2
    assert abs(all_wrong_reft(20, 4, .8) - .3944) < 1e-4
    assert all_wrong_reft(8, 8, .5, 4, 8) == .5**8 and all_wrong_reft(8, 0, .5) == 1.
    torch.manual_seed(0)
    openers = allot(draw_openers(torch.arange(20).expand(20000, 20), torch.rand(20000, 20), 4), 8)
    right = (openers < 4) & (torch.rand(20000, 8) < .8)
    found = group_figures(openers.flatten(), right.flatten(), torch.arange(20000).repeat_interleave(8))
    assert abs(found["all_wrong_frac"] - .3944) < .011 and found["n_openers"] == 4.


# ---------------------------------------------------------------- 7: the log-probability of the opener
@pytest.mark.parametrize("temperature", (1., 1.3))
def test_i7_old_logp_of_the_opener_is_the_policys(weights, temperature):
    ids, group = prompts(weights, 4, 8)
    r = sampler(weights, inner=dict(temperature=temperature)).sample(ids, group=group)
    with torch.no_grad(): logits = weights.model(r.prompt_ids, attention_mask=r.prompt_mask, position_ids=(r.prompt_mask.cumsum(1) - 1).clamp_min(0)).logits[:, -1]
    logps = (logits/temperature).log_softmax(-1).gather(1, r.completion_ids[:, :1])[:, 0]
    torch.testing.assert_close(r.logps[:, 0], logps, atol=1e-5, rtol=0)
    assert (r.logps[:, 0] - math.log(1/8)).abs().max() > .1                      # not that of the even draw


def test_i7_ratio_is_one_before_any_update(weights, tmp_path):
    seen = []
    class Watch(Method):
        def token_loss(self, step, loss):
            if not seen: seen.append(((step.logps - step.rollouts.logps)*step.mask, step.mask, step.rollouts.completion_mask))
            return loss
    run(weights, tmp_path, Compose(REFT(), Watch()), updates=1)
    gap, mask, real = seen[0]
    assert gap.abs().max() < 1e-4 and torch.equal(mask, real)


# ---------------------------------------------------------------- 9, 10, 11
@pytest.mark.parametrize("n,c,k,value", ((64, 16, 1, .25), (64, 16, 8, .91475), (64, 1, 8, .125), (8, 2, 4, .785714), (8, 0, 4, 0.), (8, 6, 4, 1.)))
def test_i9_pass_at_k(n, c, k, value): assert abs(pass_at_k(n, c, k) - value) < 1e-5


def test_i10_the_correction_would_undo_the_method():
    w = proposal_weight(torch.tensor([2.7e-5, .57]).log(), 20)
    torch.testing.assert_close(w, torch.tensor([5.4e-4, 11.4]))
    # the mean weight over the even draw is the mass of the candidates: on average the corrected update is the policy's own
    p = torch.tensor([.57, .2, .1, .06, .04, .02, .01])
    torch.testing.assert_close(proposal_weight(p.log(), 7).mean(), p.sum())


def test_i11_equal_rewards_teach_nothing(weights, tmp_path):
    for v in (0., 1.): assert (group_advantages(torch.full((16,), v), torch.arange(2).repeat_interleave(8)) == 0).all()
    class Same(Method):
        def rewards(self, rollouts, rewards): return torch.zeros_like(rewards)
    t = run(weights, tmp_path, Compose(REFT(), Same()), updates=2)
    assert all(torch.equal(a, b) for a, b in zip(t.policy.model.parameters(), weights.model.parameters()))


# ---------------------------------------------------------------- the opener in the loss
def test_mask_takes_the_opener_out_of_loss_and_count(weights):
    ids, group = prompts(weights, 2, 8)
    keep, mask = (sampler(weights, opener_loss=how).sample(ids, group=group) for how in ("keep", "mask"))
    assert torch.equal(keep.completion_ids, mask.completion_ids)
    assert torch.equal(keep.policy_mask[:, 1:], mask.policy_mask[:, 1:]) and (mask.policy_mask[:, 0] == 0).all()
    assert keep.n_tokens - mask.n_tokens == 16 and keep.n_new == mask.n_new == int(keep.lengths.sum())


def test_the_opener_is_in_the_text(weights):
    ids, group = prompts(weights, 2, 4)
    r = sampler(weights).sample(ids, group=group)
    assert all(t.startswith(weights.tokenizer.decode([i])) for t, i in zip(r.completions, r.completion_ids[:, 0].tolist()))


@pytest.mark.parametrize("loss", ("keep", "mask"))
def test_gradient_of_a_right_opener_is_up_and_zero_when_masked(weights, tmp_path, loss):
    seen = []
    class Watch(Method):
        def rewards(self, rollouts, rewards): return (torch.arange(len(rewards)) % 4 == 0).float()
        def token_loss(self, step, loss):
            step.logps.retain_grad(); seen.append((step, loss)); return loss
    run(weights, tmp_path, Compose(REFT(opener_loss=loss), Watch()), updates=1)
    step, _ = seen[0]
    first = step.logps.grad[:, 0]
    if loss == "mask": assert (first == 0).all() and (step.logps.grad[:, 1] != 0).any()
    else: assert (first[step.advantages[:, 0] > 0] < 0).all() and (first[step.advantages[:, 0] < 0] > 0).all()   # the loss falls as a right opener becomes likelier


def test_clip_share_of_first_tokens():
    ratio, advantages = torch.tensor([1.3, 1.3, .7, .7, 1.1]), torch.tensor([1., -1., 1., -1., 1.])
    assert first_clip(ratio, advantages, torch.ones(5), .2, .2) == .4            # up with a gain, down with a loss
    assert first_clip(ratio, advantages, torch.tensor([1, 0, 0, 0, 1]), .2, .2) == .5
    assert math.isnan(first_clip(ratio, advantages, torch.zeros(5), .2, .2))


def test_figures_of_groups():
    f = group_figures(torch.tensor([3, 3, 4, 4, 5, 5, 5, 5, 9]), torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 1]).bool(), torch.tensor([2, 2, 2, 2, 7, 7, 7, 7, 0]))
    assert f == dict(all_wrong_frac=1/3, one_class_frac=2/3, n_openers=4/3)
    with pytest.raises(ValueError, match=r"must all be \(B,\)"): group_figures(torch.zeros(2), torch.zeros(3).bool(), torch.zeros(2))


# ---------------------------------------------------------------- training
def test_two_updates_are_finite_and_repeatable(weights, tmp_path):
    a, b = (run(weights, tmp_path/name, Compose(Parity(), REFT()), updates=2) for name in "ab")
    assert same(a, b) and all(torch.isfinite(p).all() for p in a.policy.model.parameters())
    assert not same(a, run(weights, tmp_path/"c", Compose(Parity(), REFT(opener_loss="mask")), updates=2))
    assert a.method.metrics()["n_openers"] == 4. and a.method.metrics()["first_clip_frac"] == 0.


def test_a_resumed_run_equals_an_unbroken_one(weights, tmp_path):
    whole = run(weights, tmp_path/"a", Compose(Parity(), REFT()), updates=4)
    run(weights, tmp_path/"b", Compose(Parity(), REFT()), updates=2, save_steps=2)
    assert same(whole, run(weights, tmp_path/"b", Compose(Parity(), REFT()), updates=4, save_steps=2, resume=str(tmp_path/"b"/"checkpoint-2")))
    assert REFT().state_dict() == {}


def test_first_tokens_can_be_clipped_with_two_updates_a_batch(weights, tmp_path):
    t = run(weights, tmp_path, Compose(Parity(), REFT()), updates=8, num_iterations=2, epsilon=.01)
    assert any(e.get("first_clip_frac", 0) > 0 for e in t.state.log_history)


def test_candidates_follow_the_policy(weights):
    "V_N is taken from the policy as it is now."
    policy = copy.deepcopy(weights)
    ids, group = prompts(policy, 2, 8)
    s = sampler(policy, k=1, n=1)
    before = s.sample(ids, group=group).completion_ids[:, 0]
    with torch.no_grad():
        head = policy.model.get_output_embeddings()
        old = head.weight.clone()
        head.weight[before[0]] = old[7]; head.weight[7] = old[before[0]]
    assert (s.pick([ids[0]], 8) != before[0]).all()


def test_composes_with_other_methods(weights, tmp_path):
    class Half(Method):
        def rewards(self, rollouts, rewards): return rewards/2
    class OtherSampler(Method): replaces = ("sampler",)
    t = run(weights, tmp_path, Compose(Half(), REFT()), updates=2)
    assert t.rollouts.rewards.max() <= .5 and t.method[REFT].metrics()["n_openers"] == 4.
    with pytest.raises(ValueError, match="both replace the stage `sampler`"): Compose(REFT(), OtherSampler())
    Compose(REFT(opener_mode="off"), OtherSampler())                              # it only watches
    assert describe(REFT()) != describe(REFT(k=8)) != describe(REFT(k=8, opener_loss="mask"))
