"The critic and PPO, where they meet sampler and trainer."
from types import SimpleNamespace
import pytest
import torch
from rlworkbench.method import Compose, Method
from rlworkbench.policies import Recipe, Stage, train_recipe
from rlworkbench.rollouts import TorchSampler
from rlworkbench.toolbox.critics import PPO, ValueHead, fit_values, value_targets
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world

WORLD = make_world("chain", steps=2)
MINI = Recipe("mini", "chain", (Stage(12, 3e-3),), dials=dict(steps=2), width=32, layers=1)


@pytest.fixture(scope="module")
def weights(): return train_recipe(MINI, progress=False)


def fresh(weights):
    "A policy with the mini weights that no other test has trained."
    import copy
    return copy.deepcopy(weights)


def run(weights, out, method, *, updates=4, seed=3, resume=None, save_steps=0, **settings):
    args = training_config(out, num_problems=2, num_generations=4, updates=updates, seed=seed, max_completion_length=12, learning_rate=1e-3, save_steps=save_steps,
                           **{**method.training, **settings})
    trainer = Trainer(fresh(weights), WORLD, WORLD.problems(16, seed=1), method, args)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_values_are_read_before_the_token(weights):
    torch.manual_seed(0)
    head = ValueHead(32)
    sampler = TorchSampler(weights.model, weights.tokenizer, 10, value_fn=head, keep=("hidden",))
    r = sampler.sample([weights.encode(p.prompt) for p in WORLD.problems(6)])
    ids, P = torch.cat([r.prompt_ids, r.completion_ids], 1), r.prompt_ids.shape[1]
    seen = torch.cat([r.prompt_mask, r.completion_mask], 1)
    with torch.no_grad():
        hidden = weights.model.get_decoder()(ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp_min(0)).last_hidden_state
    before, after, m = head(hidden[:, P-1:-1]), head(hidden[:, P:]), r.completion_mask.bool()
    torch.testing.assert_close(r.extras["values"][m], before[m], atol=1e-5, rtol=0)
    assert (r.extras["values"][m] - after[m]).abs().max() > 1e-3          # one token late is another critic


def test_a13_targets_with_padding():
    values, mask = torch.tensor([[.2, .4, .6, 50.]]), torch.tensor([[1., 1, 1, 0]])
    advantages, returns, _ = value_targets(torch.tensor([1.]), values, mask)
    torch.testing.assert_close(advantages, torch.tensor([[.751, .58, .4, 0.]]))
    torch.testing.assert_close(returns, torch.tensor([[.951, .98, 1., 0.]]))


def test_unscored_rollouts_teach_nothing():
    ppo = PPO()
    r = SimpleNamespace(rewards=torch.tensor([1., float("nan"), -1.]), policy_mask=torch.ones(3, 2).long(),
                        extras=dict(values=torch.zeros(3, 2), hidden=torch.arange(6.).view(3, 2, 1)))
    advantages = ppo.advantages(r, None)
    assert advantages.isfinite().all() and (advantages[1] == 0).all()
    assert ppo._batch[0][:, 0].tolist() == [0., 1., 4., 5.]                # the tokens of the row between are not in the batch


def test_outcomes():
    rewards = torch.tensor([0., .5, 1.])
    assert PPO().rewards(None, rewards).tolist() == [-1., 0., 1.]
    assert PPO(wrong=0.).rewards(None, rewards).tolist() == [0., .5, 1.]


@pytest.mark.parametrize("clip,moves", ((None, True), (2., True), (.2, False)))
def test_value_clip_stops_values_that_have_moved_enough(clip, moves):
    torch.manual_seed(0)
    head, hidden = ValueHead(4), torch.randn(64, 4)
    before, returns = [p.clone() for p in head.parameters()], torch.full((64,), 5.)
    old = head(hidden).detach() - 1.                                      # since then each value has risen by 1, towards its return
    fit_values(head, torch.optim.SGD(head.parameters(), lr=.1), hidden, old, returns, 1, clip=clip)
    assert moves == any(not torch.equal(a, b) for a, b in zip(before, head.parameters()))


def test_critic_steps_follow_the_updates(weights, tmp_path, monkeypatch):
    from rlworkbench.toolbox import critics
    seen, real = [], critics.fit_values
    monkeypatch.setattr(critics, "fit_values", lambda head, opt, h, v, r, steps, *a: (seen.append(steps), real(head, opt, h, v, r, steps, *a))[1])
    trainer = run(weights, tmp_path, PPO(), updates=4)
    assert seen == [10, 5, 10, 5]                                         # two updates on each of two batches
    logged = [e for e in trainer.state.log_history if "value_loss" in e]
    assert len(logged) == 4 and logged[0]["value_loss"] == logged[1]["value_loss"]   # the loss on a new batch, once


def test_the_critic_does_not_move_the_policy(weights, tmp_path):
    class Deaf(PPO):                                                      # the critic trains, the advantages are GRPO's
        def advantages(self, rollouts, advantages): super().advantages(rollouts, advantages); return advantages*0
    trainer = run(weights, tmp_path, Deaf(), updates=2)
    assert same(trainer.policy.model, weights.model)
    assert trainer.method.value_loss > 0


def test_same_seed_same_run(weights, tmp_path):
    a, b, c = (run(weights, tmp_path/str(i), PPO(), seed=s) for i, s in enumerate((3, 3, 4)))
    assert same(a.policy.model, b.policy.model) and same(a.method.head, b.method.head)
    assert not same(a.method.head, c.method.head)


@pytest.mark.parametrize("stop_at", (4, 3))                               # between two batches; between two updates on one batch
def test_resumed_run_equals_unbroken_one(weights, tmp_path, stop_at):
    whole = run(weights, tmp_path/"whole", PPO(), updates=6)
    run(weights, tmp_path/"part", PPO(), updates=6, save_steps=stop_at)   # leaves a checkpoint on its way
    resumed = run(weights, tmp_path/"part", PPO(), updates=6, resume=str(tmp_path/"part"/f"checkpoint-{stop_at}"))
    assert same(whole.policy.model, resumed.policy.model)
    assert same(whole.method.head, resumed.method.head)


def test_several_processes_are_refused(weights):
    with pytest.raises(ValueError, match="world_size=2"): PPO().prepare(SimpleNamespace(args=SimpleNamespace(world_size=2, seed=0), policy=weights))


def test_two_owners_of_the_advantages_are_refused():
    class Other(Method):
        replaces = ("advantages",)
    with pytest.raises(ValueError, match="PPO and Other both replace the stage `advantages`"): Compose(PPO(), Other())
