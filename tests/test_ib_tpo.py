"Invariants of IB-TPO, by the card's numbers and numbering; those of the single formulas stand in nbs/24_ib_tpo.ipynb as well."
import copy, math
from types import SimpleNamespace
import pytest
import torch
from torch import tensor
from rlworkbench.advantages import group_advantages
from rlworkbench.experiment import describe
from rlworkbench.method import Compose, Method
from rlworkbench.methods.ib_tpo import IBTPO, Steps, eta_covariance, etas, global_advantages, group_spread, ib_rule, ib_score, local_advantages, node_scores, shuffle_within, steps_of, tree_of
from rlworkbench.policies import load_policy
from rlworkbench.rollouts import Rollouts, TorchSampler
from rlworkbench.toolbox.tree import child_mean, n_leaves, node_starts
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world

WORLD = make_world("chain", steps=3)
PI, P = tensor([.6, .3, .1], dtype=torch.float64), tensor([.9, .3, 0.], dtype=torch.float64)


@pytest.fixture(scope="module")
def policy(): return load_policy("chain-habits", device="cpu")


def run(policy, out, method, *, updates=2, **settings):
    args = training_config(out, num_problems=2, updates=updates, seed=3, max_completion_length=30, learning_rate=1e-3, **{"num_generations": 8, **method.training, **settings})
    trainer = Trainer(copy.deepcopy(policy), WORLD, WORLD.problems(8, seed=1), method, args)
    trainer.train()
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def grown(policy, n=6, seed=0, **settings):
    "A batch of trees with their verified rewards, and the method that grew them."
    method = IBTPO(**settings)
    method.prepare(SimpleNamespace(world=WORLD, args=SimpleNamespace(world_size=1)))
    G = n_leaves(method.shape)
    problems = [p for p in WORLD.problems(n) for _ in range(G)]
    torch.manual_seed(seed)
    r = method.sampler(TorchSampler(policy.model, policy.tokenizer, 30)).sample([policy.encode(p.prompt) for p in problems], group=torch.arange(n*G)//G, problems=problems)
    r.rewards = tensor([float(WORLD.verify(p, t)) for p, t in zip(problems, r.completions)])
    return r, method


# the card's tree: four rollouts a, b, c, d from the root, and one branch below the first step of b.
# nodes: 0 root; 1 a; 2 b1; 3 b's failing rest; 4 c; 5 d; 6 the branch, which is right
NODE, ROOTS = tensor([[1, 1, -1], [2, 3, 3], [4, -1, -1], [5, 5, -1], [2, 6, -1]]), torch.zeros(5, dtype=torch.long)
REWARDS = tensor([1., 0., 0., 0., 1.])

def card_steps(step_prob="mean"):
    pi = tensor([1., .5, .5, .6, .5, .5, .3])
    logps = torch.where(NODE >= 0, pi[NODE.clamp(min=0)].log(), 0.)
    return steps_of(REWARDS, logps, NODE, ROOTS, 7, step_prob)


# ---------------------------------------------------------------- 1: how many leaves
@pytest.mark.parametrize("shape,G", (((4, 9, 1, 1), 12), ((4, 5, 1, 1), 8), ((2, 3, 2, 2), 10), ((6, 1, 3, 3), 6)))
def test_i1_leaves(policy, shape, G):
    assert n_leaves(shape) == G == IBTPO(shape=shape).training["num_generations"]
    r, _ = grown(policy, n=2, shape=shape)
    assert len(r) == 2*G


# ---------------------------------------------------------------- 2: its limit is GRPO
@pytest.mark.parametrize("ddof", (0, 1))
def test_i2_without_branches_and_local_term_the_advantage_is_the_z_score(policy, ddof):
    r, method = grown(policy, shape=(8, 1, 1, 1), lam=0., ddof=ddof)
    A = method.advantages(r, torch.zeros_like(r.logps))
    R = r.rewards.view(-1, 8)
    std = R.std(1, keepdim=True, correction=ddof)
    wanted = torch.where(std > 0, (R - R.mean(1, keepdim=True))/std.clamp(min=1e-9), 0.).flatten()
    assert (std > 0).any()
    torch.testing.assert_close(A, wanted[:, None]*r.completion_mask)


def test_i2_it_is_grpo_token_for_token_in_the_trainer(policy, tmp_path):
    heard = {}
    class Ear(Method):
        def __init__(self, name): self.heard = heard.setdefault(name, [])
        def advantages(self, rollouts, advantages): self.heard.append((rollouts.completion_ids, advantages)); return advantages
    limit = IBTPO(shape=(8, 1, 1, 1), lam=0., ddof=1, eps=1e-4)
    plain, off = run(policy, tmp_path/"a", Compose(Method(), Ear("a")), updates=3), run(policy, tmp_path/"b", Compose(limit, Ear("b")), updates=3)
    assert len(heard["a"]) == 3 and any(A.abs().max() > 0 for _, A in heard["a"])
    for (ids, A), (ids_, A_) in zip(heard["a"], heard["b"]):
        assert torch.equal(ids, ids_)
        torch.testing.assert_close(A, A_, atol=1e-6, rtol=1e-6)
    for a, b in zip(plain.policy.model.parameters(), off.policy.model.parameters()): torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


# ---------------------------------------------------------------- 3: roots and flat trees
def test_i3_a_root_has_no_advantage_and_a_flat_tree_is_dropped():
    steps, tree = card_steps(), torch.zeros(7, dtype=torch.long)
    assert global_advantages(steps, tree, group_spread(REWARDS, ROOTS, 7))[0] == 0 and local_advantages(steps)[0] == 0
    for value in (0., 1.):
        flat = steps_of(torch.full((5,), value), torch.zeros(5, 3), NODE, ROOTS, 7)
        assert (global_advantages(flat, tree, group_spread(torch.full((5,), value), ROOTS, 7)) == 0).all()


@pytest.mark.parametrize("drop", (True, False))
def test_i3_in_the_method_only_the_local_term_is_left_of_a_flat_tree(policy, drop):
    r, method = grown(policy, n=2, drop_flat=drop)
    r.rewards = torch.cat([torch.zeros(12), torch.ones(12)])
    A = method.advantages(r, torch.zeros_like(r.logps))
    assert (A == 0).all() if drop else (A[r.completion_mask.bool()] < 0).all()
    if not drop:                                                 # the ratio is 1 in both: -λπ/β
        steps, _ = method.steps(r, r.rewards)
        torch.testing.assert_close(A, -.1*steps.pi[r.extras["node"].clamp(min=0)]/5*r.completion_mask)


# ---------------------------------------------------------------- 4, 5: the score
def test_i4_one_child():
    eta1, eta2 = etas(tensor([.7]), tensor([.7]), tensor([.4]))
    assert abs(eta1.item() + .2) < 1e-6 and abs((eta1*eta2).item() + .08) < 1e-6
    assert abs(ib_score(tensor([.7]), tensor(.7), tensor([.4])).item() + 6*.08) < 1e-6


@pytest.mark.parametrize("pi,mean,cov", ((PI, .125, .191667), (PI.flip(0), -.25, -.183333), (torch.full_like(PI, 1/3), -.066667, 0.)))
def test_i5_three_children(pi, mean, cov):
    parent = tensor(.4, dtype=torch.float64)
    eta1, eta2 = etas(P, parent, pi)
    torch.testing.assert_close(eta1, tensor([1.05, -.45, -1.2], dtype=torch.float64))
    assert abs((eta1*eta2).mean().item() - mean) < 1e-6
    assert abs(ib_score(P, parent, pi).item() - 6*mean) < 1e-5           # 0.75 and -1.5
    steps = Steps(torch.cat([parent[None], P]), torch.cat([pi.new_ones(1), pi]), tensor([-1, 0, 0, 0]))
    assert abs(eta_covariance(steps) - cov) < 1e-6
    assert abs(node_scores(steps)[0].item() - 6*mean) < 1e-5 and node_scores(steps)[1:].isnan().all()


def test_i5_the_exact_identity_of_the_objective():
    "With p(s|a*) = π p̂/p̂_parent and H(s|a*) = 1 - E_π[p(s|a*)]: (1 + β)H(s) - βH(s|a*) = 1 + β E_π[η1 η2]."
    beta, pi, p = 5., PI, P
    parent = (pi*p).sum()
    H, H_given = 1 - (pi**2).sum(), 1 - (pi*pi*p/parent).sum()
    eta1, eta2 = etas(p, parent, pi, beta)
    torch.testing.assert_close((1 + beta)*H - beta*H_given, 1 + beta*(pi*eta1*eta2).sum())


# ---------------------------------------------------------------- 6: advantages of the card's tree
def test_i6_global_and_local():
    steps, spread = card_steps(), group_spread(REWARDS, ROOTS, 7)
    assert abs(spread[0].item() - .489898) < 1e-6 and steps.parent.tolist() == [-1, 0, 0, 2, 0, 0, 2]
    A_gl, A_ib = global_advantages(steps, tree_of(steps.parent), spread), local_advantages(steps)
    for i, wanted in {1: 1.224745, 2: .204124, 3: -.816497, 6: 1.224745}.items(): assert abs(A_gl[i].item() - wanted) < 1e-5
    # ratios .5/.4, 1/.5 and 0/.5, less 1.2
    for i, wanted in {2: .025, 6: .24, 3: -.72}.items(): assert abs(A_ib[i].item() - wanted) < 1e-6
    A = A_gl + .1*A_ib
    for i, wanted in {2: .206624, 6: 1.248745, 3: -.888497}.items(): assert abs(A[i].item() - wanted) < 1e-5


def test_i6_the_method_gives_every_token_its_step():
    pi = tensor([1., .5, .5, .6, .5, .5, .3])
    mask = (NODE >= 0).long()
    logps = torch.where(NODE >= 0, pi[NODE.clamp(min=0)].log(), 0.)
    r = Rollouts(prompt_ids=torch.ones(5, 2, dtype=torch.long), prompt_mask=torch.ones(5, 2, dtype=torch.long), completion_ids=NODE.clamp(min=0), completion_mask=mask, policy_mask=mask, logps=logps,
                 group=torch.full((5,), 9), source=torch.zeros(5, dtype=torch.long), stop=torch.ones(5, dtype=torch.long), prompts=["?"]*5, completions=["!"]*5,
                 extras=dict(node=NODE, new_mask=mask - mask*(torch.arange(3) == 0)*tensor([0, 0, 0, 0, 1])[:, None], round=tensor([0, 0, 0, 0, 1]), n_new=tensor([2, 3, 1, 2, 1])))
    r.rewards = REWARDS
    method = IBTPO(shape=(4, 2, 1, 1))
    A = method.advantages(r, torch.zeros(5, 3))
    torch.testing.assert_close(A[1], tensor([.206624, -.888497, -.888497]), atol=1e-5, rtol=0)
    torch.testing.assert_close(A[4], tensor([.206624, 1.248745, 0.]), atol=1e-5, rtol=0)
    assert A[0, 2] == 0 and A.requires_grad is False
    found = method.metrics()
    assert found["eff_rate"] == 1 and abs(found["avg_rate"] - .4) < 1e-6 and found["branch_depth"] == 1
    # root: η1 of the shares 1, .5, 0, 0 has no π to vary with (all .5): covariance 0; b1: η1 = -1.2, .8 at π = .6, .3: -.15; mean -.075
    assert abs(found["eta_cov"] + .075) < 1e-6


def test_i6_the_local_term_has_a_negative_mean_and_is_left_so(policy):
    r, method = grown(policy)
    steps, _ = method.steps(r, r.rewards)
    inner = steps.parent >= 0
    assert local_advantages(steps)[inner].nanmean() < 0


# ---------------------------------------------------------------- 7: leaf-weighted
def test_i7_a_parent_is_the_leaf_weighted_mean_of_its_children(policy):
    r, method = grown(policy)
    steps, roots = method.steps(r, r.rewards)
    node, n = r.extras["node"], len(steps.p)
    leaf, at = node_starts(node).nonzero(as_tuple=True)
    count = torch.bincount(torch.cat([node[leaf, at], roots]), minlength=n).double()
    sums = torch.zeros(n, dtype=torch.float64).index_add(0, steps.parent[steps.parent >= 0], (steps.p*count)[steps.parent >= 0])
    has = torch.bincount(steps.parent[steps.parent >= 0], minlength=n) > 0
    kids = torch.zeros(n, dtype=torch.float64).index_add(0, steps.parent[steps.parent >= 0], count[steps.parent >= 0])
    torch.testing.assert_close(sums[has]/kids[has], steps.p[has].double())
    plain = child_mean(steps.p, steps.parent)
    assert (plain[has] - steps.p[has]).abs().max() > .01                 # the unweighted mean is another number


# ---------------------------------------------------------------- 8: the prefactor
def test_i8_rankings_do_not_depend_on_the_prefactor(policy):
    r, method = grown(policy)
    steps, _ = method.steps(r, r.rewards)
    has = ~node_scores(steps).isnan()
    orders = [node_scores(steps, prefactor=f)[has].argsort(stable=True).tolist() for f in (None, 5., 1.)]
    assert orders[0] == orders[1] == orders[2] and len(set(node_scores(steps)[has].tolist())) > 20


# ---------------------------------------------------------------- 9: shared prefixes
def test_i9_shared_tokens_have_one_log_prob_and_one_advantage(policy):
    r, method = grown(policy)
    A, node, seen = method.advantages(r, torch.zeros_like(r.logps)), r.extras["node"], {}
    for i in range(len(r)):
        for t in range(int(r.lengths[i])): seen.setdefault((int(node[i, t]), t), set()).add((float(r.logps[i, t]), float(A[i, t])))
    assert all(len(x) == 1 for x in seen.values()) and len(seen) < r.n_tokens


# ---------------------------------------------------------------- 10: nothing right below the parent
def test_i10_a_parent_without_a_right_leaf():
    eta1, _ = etas(tensor([0., 0.]), tensor(0.), tensor([.4, .6]))
    torch.testing.assert_close(eta1, tensor([-.2, -.2]))
    assert abs(ib_score(tensor([0., 0.]), tensor(0.), tensor([.4, .6])).item() + .6) < 1e-6
    steps = steps_of(torch.zeros(5), torch.full((5, 3), math.log(.5)), NODE, ROOTS, 7)
    assert node_scores(steps)[[0, 2]].isfinite().all() and local_advantages(steps).isfinite().all()
    assert etas(tensor([0.]), tensor(0.), tensor([.4]), no_information=0.)[0].item() == pytest.approx(-1.2)


# ---------------------------------------------------------------- switches
def test_step_probability_as_mean_or_product():
    logps = tensor([[.5, .5, 1.], [.5, .2, .8], [.5, 1., 1.], [.5, .5, 1.], [.5, .3, 1.]]).log()
    mean, product = (steps_of(REWARDS, logps, NODE, ROOTS, 7, s).pi for s in ("mean", "product"))
    torch.testing.assert_close(product[1:], tensor([.25, .5, .16, .5, .25, .3]))       # the shared step .5 counts once
    torch.testing.assert_close(mean[1:], tensor([.5, .5, .4, .5, .5, .3]))


def test_unknown_rewards_are_left_out():
    steps = steps_of(tensor([1., float("nan"), 0., 0., 1.]), torch.zeros(5, 3), NODE, ROOTS, 7)
    assert steps.p[0] == .5 and steps.p[2] == 1 and steps.p[3].isnan()
    spread = group_spread(tensor([1., float("nan"), 0., 0., 1.]), ROOTS, 7)
    assert abs(spread[0] - .5) < 1e-6


def test_unknown_rewards_train_nothing(policy):
    r, method = grown(policy, n=2)
    r.rewards = torch.full((24,), float("nan"))
    assert (method.advantages(r, torch.zeros_like(r.logps)) == 0).all()


def test_tree_of_finds_the_root_from_any_depth():
    assert tree_of(tensor([-1, -1, 0, 2, 1, 3, 4, 5])).tolist() == [0, 1, 0, 0, 1, 0, 1, 0]


def test_the_placebo_keeps_the_numbers_within_each_tree():
    x, tree = torch.arange(40.), torch.arange(40) % 3
    inner = torch.arange(40) > 5
    torch.manual_seed(0)
    y = shuffle_within(x, tree, inner)
    assert torch.equal(y[:6], x[:6]) and not torch.equal(x, y)
    for t in range(3): assert sorted(y[tree == t].tolist()) == x[tree == t].tolist()


def test_the_rule_branches_where_the_score_is_highest(policy):
    "One more round: the node that got a child is a best one of the score before it."
    r, method = grown(policy, n=4, shape=(4, 2, 1, 1), ties="first")
    node, branch = r.extras["node"].view(4, 5, -1), r.extras["new_mask"].view(4, 5, -1)
    rewards, logps = r.rewards.view(4, 5), r.logps.view(4, 5, -1)
    for g in range(4):
        old = node[g, :4].reshape(4, -1)
        names = {int(v): k + 1 for k, v in enumerate(sorted(set(old[old >= 0].tolist())))}
        table = tensor([[names[int(v)] if v >= 0 else -1 for v in row] for row in old])
        scores = node_scores(steps_of(rewards[g, :4], logps[g, :4], table, torch.zeros(4, dtype=torch.long), len(names) + 1))
        shared = int((node[g, 4] >= 0).sum() - branch[g, 4].sum())
        at = names[int(node[g, 4, shared - 1])] if shared else 0
        last = {int(row[row >= 0][-1]) for row in table}
        before = {int(row[node_starts(table)[k]][-2]) if node_starts(table)[k].sum() > 1 else 0 for k, row in enumerate(table)}
        allowed = [i for i in range(len(names) + 1) if i == 0 or i not in last and (i not in before or scores[i] == scores[at])]
        assert scores[at] >= max(scores[i].item() for i in allowed) - 1e-6


# ---------------------------------------------------------------- in the trainer
def test_two_updates_repeat_and_are_finite(policy, tmp_path):
    first, second = (run(policy, tmp_path/name, IBTPO(shape=(4, 5, 1, 1))) for name in "ab")
    assert same(first.policy.model, second.policy.model) and all(p.isfinite().all() for p in first.policy.model.parameters())
    assert not same(first.policy.model, policy.model) and first.method.state_dict() == {}
    log = first.state.log_history[0]
    assert {"eff_rate", "avg_rate", "leaf_tokens", "branch_depth"} <= set(log) and log["branch_depth"] > 0
    assert first.n_sampled < 2*16*first.rollouts.lengths.max()


@pytest.mark.parametrize("settings", (dict(rule="random"), dict(rule="entropy"), dict(rule="width"), dict(local="shuffled"), dict(train_prefix="once"), dict(restart="before"), dict(step_prob="product")), ids=str)
def test_every_switch_trains(policy, tmp_path, settings):
    trainer = run(policy, tmp_path, IBTPO(shape=(2, 3, 1, 1), **settings), updates=1)
    assert all(p.isfinite().all() for p in trainer.policy.model.parameters())


def test_works_beside_another_method(policy, tmp_path):
    class Shorter(Method):
        def rewards(self, rollouts, rewards): return rewards - .01*rollouts.lengths
    trainer = run(policy, tmp_path, Compose(Shorter(), IBTPO(shape=(4, 3, 1, 1))))
    assert trainer.state.log_history[0]["eff_rate"] > 0 and all(p.isfinite().all() for p in trainer.policy.model.parameters())
    class Whole(Method):
        replaces = ("advantages",)
    with pytest.raises(ValueError, match="both replace the stage `advantages`"): Compose(IBTPO(), Whole())


def test_what_cannot_work_is_refused_by_name(policy, tmp_path):
    for bad, message in ((dict(rule="best"), "rule='best' is unknown: use 'ib', 'random'"), (dict(local="none"), "local='none'"), (dict(step_prob="sum"), "step_prob='sum'"), (dict(ddof=2), "ddof=2"),
                         (dict(beta=0.), "beta=0.0: the score divides by it"), (dict(shape=(4, 9)), "four whole numbers"), (dict(shape=(0, 9, 1, 1)), "four whole numbers")):
        with pytest.raises(ValueError, match=message): IBTPO(**bad)
    with pytest.raises(ValueError, match="num_generations"): run(policy, tmp_path, IBTPO(shape=(4, 5, 1, 1)), num_generations=4)
    with pytest.raises(ValueError, match="world_size=2"): IBTPO().prepare(SimpleNamespace(world=WORLD, args=SimpleNamespace(world_size=2)))
    with pytest.raises(ValueError, match="needs a world"): IBTPO().prepare(SimpleNamespace(world=None, args=SimpleNamespace(world_size=1)))
    with pytest.raises(ValueError, match="single turns"): IBTPO().prepare(SimpleNamespace(world=make_world("calculator"), args=SimpleNamespace(world_size=1)))
    with pytest.raises(ValueError, match="carry no extras\\['node'\\]"): IBTPO().steps(SimpleNamespace(extras={}), None)
    with pytest.raises(ValueError, match="must both be .B,."): ib_score(torch.ones(2), tensor(1.), torch.ones(3))


def test_arms_are_told_apart_by_their_settings():
    found = [describe(m) for m in (IBTPO(), IBTPO(rule="random"), IBTPO(lam=0.), IBTPO(local="shuffled"), IBTPO(beta=1.), IBTPO(shape=(8, 1, 1, 1)))]
    assert all(found[0] != other for other in found[1:]) and not any(k.startswith("_") for k in found[0])
