"SAERL: the card's invariants by their numbers, the order of the trainer's data, labels that are paid for, and what is refused."
import copy, math
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from rlworkbench.experiment import describe
from rlworkbench.method import Compose, Method
from rlworkbench.methods.saerl import (SAERL, GradientWatch, cluster_entropy, cosine, drawn_batches, elastic_probe, keep_best, mixing_count, ordered_batches, prompt_clusters, ridge_probe, swap_tails, whole)
from rlworkbench.policies import Recipe, Stage, load_policy, train_recipe
from rlworkbench.toolbox.sae import topk, fvu, train_reader
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import Problem, make_world

WORLD = make_world("families")
MINI = Recipe("mini", "families", (Stage(12, 3e-3),), dials=dict(corrupt=0.), width=32, layers=2, context=64)
AB, HARD = np.array([0]*8 + [1]*8), np.tile(np.arange(8), 2)          # a1…a8, b1…b8, each from easy to hard


@pytest.fixture(scope="module")
def weights(): return train_recipe(MINI, progress=False)

@pytest.fixture(scope="module")
def reader(weights): return train_reader(weights, [p.prompt for p in WORLD.problems(120)], n_latents=64, k=8, steps=60, progress=False, limit=1.)


def make(weights, out, method, *, updates=3, seed=3, resume=None, save_steps=0, n=32, shuffle=None, problems=None, world=WORLD, train=True, **kw):
    settings = dict(method.training) if shuffle is None else dict(shuffle_dataset=shuffle)
    args = training_config(out, num_problems=4, num_generations=4, updates=updates, seed=seed, max_completion_length=8, learning_rate=1e-3, save_steps=save_steps, **settings, **kw)
    trainer = Trainer(copy.deepcopy(weights), world, problems or WORLD.problems(n, seed=1), method, args)
    trainer.asked, sample = [], trainer.sampler.sample
    def listen(ids, **kw): trainer.asked.append([p.prompt for p in kw["problems"][::4]]); return sample(ids, **kw)
    trainer.sampler = SimpleNamespace(sample=listen)
    if train: trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
def names(batches): return [" ".join(f"{'ab'[i//8]}{i % 8 + 1}" for i in b) for b in batches]
def light(reader, **kw): return SAERL(reader, **{**dict(n_labels=40, clusters=3), **kw})


# ---------------------------------------------------------------- 1 to 11: the formulas
def test_i1_topk(): assert topk(torch.tensor([3., 1., -2., 5.]), 2).tolist() == [3., 0., 0., 5.]

def test_i2_fvu(): assert fvu(torch.tensor([[3., 1.], [1., -1.]]), torch.tensor([[2., 1.], [1., 0.]])) == .5


def test_i3_ridge():
    Z, y = np.array([[1., 0.], [0., 1.], [1., 1.]]), np.array([1., 2., 3.])
    np.testing.assert_allclose(ridge_probe(Z, y, lam=1., centre=False).coef_, [.875, 1.375], atol=1e-9)
    np.testing.assert_allclose(ridge_probe(Z, y, lam=1e-10, centre=False).coef_, [1., 2.], atol=1e-6)
    w = np.linalg.solve(Z.T@Z + 2*np.eye(2), Z.T@y)
    np.testing.assert_allclose(ridge_probe(Z, y, lam=2., centre=False).coef_, w, atol=1e-9)
    z, u = np.random.default_rng(0).normal(size=(50, 3)) + 4, np.arange(50.)        # centred: the mean is no feature
    c = z - z.mean(0)
    np.testing.assert_allclose(ridge_probe(z, u, lam=3.).coef_, np.linalg.solve(c.T@c + 3*np.eye(3), c.T@(u - u.mean())), atol=1e-8)
    assert np.abs(ridge_probe(z, u, lam=3., centre=False).coef_ - ridge_probe(z, u, lam=3.).coef_).max() > .1


def test_i4_elastic_net():
    x, other = np.array([1., -1., 1., -1.]), np.array([1., 1., -1., -1.])
    np.testing.assert_allclose(elastic_probe(x[:, None], .8*x + .6*other, .1, .5).coef_, [.714286], atol=1e-6)
    assert elastic_probe(x[:, None], .04*x + math.sqrt(1 - .04**2)*other, .1, .5).coef_[0] == 0.


def test_probes_choose_their_strength_and_find_what_is_there():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(120, 60)); target = z[:, 0] - 2*z[:, 1]
    for probe in (ridge_probe, elastic_probe):
        fitted = probe(z[:60], target[:60] + .1*rng.normal(size=60))
        assert np.corrcoef(fitted.predict(z[60:]), target[60:])[0, 1] > .8
    assert (elastic_probe(z[:60], target[:60]).coef_[2:] == 0).sum() > 20
    with pytest.raises(ValueError, match="3 codes and 2 labels"): ridge_probe(z[:3], [1, 2])
    with pytest.raises(ValueError, match="give both"): elastic_probe(z[:3], [1, 2, 3], lam=.1)


def test_i5_schedule():
    b = ordered_batches(AB, HARD, 4)
    assert names(swap_tails(b, 1)) == ["a1 a2 a3 b4", "b1 b2 b3 a4", "a5 a6 a7 b8", "b5 b6 b7 a8"]
    assert names(swap_tails(b, 2)) == ["a1 a2 b3 b4", "b1 b2 a3 a4", "a5 a6 b7 b8", "b5 b6 a7 a8"]
    assert names(swap_tails(b, 0)) == names(b) == ["a1 a2 a3 a4", "b1 b2 b3 b4", "a5 a6 a7 a8", "b5 b6 b7 b8"]


def test_an_odd_last_batch_stays_and_a_short_one_gives_what_it_has():
    assert swap_tails([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1) == [[1, 2, 6], [4, 5, 3], [7, 8, 9]]
    assert swap_tails([[1, 2, 3], [4]], 2) == [[1, 2, 4], [3]]


def test_leftovers_come_last_from_easy_to_hard_and_exhausted_clusters_are_skipped():
    clusters, hard = [0]*7 + [1]*3, [7, 6, 5, 4, 3, 2, 1, 5.5, .5, 9]
    assert ordered_batches(clusters, hard, 2) == [[6, 5], [8, 7], [4, 3], [2, 1], [0, 9]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("m", (0, 1, 3, 8))
def test_i6_nothing_is_lost_and_nothing_comes_twice(m, seed):
    rng = np.random.default_rng(seed)
    n, clusters = int(rng.integers(40, 200)), rng.integers(0, 5, 200)
    hard = rng.normal(size=n).round(1)                                                # with ties
    for batches in (swap_tails(ordered_batches(clusters[:n], hard, 16), m), drawn_batches(clusters[:n], hard, 16, m)):
        assert sorted(i for b in batches for i in b) == list(range(n))
        assert [len(b) for b in batches] == [16]*(n//16) + ([n % 16] if n % 16 else [])


def test_i7_entropy_inside_a_batch():
    for m, nats in ((0, 0.), (1, .562335), (2, .693147)):
        for b in swap_tails(ordered_batches(AB, HARD, 4), m): assert abs(cluster_entropy(AB[b]) - nats) < 1e-6


def test_i8_each_cluster_gets_harder():
    rng = np.random.default_rng(0)
    clusters, hard = rng.integers(0, 4, 300), rng.normal(size=300)
    batches = [b for b in ordered_batches(clusters, hard, 16) if len(set(clusters[b])) == 1]
    for c in range(4):
        means = [hard[b].mean() for b in batches if clusters[b[0]] == c]
        assert len(means) > 2 and means == sorted(means)


def test_i9_the_two_limits():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=50)
    assert sum(ordered_batches([0]*50, hard, 8), []) == np.argsort(hard, kind="stable").tolist()
    clusters = rng.integers(0, 3, 50)
    for b in ordered_batches(clusters, np.ones(50), 4)[:9]: assert b == sorted(b)
    of_0 = [i for b in ordered_batches(clusters, np.ones(50), 4) if set(clusters[b]) == {0} and len(b) == 4 for i in b]
    assert of_0[:8] == np.flatnonzero(clusters == 0)[:8].tolist()


def test_i10_the_filter():
    scores = np.random.default_rng(0).normal(size=101)
    assert keep_best(scores, 0.).tolist() == list(range(101))
    for drop in (.1, .15, .29):
        kept = keep_best(scores, drop)
        assert len(kept) == 101 - math.floor(drop*101) and scores[kept].min() > np.delete(scores, kept).max() and kept.tolist() == sorted(kept)
    assert len(keep_best(np.arange(100), .29)) == 71                                  # .29·100 is 28.999999999999996 in floats
    assert set(keep_best(scores, .3)) <= set(keep_best(scores, .1))
    for drop in (-.1, 1.):
        with pytest.raises(ValueError, match="drop="): keep_best(scores, drop)


def test_i11_spearman(): assert abs(spearmanr([1, 2, 3, 4], [.1, .4, .3, .9])[0] - .8) < 1e-12


# ---------------------------------------------------------------- 12: the trainer's order
def test_i12_the_trainer_follows_the_list(weights, reader, tmp_path):
    a = make(weights, tmp_path/"a", light(reader, drop=0.))
    assert a.asked == [[p.prompt for p in a.problems[4*i:4*i + 4]] for i in range(3)]
    assert [p.prompt for p in a.problems] != [p.prompt for p in WORLD.problems(32, seed=1)]
    b = make(weights, tmp_path/"b", light(reader, drop=0.))
    assert a.asked == b.asked and same(a.policy.model, b.policy.model)
    other = make(weights, tmp_path/"c", light(reader, drop=0.), seed=4, train=False)
    assert [p.prompt for p in other.problems] != [p.prompt for p in a.problems]


def test_i12_shuffled_it_would_be_another_order(weights, reader, tmp_path):
    class Unordered(SAERL): training = {}
    a = make(weights, tmp_path, Unordered(reader, n_labels=40, clusters=3, drop=0.))
    assert a.asked[0] != [p.prompt for p in a.problems[:4]]
    with pytest.raises(ValueError, match="needs shuffle_dataset=False"): make(weights, tmp_path, light(reader), shuffle=True)


def test_the_list_is_the_same_whatever_the_generators_say(weights, reader, tmp_path):
    lists = []
    for s in (1, 2):
        torch.manual_seed(s); np.random.seed(s)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist()
        method = light(reader, pool=200)
        run = SimpleNamespace(problems=WORLD.problems(40, seed=3), world=WORLD, policy=weights, args=SimpleNamespace(seed=3, generation_batch_size=16, num_generations=4), n_sampled=0)
        method.prepare(run); lists.append([p.prompt for p in method.curriculum(run.problems)])
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    assert lists[0] == lists[1] and len(lists[0]) == 40


# ---------------------------------------------------------------- switched off, alone and in company
def test_switched_off_it_is_grpo_token_for_token(weights, tmp_path):
    off = make(weights, tmp_path/"a", SAERL(drop=0., grouping="none", order="none", mix=0.))
    plain = make(weights, tmp_path/"b", Method(), shuffle=False)
    assert off.asked == plain.asked and torch.equal(off.rollouts.completion_ids, plain.rollouts.completion_ids) and same(off.policy.model, plain.policy.model)


def test_watching_changes_nothing_and_sees_the_gradients(tmp_path):
    weights = load_policy("families-habits-small", device="cpu")                     # one that is right at times: else there is no gradient
    watch = make(weights, tmp_path/"a", GradientWatch(), updates=5, shuffle=True)
    plain = make(weights, tmp_path/"b", Method(), updates=5, shuffle=True)
    assert same(watch.policy.model, plain.policy.model)
    seen = [e["gradient_cosine"] for e in watch.state.log_history if "gradient_cosine" in e]
    assert len(seen) == 3 and all(-1.0001 <= c <= 1.0001 for c in seen)               # the first update is not seen, the second has none before it
    assert cosine(torch.tensor([3., 4.]), torch.tensor([4., 3.])) == pytest.approx(.96) and cosine(torch.zeros(2), torch.ones(2)) is None


def test_its_own_reader_is_trained_on_the_runs_policy(weights, tmp_path):
    method = SAERL(n_labels=20, clusters=2, n_latents=32, k=4, sae_steps=5)
    run = make(weights, tmp_path, method, updates=2)
    assert method.reader.sae.n_latents == 32 and method.reader.layer == 1 and all(torch.isfinite(p).all() for p in run.policy.model.parameters())
    assert method.reader.policy.model is not run.model


def test_it_works_beside_another_method(weights, reader, tmp_path):
    class Half(Method):
        def rewards(self, rollouts, rewards): return rewards*.5
    method = Compose(light(reader, drop=0.), Half(), GradientWatch())
    run = make(weights, tmp_path, method)
    assert run.asked[0] == [p.prompt for p in run.problems[:4]] and set(run.rollouts.rewards.tolist()) <= {0., .5}
    log = [e for e in run.state.log_history if "loss" in e]
    assert all({"batch_difficulty", "cluster_entropy", "label_rollouts"} <= set(e) for e in log)


def test_a_method_that_changes_the_problems_first_is_told(weights, reader, tmp_path):
    class Backwards(Method):
        def curriculum(self, problems): return problems[::-1]
    with pytest.raises(ValueError, match="name SAERL first"): make(weights, tmp_path, Compose(Backwards(), light(reader)))
    run = make(weights, tmp_path, Compose(light(reader, drop=0.), Backwards()), train=False)
    assert len(run.problems) == 32


# ---------------------------------------------------------------- filter, pool, labels
@pytest.fixture(scope="module")
def trained():
    policy = load_policy("families-habits", device="cpu")
    return policy, train_reader(policy, [p.prompt for p in WORLD.problems(800)], n_latents=256, k=16, steps=250, progress=False, limit=1.)


def planned(trained, n=320, pool=1200, seed=0, **kw):
    policy, reader = trained
    method = SAERL(reader, pool=pool, n_labels=200, **kw)
    run = SimpleNamespace(problems=WORLD.problems(n, seed=seed), world=WORLD, policy=policy, n_sampled=0,
                          args=SimpleNamespace(seed=seed, generation_batch_size=128, num_generations=8, max_completion_length=16, temperature=1.))
    method.prepare(run)
    return method, run, method.curriculum(run.problems)


def broken_frac(problems): return np.mean([1 - whole(p) for p in problems])


def test_the_filter_takes_broken_prompts_out(trained):
    _, run, order = planned(trained)
    assert len(order) == 320 and broken_frac(run.problems) > .1 and broken_frac(order) < .6*broken_frac(run.problems)
    _, _, kept = planned(trained, drop=0., order="none", grouping="none", mix=0.)
    assert [p.prompt for p in kept] == [p.prompt for p in run.problems]
    only = planned(trained, order="none", grouping="none", mix=0.)[2]
    assert broken_frac(only) < .6*broken_frac(run.problems)
    rest = iter([p.prompt for p in WORLD.problems(1200)])
    assert all(p.prompt in rest for p in only)                                             # the order of the pool


def test_batches_are_of_one_kind_and_become_harder(trained):
    method, run, order = planned(trained, mix=0.)
    found, size = method._found, 16
    pure = [cluster_entropy([found[p.text][1] for p in order[i:i + size]]) for i in range(0, 320, size)]
    assert len(order) == len({id(p) for p in order}) and np.mean(np.array(pure) < 1e-9) >= .7
    third = len(order)//3
    levels = [WORLD.difficulty(p) for p in order]
    assert np.mean(levels[:third]) + .5 < np.mean(levels[-third:])
    mixed, _, swapped = planned(trained, mix=.5)
    assert np.mean([cluster_entropy([mixed._found[p.text][1] for p in swapped[i:i + size]]) for i in range(0, 320, size)]) > np.mean(pure) + .3


def test_the_placebo_has_groups_of_equal_size(trained):
    method = planned(trained, grouping="random")[0]
    sizes = np.bincount([c for _, c in method._found.values()])
    assert len(sizes) == 4 and sizes.max() - sizes.min() <= 6                            # equal prompts of the pool share an entry
    families = [planned(trained, grouping=g)[0] for g in ("random", "codes")]
    pool = {p.text: p.meta["family"] for p in WORLD.problems(1200)}
    from sklearn.metrics import normalized_mutual_info_score as nmi
    random, codes = (nmi([pool[t] for t in m._found], [c for _, c in m._found.values()]) for m in families)
    assert random < .05 and codes > .4


def test_the_oracle_orders_by_the_true_level(trained):
    method, _, order = planned(trained, order="labels", grouping="none", mix=0., drop=0.)
    levels = [WORLD.difficulty(p) for p in order]
    assert levels == sorted(levels)


def test_labels_by_pass_rate_are_paid_for(trained):
    free, run, _ = planned(trained, n=64, pool=200)
    assert run.n_sampled == 0 and free.metrics()["label_rollouts"] == 0
    paid, run, _ = planned(trained, n=64, pool=200, labels="pass_rate", drop=0.)
    assert paid.metrics()["label_rollouts"] == 8*200 and 8*200*3 < run.n_sampled <= 8*200*16
    orders = [[p.prompt for p in planned(trained, n=64, pool=200, labels="pass_rate", drop=0.)[2]] for _ in range(2)]
    assert orders[0] == orders[1]


def test_the_other_reading_of_mixing(trained):
    assert drawn_batches(AB, HARD, 4, 1)[:2] == [[0, 1, 2, 8], [9, 10, 11, 3]]
    method, _, order = planned(trained, mixing="draw")
    assert len(order) == 320


def test_a_policy_may_be_trained_by_what_another_reads(trained, tmp_path):
    small = load_policy("families-habits-small", device="cpu")
    args = training_config(tmp_path, num_problems=4, num_generations=4, updates=2, seed=0, max_completion_length=16, shuffle_dataset=False)
    a, b = SAERL(trained[1], pool=200, n_labels=60), SAERL(trained[1], pool=200, n_labels=60)
    run = Trainer(small, WORLD, WORLD.problems(32, seed=0), a, args); run.train()
    big = Trainer(load_policy("families-habits", device="cpu"), WORLD, WORLD.problems(32, seed=0), b, args)
    assert [p.prompt for p in run.problems] == [p.prompt for p in big.problems]


# ---------------------------------------------------------------- resume, identity, refusals
def test_resumed_run_equals_unbroken_one(weights, reader, tmp_path):
    def method(): return Compose(light(reader, drop=.1), GradientWatch())
    whole_run = make(weights, tmp_path/"whole", method(), updates=6)
    make(weights, tmp_path/"part", method(), updates=6, save_steps=3)
    resumed = make(weights, tmp_path/"part", method(), updates=6, resume=str(tmp_path/"part"/"checkpoint-3"))
    assert same(whole_run.policy.model, resumed.policy.model) and resumed.asked == whole_run.asked[3:]


def test_a_checkpoint_of_another_schedule_is_refused(weights, reader, tmp_path):
    make(weights, tmp_path, light(reader), updates=4, save_steps=2)
    with pytest.raises(ValueError, match="not that of the checkpoint"): make(weights, tmp_path, light(reader, mix=0.), updates=4, resume=str(tmp_path/"checkpoint-2"))


def test_state_round_trip(weights, reader, tmp_path):
    a, b = light(reader), light(reader)
    for m in (a, b): make(weights, tmp_path, m, train=False)
    b.load_state_dict(a.state_dict())
    assert len(a.state_dict()["schedule"]) == 16


def test_what_tells_two_arms_apart(weights, reader, tmp_path):
    base = light(reader)
    fresh = describe(base)
    make(weights, tmp_path, base, updates=1)
    assert describe(base) == fresh == describe(light(reader)) and fresh["reader_key"] == reader.key()
    for kw in (dict(mix=0.), dict(drop=0.), dict(grouping="random"), dict(order="none"), dict(labels="pass_rate"), dict(pool=500), dict(mixing="draw"), dict(quality=float)):
        assert describe(light(reader, **kw)) != fresh
    other = train_reader(weights, ["1+2="]*9, n_latents=64, k=8, steps=2, progress=False, limit=1.)
    assert describe(light(other)) != fresh


@pytest.mark.parametrize("kw,message", ((dict(mix=.7), "mix=0.7"), (dict(drop=1.), "drop=1.0"), (dict(grouping="family"), "grouping='family'"), (dict(order="hard"), "order='hard'"), (dict(labels="none"), "labels='none'"),
                                        (dict(mixing="swapp"), "mixing='swapp'"), (dict(n_labels=2), "n_labels=2")))
def test_bad_settings_are_refused(kw, message):
    with pytest.raises(ValueError, match=message): SAERL(**kw)


def test_bad_circumstances_are_refused(weights, reader, tmp_path):
    with pytest.raises(ValueError, match="pool=10 is smaller than the 32 problems"): make(weights, tmp_path, light(reader, pool=10))
    with pytest.raises(ValueError, match="give quality="): make(weights, tmp_path, light(reader), problems=[Problem(p.prompt, p.answer, {k: v for k, v in p.meta.items() if k != "damage"}) for p in WORLD.problems(32, seed=1)], train=False)
    with pytest.raises(ValueError, match="world=None"): make(weights, tmp_path, light(reader), world=None, train=False)
    with pytest.raises(ValueError, match="n_clusters=40"): prompt_clusters(np.ones((3, 2)), 40)
    with pytest.raises(ValueError, match="one cluster and one difficulty"): ordered_batches([0, 1], [1.], 2)
    assert mixing_count(.25, 16) == 4 and mixing_count(.25, 2) == 1
