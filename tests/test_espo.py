"Invariants of ESPO that need a sampler or a trainer; those of the single formulas stand in nbs/07_espo.ipynb. The numbers are the card's."
import copy, math
from types import SimpleNamespace
import pytest
import torch
from rlworkbench.advantages import gae, terminal_rewards
from rlworkbench.experiment import describe
from rlworkbench.method import Compose, Method
from rlworkbench.methods.espo import ESPO, PATIENCE, RateController, RegretStatistics, StopMonitor, WarmUp, cumulative_regret, failed_frac, normalised_regret, pressure, regret, stop_index
from rlworkbench.policies import Recipe, Stage, train_recipe
from rlworkbench.rollouts import Stop, TorchSampler
from rlworkbench.toolbox.critics import PPO, ValueHead
from rlworkbench.toolbox.cutting import can_stop, cut_rollouts, shadow
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world

WORLD = make_world("chain", steps=2)
MINI = Recipe("mini", "chain", (Stage(12, 3e-3),), dials=dict(steps=2), width=32, layers=1)


@pytest.fixture(scope="module")
def weights(): return train_recipe(MINI, progress=False)


def run(weights, out, method, *, updates=4, seed=3, resume=None, save_steps=0, max_completion_length=12):
    args = training_config(out, num_problems=2, num_generations=4, updates=updates, seed=seed, max_completion_length=max_completion_length, learning_rate=1e-3,
                           save_steps=save_steps, **method.training)
    trainer = Trainer(copy.deepcopy(weights), WORLD, WORLD.problems(16, seed=1), method, args)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def armed(espo):
    "The same method with the warm-up behind it."
    espo.monitor.warmup.armed = True
    espo.monitor.lengths = torch.tensor([8, 12])
    return espo


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def make_monitor(level=.5, **kw):
    kw = dict(statistics=RegretStatistics(.9, .5, 1.), warmup=WarmUp(armed=True)) | kw
    return StopMonitor(controller=RateController(level), **kw)


def sample(policy, n=32, seed=0, length=16, monitors=(), **kw):
    torch.manual_seed(1)
    head = ValueHead(32)
    torch.manual_seed(seed)
    sampler = TorchSampler(policy.model, policy.tokenizer, length, value_fn=head, monitors=monitors, **kw)
    return sampler, sampler.sample([policy.encode(p.prompt) for p in WORLD.problems(n)])


# ---------------------------------------------------------------- 1: regret
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_i1_regret_of_each_token(dtype):
    logits = torch.tensor([.6, .3, .1], dtype=dtype).log().expand(3, 3)
    torch.testing.assert_close(regret(logits, torch.arange(3)), torch.tensor([0., .693147, 1.791759], dtype=dtype), atol=1e-6, rtol=0)


def test_i1_greedy_is_never_stopped(weights):
    monitor = make_monitor(level=.5)
    _, r = sample(weights, monitors=(monitor,), greedy=True)
    assert (r.extras["regret"] == 0).all() and (r.extras["z"] <= 0).all()
    assert (r.stop != Stop.CUT).all()


@pytest.mark.parametrize("settings", (dict(temperature=2.), dict(top_k=3), dict(top_p=.7)))
def test_i1_regret_is_that_of_the_plain_policy(weights, settings):
    monitor = make_monitor(level=math.inf)
    _, r = sample(weights, monitors=(monitor,), **settings)
    seen = torch.cat([r.prompt_mask, r.completion_mask], 1)
    with torch.no_grad():
        logits = weights.model(torch.cat([r.prompt_ids, r.completion_ids], 1), attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp_min(0)).logits
    wanted = regret(logits[:, r.prompt_ids.shape[1] - 1:-1], r.completion_ids)*r.completion_mask
    torch.testing.assert_close(r.extras["regret"], wanted, atol=2e-4, rtol=0)
    assert (r.extras["regret"] >= 0).all() and r.extras["regret"].max() > .1


# ---------------------------------------------------------------- 2, 3: the rule
Z = torch.tensor([[-.04, .062629, .556366, 1.000730, .860657]])


def test_i2_stop_at_the_fourth_token():
    g = torch.tensor([[0., math.log(2), 4., 4., 0.]])
    norm = normalised_regret(g, .2, .25, clip=5.)
    torch.testing.assert_close(norm, torch.tensor([[-.4, .986294, 5., 5., -.4]]), atol=1e-5, rtol=0)
    z = cumulative_regret(norm, torch.ones(1, 5), alpha=.9)
    torch.testing.assert_close(z, Z, atol=1e-5, rtol=0)
    stops = [stop_index(pressure(z, torch.full((1, 5), v), .2), 3., torch.ones(1, 5)).item() for v in (.1, .5)]
    assert stops == [3, -1]


def test_i3_out_of_reach():
    z = cumulative_regret(torch.full((1, 2000), 5.), torch.ones(1, 2000), alpha=.9)
    assert z.max() <= 5
    assert abs(z[0, 3].item() - 1.7195) < 1e-4 and z[0, 2] < 1.4 < z[0, 3]
    z3 = z*.6
    assert abs(z3[0, 5].item() - 1.4057) < 1e-4 and z3[0, 4] < 1.4 < z3[0, 5]
    for v, stopped in ((.7143, False), (.70, True)):
        assert (stop_index(pressure(z, torch.full_like(z, v)), 7., torch.ones_like(z)) >= 0).item() == stopped


@pytest.mark.parametrize("seed", range(3))
def test_loop_equals_vectorised_z(seed):
    torch.manual_seed(seed)
    x, mask = torch.randn(5, 9), (torch.rand(5, 9) < .7).long()
    wanted = torch.zeros(5, 9)
    for b in range(5):
        z = 0.
        for t in range(9):
            if mask[b, t]: wanted[b, t] = z = .8*z + .2*x[b, t].item()
    torch.testing.assert_close(cumulative_regret(x, mask, .8), wanted)


# ---------------------------------------------------------------- 4: switched off it is PPO
def test_i4_disarmed_is_ppo_token_for_token(weights, tmp_path):
    texts = {}
    class Ear(Method):                                                    # keeps what was sampled
        def __init__(self): self.heard = []
        def rewards(self, rollouts, rewards): self.heard.append(rollouts.completion_ids.tolist()); return rewards
    plain = run(weights, tmp_path/"ppo", Compose(PPO(), Ear()))
    endless = armed(ESPO(beta=math.inf))
    for name, espo in dict(watch=ESPO(watch=True), endless=endless, random=armed(ESPO(signal="random", watch=True))).items():
        trainer = run(weights, tmp_path/name, Compose(PPO(), espo, Ear()))
        assert trainer.method[Ear].heard == plain.method[Ear].heard, name
        assert same(trainer.policy.model, plain.policy.model) and same(trainer.method[PPO].head, plain.method[PPO].head), name
        assert espo.log["stop_rate"] == 0
    assert endless.monitor.controller.level == math.inf


def test_i4_warm_up_is_ppo(weights, tmp_path):
    plain = run(weights, tmp_path/"ppo", PPO(), updates=4)
    espo = ESPO(beta=.5)
    espo.monitor.warmup.in_a_row, espo.monitor.warmup.at_most = 2, 1.     # armed after the second batch, which is the last
    warm = run(weights, tmp_path/"espo", Compose(PPO(), espo), updates=4)
    assert same(plain.policy.model, warm.policy.model)
    assert espo.monitor.warmup.armed and espo.monitor.controller.level == .5   # and patience has not moved


# ---------------------------------------------------------------- 5: the failure is terminal
def test_i5_gae_of_a_cut_rollout():
    rewards, values, mask = terminal_rewards(torch.tensor([-1.]), torch.ones(1, 3)), torch.tensor([[.5, .4, .2]]), torch.ones(1, 3)
    assert rewards.tolist() == [[0., 0., -1.]]
    torch.testing.assert_close(gae(rewards, values, mask, lam=.95)[0], torch.tensor([[-1.373, -1.34, -1.2]]))
    advantages, returns = gae(rewards, values, mask, lam=1.)
    torch.testing.assert_close(advantages, torch.tensor([[-1.5, -1.4, -1.2]]))
    torch.testing.assert_close(returns, -torch.ones(1, 3))
    # the wrong version: as if time had run out, the critic's guess of what follows takes the place of the failure
    limit = gae(torch.tensor([[0., 0., 0., .1]]), torch.tensor([[.5, .4, .2, .1]]), torch.ones(1, 4), lam=.95)[0]
    torch.testing.assert_close(limit[:, :3], torch.tensor([[-.38025, -.295, -.1]]))


# ---------------------------------------------------------------- 6, 7, 10: what is remembered
def test_i6_controller():
    for rate, wanted in ((.40, 7.015), (0., 6.975)):
        b = RateController(7., eta=.1); b.update(rate)
        assert abs(b.level - wanted) < 1e-9
    b = RateController(.6, eta=.5)
    for _ in range(9): b.update(0.)
    assert b.level == .5
    for _ in range(999): b.update(1.)
    assert b.level == 20.


def test_i7_statistics(weights):
    s = RegretStatistics(.99, mean=0., var=1.)
    s.update(torch.tensor([[0., 1., 3., 50.]]), torch.tensor([[1, 1, 1, 0]]))
    assert abs(s.mean - .013333) < 1e-6 and abs(s.var - 1.005556) < 1e-6
    monitor = make_monitor(statistics=s)
    before = (s.mean, s.var)
    sample(weights, monitors=(monitor,))
    assert (s.mean, s.var) == before                                      # nothing moves while rollouts are written
    monitor.start(2); s.mean = 99.
    assert monitor.mean == before[0]                                      # and what moves meanwhile is not seen


def test_i7_patience_and_arming_are_frozen_too():
    monitor = make_monitor(5.); monitor.start(1)
    monitor.controller.level, monitor.warmup.armed = -99., False          # moved while the batch is written
    logits, tokens, values = torch.zeros(1, 3), torch.tensor([0]), torch.zeros(1)
    assert not monitor.update(torch.arange(1), 0, logits, tokens, values).any()
    monitor.warmup.armed = True; monitor.start(1); monitor.warmup.armed = False
    assert monitor.update(torch.arange(1), 0, logits, tokens, values).all()   # heard at the start of the next one


@pytest.mark.parametrize("losses,total,at", (([.6, .4, .45, .49], 100, 4), ([2., 1.95, 1.93, 1.92], 100, 4), ([.6, .4, .8, .4, .45, .49], 100, 6),
                                             ([3., 2., 3., 2.], 40, 4), ([float("nan")]*9, 60, 6)))
def test_i10_warm_up(losses, total, at):
    w = WarmUp()
    for n, loss in enumerate(losses, 1):
        assert w.armed == (n > at)
        w.update(loss, total)
    assert w.armed


def test_i10_a_run_waits_for_its_critic_but_not_longer_than_a_tenth(weights, tmp_path):
    espo = ESPO()
    espo.monitor.warmup.loss_below = espo.monitor.warmup.change_below = -1.   # never settled
    trainer = run(weights, tmp_path, Compose(PPO(), espo), updates=4)
    assert espo._total == 2                                               # four updates, two on each batch: a tenth is one batch
    assert espo.monitor.warmup.armed and espo.monitor.warmup.n_batches == 1
    first = ESPO()
    first.monitor.warmup.in_a_row, first.monitor.warmup.at_most = 99, 1.
    trainer = run(weights, tmp_path/"waits", Compose(PPO(), first), updates=4)
    assert first.monitor.warmup.n_batches == 2 and first.monitor.warmup.last == trainer.method[PPO].value_loss   # the loss of the newest batch


def test_i10_armed_for_good():
    w = WarmUp(armed=True)
    w.update(99., 1000)
    assert w.armed


# ---------------------------------------------------------------- 8: while writing and afterwards
@pytest.mark.parametrize("signal,level", (("both", .4), ("regret", .4), ("value", .02)))
def test_i8_online_equals_retroactive(weights, signal, level):
    watch = make_monitor(level, signal=signal, watch_only=True)
    _, full = sample(weights, 48, monitors=(watch,))
    after = cut_rollouts(full, watch.retrospect(full.extras["regret"], full.extras["values"], full.completion_mask, full.stop == Stop.EOS))
    online = make_monitor(level, signal=signal)
    torch.manual_seed(1); head = ValueHead(32)
    replay = TorchSampler(weights.model, weights.tokenizer, 16, value_fn=head, monitors=(online,), train_forced=True)
    forced = [row[:n] for row, n in zip(full.completion_ids.tolist(), full.lengths.tolist())]
    again = replay.sample([weights.encode(p.prompt) for p in WORLD.problems(48)], forced=forced)
    cut = again.stop == Stop.CUT
    assert 3 < cut.sum() < 45, "the case should have both"
    assert torch.equal(cut, after.stop == Stop.CUT)
    assert torch.equal(again.extras["t_stop"][cut], after.extras["t_stop"][cut])
    for name in ("completion_ids", "completion_mask", "policy_mask", "stop"): assert torch.equal(getattr(again, name), getattr(after, name)), name
    torch.testing.assert_close(again.extras["z"], after.extras["z"], atol=1e-4, rtol=0)


def test_i8_value_is_that_of_the_state_before_the_token(weights):
    sampler, r = sample(weights, monitors=(make_monitor(level=math.inf),))
    seen = torch.cat([r.prompt_mask, r.completion_mask], 1)
    with torch.no_grad():
        hidden = weights.model(torch.cat([r.prompt_ids, r.completion_ids], 1), attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp_min(0), output_hidden_states=True).hidden_states[-1]
        P, mask = r.prompt_ids.shape[1], r.completion_mask
        before, after = (sampler.value_fn(h)*mask for h in (hidden[:, P-1:-1], hidden[:, P:]))
    torch.testing.assert_close(r.extras["values"], before, atol=2e-4, rtol=0)
    assert (r.extras["values"] - after).abs().max() > .02                 # one token late would be seen


def test_an_answer_that_has_ended_is_not_cut(weights):
    full = sample(weights, 64, monitors=(make_monitor(watch_only=True),))[1]
    ended = full.stop == Stop.EOS
    assert ended.any()
    always = make_monitor(-99.); always.start(64)
    t = always.retrospect(full.extras["regret"], full.extras["values"], full.completion_mask, ended)
    assert (t[full.lengths > 1] == 0).all() and (t[ended & (full.lengths == 1)] == -1).all()


# ---------------------------------------------------------------- 9: nothing is left of the tail
@pytest.mark.parametrize("retroactive", (False, True))
def test_i9_the_tail_is_in_no_count(weights, tmp_path, retroactive):
    heard = []
    class Ear(Method):
        def rewards(self, rollouts, rewards): heard.append((rollouts, rewards)); return rewards
        def token_loss(self, step, loss): assert torch.equal(step.mask, step.rollouts.policy_mask); return loss
    espo = armed(ESPO(beta=1.2, eta=0., retroactive=retroactive))
    espo.monitor.statistics = RegretStatistics(.9, .5, 1.)
    trainer = run(weights, tmp_path, Compose(PPO(), espo, Ear()), updates=6, max_completion_length=16)
    assert trainer.n_sampled == sum(int(r.completion_mask.sum()) for r, _ in heard)
    assert any((r.stop == Stop.CUT).any() for r, _ in heard)
    for r, rewards in heard:
        cut, last = r.stop == Stop.CUT, r.lengths - 1
        assert torch.equal(r.extras["t_stop"][cut], last[cut]) and (rewards[cut] == -1).all()
        beyond = torch.arange(r.completion_mask.shape[1]) > last[:, None]
        for name in ("completion_mask", "policy_mask"): assert (getattr(r, name)[beyond] == 0).all()
        assert (r.extras["regret"][beyond] == 0).all() and (r.extras["values"][beyond] == 0).all()
        placed = terminal_rewards(rewards, r.policy_mask)
        assert torch.equal(placed.gather(1, last[:, None])[:, 0], rewards) and (placed != 0).sum(1).max() == 1
    statistics = RegretStatistics(.9, .5, 1.)
    for r, _ in heard: statistics.update(r.extras["regret"], r.policy_mask)
    assert (statistics.mean, statistics.var) == (espo.monitor.statistics.mean, espo.monitor.statistics.var)


def test_i9_the_critic_and_the_advantages_see_kept_tokens_only(weights, tmp_path):
    espo, seen = armed(ESPO(beta=.5, eta=0.)), []
    espo.monitor.statistics = RegretStatistics(.9, .2, 1.)
    class Ear(Method):
        def prepare(self, run): self.critic = run.method[PPO]
        def advantages(self, rollouts, advantages): seen.append((rollouts, advantages, self.critic._batch)); return advantages
    run(weights, tmp_path, Compose(PPO(), espo, Ear()), updates=4, max_completion_length=16)
    assert any((r.stop == Stop.CUT).any() for r, *_ in seen)
    for r, advantages, (hidden, values, returns) in seen:
        kept = r.completion_mask.bool()
        assert len(hidden) == len(values) == len(returns) == kept.sum() == r.n_tokens
        assert (advantages[~kept] == 0).all()
        assert abs(advantages[kept].mean()) < 1e-5 and abs(advantages[kept].std() - 1) < 1e-4
        at_end = torch.arange(kept.shape[1]) == r.lengths[:, None] - 1
        torch.testing.assert_close(returns[at_end[kept]], r.rewards)      # no critic speaks for what lies behind the end, cut or not


def test_only_stops_by_the_rule_count():
    espo = armed(ESPO())
    r = SimpleNamespace(stop=torch.tensor([Stop.CUT, Stop.CUT, Stop.LENGTH, Stop.EOS]), lengths=torch.tensor([3, 3, 4, 3]), extras=dict(t_stop=torch.tensor([2, -1, -1, 2])))
    rewards = espo.rewards(r, torch.tensor([math.nan, 1., -1., 1.]))      # the second was stopped by another monitor, the last ended by itself on a token that the rule would have stopped
    assert rewards.tolist() == [-1., 1., -1., 1.]
    assert espo._batch[1].tolist() == [True, False, False, False]


# ---------------------------------------------------------------- placebo, probe, state
def test_random_arm_stops_at_its_rate(weights, tmp_path):
    espo, rates = armed(ESPO(signal="random", tau=.5)), []
    class Ear(Method):
        def rewards(self, rollouts, rewards): rates.append((rollouts.stop == Stop.CUT).float().mean().item()); return rewards
    run(weights, tmp_path, Compose(PPO(), espo, Ear()), updates=24, max_completion_length=16)
    assert .3 < sum(rates)/len(rates) < .65


def test_schedule_takes_the_place_of_tau():
    espo = armed(ESPO(signal="random", tau=.25, schedule=[.5, .1]))
    m = espo.monitor
    for wanted in (.75 - .5, .75 - .5 - .1, 0.):                          # nothing was stopped; then tau again, and the bound
        m.start(2)
        espo.learn(SimpleNamespace(extras=dict(regret=torch.zeros(2, 3)), policy_mask=torch.ones(2, 3), lengths=torch.tensor([3, 3])), torch.tensor([False, False]), 1.)
        assert abs(m.controller.level - wanted) < 1e-6


@pytest.mark.parametrize("failed_frac,aim", ((.9, .25), (.5, .25), (.1, .05), (0., 0.)))
def test_no_more_is_stopped_than_half_of_what_fails(failed_frac, aim):
    for espo, wanted in ((armed(ESPO(beta=7., eta=.1)), aim), (armed(ESPO(beta=7., eta=.1, tau_share=None)), .25)):
        espo.monitor.start(2)
        espo.learn(SimpleNamespace(extras=dict(regret=torch.zeros(2, 3)), policy_mask=torch.ones(2, 3), lengths=torch.tensor([3, 3])), torch.tensor([True, False]), failed_frac)
        assert abs(espo.monitor.controller.level - (7 + .1*(.5 - wanted))) < 1e-9


def test_the_schedule_holds_from_the_first_armed_batch_on():
    espo = ESPO(signal="random", tau=.25, schedule=[.6, .1])
    espo.critic, espo._total = SimpleNamespace(value_loss=.1), 100
    batch = SimpleNamespace(extras=dict(regret=torch.zeros(2, 3)), policy_mask=torch.ones(2, 3), lengths=torch.tensor([3, 3]))
    levels = []
    for _ in range(3):
        espo.monitor.start(2); espo.learn(batch, torch.tensor([False, False]), 1.); levels.append(espo.monitor.controller.level)
    assert levels[:2] == [.75, .75] and abs(levels[2] - .4) < 1e-9 and espo.schedule == [.1]      # three settled losses arm the fourth batch


def test_failures_are_counted_by_what_a_stop_says():
    rewards, cut = torch.tensor([1., 0., 0., math.nan]), torch.tensor([True, False, True, False])
    assert failed_frac(rewards, cut, True) == 3/4            # stopped by the rule: row 0 counts as failed
    assert failed_frac(rewards, cut, False) == 1/2           # stopped by chance: rows 1 and 3 are left, one has failed
    assert failed_frac(rewards, torch.ones(4, dtype=torch.bool), False) == 0.


def test_value_arm_follows_the_critic_as_it_is_now(weights, tmp_path):
    espo = ESPO(signal="value", tau=.25)
    espo.monitor.warmup.in_a_row, espo.monitor.warmup.at_most = 9, 1.
    trainer = run(weights, tmp_path, Compose(PPO(), espo), updates=2, max_completion_length=16)
    r, level = trainer.rollouts, espo.monitor.controller.level
    def stopped(values): return (values.masked_fill(~can_stop(r.completion_mask, r.stop == Stop.EOS), math.inf).amin(1) < -level).sum().item()
    assert stopped(trainer.method[PPO].head(r.extras["hidden"]).detach()) == 2    # a quarter of 8 rollouts
    assert stopped(r.extras["values"]) != 2                                       # the critic has moved since they were written


def test_value_arm_stops_at_the_rate_that_it_is_given(weights, tmp_path):
    espo = ESPO(signal="value", schedule=[.5]*30)
    trainer = run(weights, tmp_path, Compose(PPO(), espo), updates=40, max_completion_length=16)
    rates = [e["stop_rate"] for e in trainer.state.log_history if e.get("armed") and e["step"] % 2]
    assert len(rates) > 10 and .25 < sum(rates)/len(rates) < .75


def test_what_espo_cannot_work_with_is_refused(weights, tmp_path):
    method = Compose(PPO(), ESPO())
    def prepare(**args): method[ESPO].prepare(SimpleNamespace(method=method, args=SimpleNamespace(**{**dict(max_steps=10, world_size=1), **args})))
    with pytest.raises(ValueError, match="set max_steps"): prepare(max_steps=-1)
    with pytest.raises(ValueError, match="world_size=2"): prepare(world_size=2)


def test_shadow_goes_on_from_the_cut(weights):
    monitor = make_monitor(.8)
    sampler, r = sample(weights, 32, monitors=(monitor,))
    cut = (r.stop == Stop.CUT).nonzero()[:, 0]
    assert len(cut) > 3
    state, plain = torch.get_rng_state(), sampler.replace(monitors=())
    texts, fits = shadow(plain, r, cut, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(text.startswith(r.completions[i]) for text, i in zip(texts, cut.tolist()))
    assert (texts, fits) == shadow(plain, r, cut, seed=5) and any(len(t) > len(r.completions[i]) for t, i in zip(texts, cut.tolist()))


@pytest.mark.parametrize("retroactive", (False, True))
def test_probe_counts_what_would_have_been_right(weights, tmp_path, retroactive):
    class AlwaysRight(type(WORLD)):
        def verify(self, problem, completion): return 1.
    espo = armed(ESPO(beta=.5, eta=0., retroactive=retroactive, probe_every=1))
    espo.monitor.statistics = RegretStatistics(.9, .2, 1.)
    args = training_config(tmp_path, num_problems=2, num_generations=4, updates=2, max_completion_length=16, num_iterations=2)
    world = AlwaysRight(steps=2)
    trainer = Trainer(copy.deepcopy(weights), world, world.problems(16, seed=1), Compose(PPO(), espo), args)
    trainer.train()
    assert espo.log["n_probed"] == round(8*espo.log["stop_rate"]) > 0
    assert espo.log["false_positive_frac"] > .5                           # short of 1 only by what ran past the length limit


@pytest.mark.parametrize("stop_at", (4, 3))                               # between two batches; between two updates on one batch
@pytest.mark.parametrize("signal", ("both", "random"))
def test_resumed_run_equals_unbroken_one(weights, tmp_path, stop_at, signal):
    def method(): return Compose(PPO(), armed(ESPO(signal=signal, beta=1. if signal == "both" else .5)))
    whole = run(weights, tmp_path/"whole", method(), updates=6)
    run(weights, tmp_path/"part", method(), updates=6, save_steps=stop_at)
    resumed = run(weights, tmp_path/"part", method(), updates=6, resume=str(tmp_path/"part"/f"checkpoint-{stop_at}"))
    a, b = whole.method[ESPO], resumed.method[ESPO]
    assert same(whole.policy.model, resumed.policy.model) and same(whole.method[PPO].head, resumed.method[PPO].head)
    assert (a.monitor.statistics, a.monitor.controller, a.monitor.warmup, a._n_batches) == (b.monitor.statistics, b.monitor.controller, b.monitor.warmup, b._n_batches)
    assert a.monitor.controller.level not in (1., .5) and a._n_batches == 3


def test_state_round_trip():
    a, b = ESPO(), ESPO()
    a.monitor.statistics.update(torch.rand(3, 4), torch.ones(3, 4)); a.monitor.controller.update(.9); a.monitor.warmup.update(.4, 50)
    a.monitor.lengths, a._n_batches = torch.tensor([3, 4]), 7
    state = a.state_dict()
    a.monitor.controller.update(.9)                                       # the state that was taken does not move with the run
    b.load_state_dict(state)
    assert b.monitor.controller.level == 3. + .5*(.9 - .25) and b.monitor.warmup.n_settled == 1 and b.monitor.statistics == a.monitor.statistics
    assert b.monitor.lengths.tolist() == [3, 4] and b._n_batches == 7


def test_two_methods_share_no_state():
    a, b = ESPO(), ESPO()
    a.monitor.controller.update(1.); a.monitor.warmup.update(.1, 50)
    assert b.monitor.controller.level == PATIENCE["both"]["level"] == 3. and b.monitor.warmup.n_batches == 0


# ---------------------------------------------------------------- with plain GRPO, and what is refused
def test_regret_alone_works_without_a_critic(weights, tmp_path):
    espo = armed(ESPO(signal="regret", beta=.5, r_fail=0.))
    espo.monitor.statistics = RegretStatistics(.9, .2, 1.)
    trainer = run(weights, tmp_path, espo, updates=2)
    assert espo.log["stop_rate"] > 0 and "auc_value" not in espo.log
    assert set(trainer.rollouts.rewards.tolist()) <= {0., 1.}


@pytest.mark.parametrize("make,message", ((lambda: ESPO(), "there is none: use Compose"), (lambda: ESPO(signal="value"), "signal='value'"),
                                          (lambda: Compose(ESPO(), PPO()), r"write Compose\(PPO\(\), ESPO\(\)\)"), (lambda: ESPO(signal="vlaue"), "use one of both, regret, value, random")))
def test_what_cannot_work_is_refused(weights, tmp_path, make, message):
    with pytest.raises(ValueError, match=message): run(weights, tmp_path, make())


def test_a_setting_that_would_mask_cut_rollouts_is_refused(weights, tmp_path):
    args = training_config(tmp_path, num_problems=2, num_generations=4, updates=2, max_completion_length=12, num_iterations=2, mask_truncated_completions=True)
    with pytest.raises(ValueError, match="needs mask_truncated_completions=False, but the settings say True"):
        Trainer(weights, WORLD, WORLD.problems(16, seed=1), Compose(PPO(), ESPO()), args)
    assert Compose(PPO(), ESPO()).training == dict(num_iterations=2, mask_truncated_completions=False)


def test_what_tells_two_arms_apart_are_settings_not_state(weights, tmp_path):
    method = Compose(PPO(), ESPO(tau=.3))
    fresh = describe(method)
    run(weights, tmp_path, method)
    assert describe(method) == fresh
    ppo, espo = fresh["parts"]
    assert set(ppo) == {"name", "gamma", "lam", "learning_rate", "steps", "width", "wrong"}
    assert set(espo) == {"name", "alpha", "alpha_stats", "clip", "epsilon", "probe_every", "probe_rollouts", "r_fail", "retroactive", "signal", "tau", "tau_share", "watch"}
    assert describe(Compose(PPO(), ESPO(tau=.3))) == fresh != describe(Compose(PPO(), ESPO()))
