"Trees of rollouts: shapes, counts, prefixes carried over exactly. The formulas stand in nbs/toolbox/tree.ipynb."
import random
import pytest
import torch
from rlworkbench.policies import load_policy
from rlworkbench.rollouts import Monitor, Stop, TokenRecorder, TorchSampler
from rlworkbench.scoring import score_rollouts
from rlworkbench.toolbox.tree import RULES, EntropyMonitor, Forest, TreeSampler, by_round, child_mean, choose_nodes, leaf_mean, n_leaves, node_starts, parents, step_ends, step_mean
from rlworkbench.worlds.base import make_world

WORLD = make_world("chain", steps=3)


@pytest.fixture(scope="module")
def policy(): return load_policy("chain-habits", device="cpu")


def grow(policy, shape=(3, 5, 1, 1), n=4, length=40, seed=0, keep=(), **kw):
    "The record, and the sampler with its forest."
    problems = [p for p in WORLD.problems(n) for _ in range(n_leaves(shape))]
    sampler = TreeSampler(TorchSampler(policy.model, policy.tokenizer, length, keep=keep), judge=WORLD.verify, shape=shape, **kw)
    torch.manual_seed(seed)
    return sampler.sample([policy.encode(p.prompt) for p in problems], group=torch.arange(len(problems))//n_leaves(shape), problems=problems), sampler


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", ((4, 3, 1, 1), (2, 3, 2, 1), (2, 2, 1, 3), (3, 1, 1, 1)))
def test_every_tree_has_its_leaves(policy, rule, shape):
    r, sampler = grow(policy, shape, n=2, rule=RULES[rule], entropies=rule == "entropy")
    B0, L, K, B = shape
    assert len(r) == 2*n_leaves(shape) and n_leaves(shape) == B0 + (L - 1)*K*B
    rounds = r.extras["round"].view(2, -1)
    for row in rounds: assert torch.bincount(row, minlength=L).tolist() == [B0, *[K*B]*(L - 1)]
    assert r.problems == [p for p in WORLD.problems(2) for _ in range(n_leaves(shape))]


def test_a_shared_prefix_is_the_same_to_the_bit_and_costs_nothing(policy):
    r, sampler = grow(policy)
    node, starts, (_, roots) = r.extras["node"], node_starts(r.extras["node"]), sampler.grown.tables()
    assert torch.equal(node >= 0, r.completion_mask.bool())
    seen = {}
    for i in range(len(r)):
        for t in range(int(r.lengths[i])): seen.setdefault((int(node[i, t]), t), set()).add((int(r.completion_ids[i, t]), float(r.logps[i, t])))
    assert all(len(x) == 1 for x in seen.values()) and len(seen) < r.n_tokens
    assert r.n_new == len(seen) == int(r.extras["new_mask"].sum())                     # every token of the tree once


def test_logps_are_those_of_the_whole_rollout(policy):
    "Positions go on behind the prefix, and left padding does not matter."
    r, _ = grow(policy, n=6)
    found = score_rollouts(policy.model, r).logps
    torch.testing.assert_close(found*r.completion_mask, r.logps*r.completion_mask, atol=2e-4, rtol=0)


def test_branches_begin_behind_a_delimiter(policy):
    r, _ = grow(policy)
    shared = r.lengths - r.extras["new_mask"].sum(1)
    branched = 0
    for text, k in zip(r.completions, shared.tolist()):
        assert k == 0 or text[k - 1] == ";"
        branched += k > 0
    assert branched > 4


@pytest.mark.parametrize("restart", ("after", "before"))
def test_one_node_and_its_restart(policy, restart):
    deepest = lambda forest: torch.tensor(forest.depth, dtype=torch.float)
    r, _ = grow(policy, (1, 2, 1, 1), n=8, rule=deepest, restart=restart, min_tail=4)
    shared = (r.lengths - r.extras["new_mask"].sum(1)).view(8, 2)[:, 1]
    for text, k in zip(r.completions[::2], shared.tolist()):
        ends = step_ends(list(text))
        wanted = ends[-3] if len(ends) > 2 else 0                                      # the last step is the answer: the deepest candidate lies one step before it
        if restart == "before": wanted = ends[-4] if len(ends) > 3 else 0
        assert k == wanted, (text, k)


def test_train_prefix_once(policy):
    each, once = grow(policy)[0], grow(policy, train_prefix="once")[0]
    assert torch.equal(each.completion_ids, once.completion_ids) and torch.equal(each.policy_mask, each.completion_mask)
    assert torch.equal(once.policy_mask, once.extras["new_mask"]) and once.n_tokens == once.n_new == each.n_new


def test_truncated_rollouts_are_leaves_and_keep_the_limit(policy):
    r, sampler = grow(policy, length=14, n=8)
    assert r.lengths.max() == 14 and (r.stop == Stop.LENGTH).any()
    assert (r.stop[r.lengths < 14] == Stop.EOS).all()
    assert r.n_new >= int(r.extras["new_mask"].sum())                                  # what the limit cut off was generated too


def test_the_rows_come_back_in_the_order_that_was_asked_for(policy):
    shape, problems = (2, 2, 1, 1), WORLD.problems(2)
    mixed = [problems[i] for i in (0, 1, 1, 0, 1, 0)]
    r = TreeSampler(TorchSampler(policy.model, policy.tokenizer, 40), judge=WORLD.verify, shape=shape).sample([policy.encode(p.prompt) for p in mixed], group=torch.tensor([5, 3, 3, 5, 3, 5]), problems=mixed)
    assert r.prompts == ["<bos>" + p.prompt for p in mixed] or [p.replace(" ", "") for p in r.prompts] == ["<bos>" + p.prompt for p in mixed]
    assert r.group.tolist() == [5, 3, 3, 5, 3, 5]


def test_extras_of_the_inner_sampler_are_carried_along(policy):
    class Where(Monitor):
        def start(self, B, device): self.B, self.record = B, TokenRecorder()
        def update(self, rows, t, logits, tokens, values): self.record.add(rows, chosen=tokens.float()); return torch.zeros_like(rows, dtype=torch.bool)
        def finish(self): return self.record.tensors(self.B)
    problems = [p for p in WORLD.problems(3) for _ in range(5)]
    sampler = TreeSampler(TorchSampler(policy.model, policy.tokenizer, 40, keep=("hidden",)), shape=(2, 4, 1, 1)).with_monitor(Where())
    r = sampler.sample([policy.encode(p.prompt) for p in problems], group=torch.arange(15)//5)
    assert torch.equal(r.extras["chosen"].long()*r.completion_mask, r.completion_ids*r.completion_mask)
    assert r.extras["hidden"].shape == (*r.completion_ids.shape, policy.hidden_size)


def test_entropies_are_those_of_the_policy(policy):
    r, _ = grow(policy, rule=RULES["entropy"], entropies=True)
    ids, seen = torch.cat([r.prompt_ids, r.completion_ids], 1), torch.cat([r.prompt_mask, r.completion_mask], 1)
    with torch.no_grad(): logp = policy.model(ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0)).logits[:, r.prompt_ids.shape[1] - 1:-1].log_softmax(-1)
    torch.testing.assert_close(-(logp.exp()*logp).sum(-1)*r.completion_mask, r.extras["entropy"]*r.completion_mask, atol=2e-4, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_tables_equal_a_plain_loop_over_the_tree(seed):
    rng = random.Random(seed)
    forest = Forest(2, lambda ids: step_ends([";" if i == 9 else "x" for i in ids]))
    torch.manual_seed(seed)
    for k in range(14):
        at = rng.choice([i for i in range(len(forest)) if i < 2 or forest.candidates(0)[i]])
        ids = [rng.choice((1, 2, 9)) for _ in range(rng.randint(1, 8))]
        forest.add(at, ids, torch.randn(len(ids)), Stop.EOS, len(ids)).reward = float(rng.random() < .5)
    node, roots = forest.tables(); n = len(forest)
    assert parents(node, roots, n).tolist() == forest.parent
    below = {i: [] for i in range(n)}
    for leaf in forest.leaves:
        for i in {leaf.root, *leaf.node}: below[i].append(leaf.reward)
    wanted = [sum(x)/len(x) if x else float("nan") for x in below.values()]
    p = leaf_mean(forest.rewards, node, roots, n)
    torch.testing.assert_close(p, torch.tensor(wanted), equal_nan=True)
    logp = step_mean(forest.tokens("logps"), node, n)
    for i in range(2, n):
        leaf = forest.leaves[forest.leaf[i]]
        torch.testing.assert_close(logp[i], torch.stack([x for x, k in zip(leaf.logps, leaf.node) if k == i]).mean())
        kids = [j for j in range(n) if forest.parent[j] == i]
        if kids: torch.testing.assert_close(child_mean(logp, torch.tensor(forest.parent))[i], logp[kids].mean())


def test_same_seed_same_tree(policy):
    a, b, c = grow(policy)[0], grow(policy)[0], grow(policy, seed=1)[0]
    assert torch.equal(a.completion_ids, b.completion_ids) and torch.equal(a.extras["node"], b.extras["node"])
    assert a.completions != c.completions


def test_by_round_counts_the_first_rounds_alone(policy):
    _, sampler = grow(policy, (3, 4, 1, 1), n=5)
    shown, forest = by_round(sampler.grown), sampler.grown
    assert shown["tokens"][-1].sum() == forest.n_new
    for k in range(4):
        some = [l for l in forest.leaves if l.round <= k and l.root == 2]
        assert len(some) == 3 + k and shown["reward"][k, 2] == sum(l.reward for l in some)/len(some)
        assert bool(shown["effective"][k, 2]) == (len({l.reward for l in some}) > 1)


def test_an_unscorable_leaf_is_known_as_such(policy):
    problems = WORLD.problems(2)
    forest = TreeSampler(TorchSampler(policy.model, policy.tokenizer, 40), judge=lambda p, t: None, shape=(2, 2, 1, 1)).grow([policy.encode(p.prompt) for p in problems], problems)
    assert forest.rewards.isnan().all()


@pytest.mark.parametrize("make,message", ((dict(shape=(4, 0, 1, 1)), "four whole numbers"), (dict(ties="last"), "use 'random' or 'first'"), (dict(restart="there"), "restart='there'"), (dict(train_prefix="twice"), "'each' or 'once'")))
def test_unknown_settings_are_refused(policy, make, message):
    with pytest.raises(ValueError, match=message): TreeSampler(TorchSampler(policy.model, policy.tokenizer, 9), **make)


def test_batches_that_hold_no_trees_are_refused(policy):
    sampler, ids = TreeSampler(TorchSampler(policy.model, policy.tokenizer, 9), shape=(2, 2, 1, 1)), [policy.encode(p.prompt) for p in WORLD.problems(3)]
    with pytest.raises(ValueError, match="set num_generations=3"): sampler.sample(ids)
    with pytest.raises(ValueError, match="different prompts"): sampler.sample(ids, group=torch.zeros(3))
    with pytest.raises(ValueError, match="forced is given"): sampler.sample(ids, forced=[[1]]*3)
    with pytest.raises(ValueError, match="one for each of"): choose_nodes(Forest(2, None), torch.zeros(3), torch.ones(2, dtype=torch.bool))
    tight = TreeSampler(TorchSampler(policy.model, policy.tokenizer, 40, context=50), shape=(4, 4, 1, 1))
    long = WORLD.with_dials(steps=5).problems(1)
    with pytest.raises(ValueError, match="exceed the context"):
        torch.manual_seed(0); tight.sample([policy.encode(long[0].prompt)]*7, group=torch.zeros(7))
