"The trainer: equal to TRL's own with no method, refuses what does not fit, resumes as if nothing had happened."
import copy, math
from dataclasses import dataclass
import pytest, torch
from datasets import Dataset
from torch import tensor
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict
from rlworkbench.method import Method
from rlworkbench.policies import build_tokenizer, load_policy, tiny_model
from rlworkbench.rollouts import Sampler, TorchSampler
from rlworkbench.scoring import score_rollouts
from rlworkbench.trainer import Trainer, check_sizes, latest_checkpoint, training_config
from rlworkbench.worlds.base import Problem
from rlworkbench.worlds.chain import Chain

WORLD, LENGTH = Chain(steps=2), 12

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    "A small random policy as a folder, so that a reference model can be loaded from it."
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(3)
    tokenizer = build_tokenizer(list(WORLD.vocab), "t", 64)
    tiny_model(len(tokenizer), width=32, layers=1, context=64).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path

@pytest.fixture
def policy(folder):
    return load_policy(folder)

def length_reward(completions, **kwargs):
    "Spread in every group, and nothing that the tiny policy must know."
    return [float(len(c) % 5) for c in completions]

def config(out, **kw):
    return training_config(out, **{**dict(num_problems=4, num_generations=4, updates=5, learning_rate=1e-3, max_completion_length=LENGTH, seed=11), **kw})

def ours(policy, args, method=None, problems=None, **kw):
    return Trainer(policy, WORLD, problems or WORLD.problems(24, seed=0), method, args, **{**dict(reward_funcs=[length_reward]), **kw})

def stock(policy, args, problems=None):
    def roll_out(prompts, trainer):
        r = TorchSampler(trainer.model, policy.tokenizer, args.max_completion_length, temperature=args.temperature).sample([policy.encode(p) for p in prompts])
        n, m = r.lengths.tolist(), r.prompt_mask.sum(1).tolist()
        return {"prompt_ids": [x[-k:] for x, k in zip(r.prompt_ids.tolist(), m)], "completion_ids": [x[:k] for x, k in zip(r.completion_ids.tolist(), n)],
                "logprobs": [x[:k] for x, k in zip(r.logps.tolist(), n)]}
    data = Dataset.from_list([{"prompt": p.prompt, "problem_idx": i} for i, p in enumerate(problems or WORLD.problems(24, seed=0))])
    return GRPOTrainer(model=policy.model, reward_funcs=[length_reward], args=args, train_dataset=data, processing_class=policy.tokenizer, rollout_func=roll_out)

def gradients(trainer, moved=0.):
    "Loss and gradients of one batch, without an update; `moved`: how far the weights have moved since it was sampled."
    rows = [row for row in trainer.train_dataset for _ in range(4)][:trainer.args.generation_batch_size]
    trainer.model.train(); trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    batch = trainer._generate_and_score_completions(rows)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trainer.model.parameters(): p += moved*torch.randn(p.shape, generator=noise)
    loss = sum(trainer._compute_loss(trainer.model, part) for part in split_tensor_dict(batch, trainer.args.steps_per_generation))
    loss.backward()
    return batch, loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters()}

SETTINGS = [dict(), dict(loss_type="grpo"), dict(loss_type="dapo"), dict(loss_type="dr_grpo"), dict(beta=.1), dict(importance_sampling_level="sequence"),
            dict(loss_type="cispo", epsilon_high=5.), dict(delta=1.3, num_iterations=2), dict(temperature=.7), dict(scale_rewards="none"), dict(mask_truncated_completions=True)]

@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default")
def test_same_rollouts_same_loss_and_gradients_as_the_stock_trainer(folder, tmp_path, settings):
    a, loss_a, grads_a = gradients(ours(load_policy(folder), config(tmp_path/"a", **settings)))
    b, loss_b, grads_b = gradients(stock(load_policy(folder), config(tmp_path/"b", **settings)))
    assert torch.equal(a["completion_ids"], b["completion_ids"]) and torch.equal(a["completion_mask"], b["completion_mask"])
    assert abs(loss_a - loss_b) < 1e-6
    assert max((grads_a[n] - grads_b[n]).abs().max() for n in grads_b) < 1e-6
    assert max(g.abs().max() for g in grads_b.values()) > 1e-4        # or the equality would say nothing

MOVED = [dict(), dict(loss_type="grpo", epsilon_high=.4), dict(delta=1.3), dict(importance_sampling_level="sequence", epsilon=.05), dict(loss_type="cispo", epsilon_high=1.1),
         dict(beta=.1, use_bias_correction_kl=True), dict(beta=.1, use_bias_correction_kl=True, importance_sampling_level="sequence", epsilon=.05)]

@pytest.mark.parametrize("settings", MOVED, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default")
def test_away_from_ratio_1_loss_and_gradients_are_those_of_the_stock_trainer(folder, tmp_path, settings):
    "On fresh rollouts no ratio is clipped, and the test above says nothing about clipping."
    settings = dict(settings, num_iterations=2)
    trainer = ours(load_policy(folder), config(tmp_path/"a", **settings))
    _, loss_a, grads_a = gradients(trainer, moved=.05)
    _, loss_b, grads_b = gradients(stock(load_policy(folder), config(tmp_path/"b", **settings)), moved=.05)
    assert abs(loss_a - loss_b) < 1e-6 and max((grads_a[n] - grads_b[n]).abs().max() for n in grads_b) < 1e-6
    assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] > .02
    if "delta" in settings:
        _, without, _ = gradients(ours(load_policy(folder), config(tmp_path/"c", num_iterations=2)), moved=.05)
        assert abs(loss_a - without) > 1e-4

@pytest.mark.parametrize("settings", [dict(), dict(num_iterations=2, updates=6), dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, loss_type="dapo"),
                                      dict(per_device_train_batch_size=8, steps_per_generation=2, updates=6)], ids=["plain", "two epochs", "accumulation", "two slices"])
def test_five_updates_from_one_seed_give_the_weights_of_the_stock_trainer(folder, tmp_path, settings):
    a, b = load_policy(folder), load_policy(folder)
    start = copy.deepcopy(dict(a.model.named_parameters()))
    ours(a, config(tmp_path/"a", **settings)).train()
    stock(b, config(tmp_path/"b", **settings)).train()
    far = max((p - start[n]).abs().max() for n, p in a.model.named_parameters())
    apart = max((p - dict(b.model.named_parameters())[n]).abs().max() for n, p in a.model.named_parameters())
    assert far > 1e-3 and apart < 1e-5

def test_a_dishonest_step_would_be_noticed(folder, tmp_path):
    "The equality above can fail: centring over the batch instead of the group gives other gradients."
    class BatchCentred(Method):
        def advantages(self, rollouts, advantages):
            r = rollouts.rewards
            return ((r - r.mean())/(r.std() + 1e-4))[:, None]*rollouts.completion_mask
    _, _, grads_a = gradients(ours(load_policy(folder), config(tmp_path/"a"), BatchCentred()))
    _, _, grads_b = gradients(stock(load_policy(folder), config(tmp_path/"b")))
    assert max((grads_a[n] - grads_b[n]).abs().max() for n in grads_b) > 1e-4

# ---------------------------------------------------------------- stages
class Recorder(Method):
    "Touches every stage, changes nothing, remembers the order."
    wants = ("hidden",)
    def __init__(self): self.seen, self.n = [], 0
    def note(self, stage):
        if not self.seen or self.seen[-1] != stage: self.seen.append(stage)
    def prepare(self, run): self.note("prepare")
    def curriculum(self, problems): self.note("curriculum"); return problems
    def sampler(self, sampler): self.note("sampler"); return sampler
    def rewards(self, rollouts, rewards): self.note("rewards"); return rewards
    def advantages(self, rollouts, advantages): self.note("advantages"); return advantages
    def select(self, rollouts, advantages, mask): self.note("select"); return mask.clone()
    def token_loss(self, step, loss):
        self.note("token_loss")
        assert step.hidden.shape == (*step.logps.shape, 32)
        head = step.run.policy.model.lm_head.weight
        want = (step.hidden@head.T).log_softmax(-1).gather(2, step.rollouts.completion_ids[..., None])[..., 0]
        assert torch.allclose(want[step.mask.bool()], step.logps[step.mask.bool()], atol=1e-5)    # state t predicts token t
        return loss
    def auxiliary_loss(self, step): self.note("auxiliary_loss"); return step.logps.sum()*0
    def after_update(self, run): self.note("after_update"); self.n += 1
    def metrics(self): return {"recorder/n": self.n}

def test_stages_come_in_order_and_a_method_that_changes_nothing_is_grpo(folder, tmp_path):
    method, a, b = Recorder(), load_policy(folder), load_policy(folder)
    trainer = ours(a, config(tmp_path/"a", updates=2), method); trainer.train()
    ours(b, config(tmp_path/"b", updates=2)).train()
    step = ["rewards", "advantages", "select", "token_loss", "auxiliary_loss", "after_update"]
    assert method.seen == ["prepare", "curriculum", "sampler", *step, *step]
    assert [e["recorder/n"] for e in trainer.state.log_history if "loss" in e] == [1, 2]
    assert all(torch.equal(p, dict(b.model.named_parameters())[n]) for n, p in a.model.named_parameters())

class FirstHalf(Method):
    "Every second row, the first six columns."
    def select(self, rollouts, advantages, mask):
        mask = mask.clone(); mask[::2] = 0; mask[:, 6:] = 0
        return mask

def test_selection_drops_rows_and_columns_and_keeps_the_loss_of_what_is_left(policy, tmp_path):
    trainer = ours(policy, config(tmp_path/"a"), FirstHalf())
    batch, loss, grads = gradients(trainer)
    assert batch["completion_ids"].shape == (8, 6) and batch["rollout_idx"].tolist() == list(range(1, 16, 2))
    assert int(batch["num_items_in_batch"]) == int(batch["tool_mask"].sum())
    full = trainer.rollouts.take(list(range(1, 16, 2)))
    want = -(batch["advantages"]*batch["tool_mask"]).sum()/batch["tool_mask"].sum()       # the ratio is 1
    assert abs(loss - want.item()) < 1e-6 and torch.equal(full.completion_ids[:, :6], batch["completion_ids"])

class Odd(Method):
    "Every second row, written into the mask itself."
    def select(self, rollouts, advantages, mask):
        mask[::2] = 0
        return mask

@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_selected_rows_count_alike_whole_or_in_slices(folder, tmp_path, loss_type):
    whole = ours(load_policy(folder), config(tmp_path/"a", loss_type=loss_type), Odd())
    batch, loss, _ = gradients(whole)
    _, sliced, _ = gradients(ours(load_policy(folder), config(tmp_path/"b", loss_type=loss_type, per_device_train_batch_size=8, gradient_accumulation_steps=2), Odd()))
    a, n = batch["advantages"][:, 0], batch["tool_mask"].sum(1)                            # 8 of 16 rows are left; the ratio is 1
    want = {"grpo": a.mean(), "dr_grpo": (a*n).sum()/(8*LENGTH), "dapo": (a*n).sum()/n.sum()}[loss_type]
    assert len(a) == 8 and abs(loss + want.item()) < 1e-6 and abs(sliced - loss) < 1e-6

def test_a_stage_with_a_wrong_shape_is_named(policy, tmp_path):
    def wrong(name, fn): return type("Wrong", (Method,), {name: fn})()
    for name, fn, shape in (("rewards", lambda self, r, x: x[:, None], "(B,)"), ("advantages", lambda self, r, x: x[:, :1], "(B, T)"),
                            ("select", lambda self, r, a, mask: mask[:, :1], "(B, T)"), ("token_loss", lambda self, step, loss: loss.mean(), "(B, T)")):
        with pytest.raises(ValueError) as error: gradients(ours(policy, config(tmp_path), wrong(name, fn)))
        assert f"the stage `{name}` gave shape" in str(error.value) and shape in str(error.value)
    with pytest.raises(ValueError, match="the stage `select` chose tokens that are not trained"): gradients(ours(policy, config(tmp_path), wrong("select", lambda self, r, a, mask: mask*0 + 1)))

def test_rewards_changed_in_place_leave_the_verdicts(policy, tmp_path):
    class Shift(Method):
        def rewards(self, rollouts, rewards): rewards -= 10; return rewards
    trainer = ours(policy, config(tmp_path), Shift()); gradients(trainer)
    assert torch.equal(trainer.rollouts.rewards, trainer.verified - 10) and trainer.verified.min() >= 0

class Broken(Method):
    "Gives what it is told to at one stage, from the second update on."
    def __init__(self, stage, value): self.stage, self.value, self.n = stage, value, 0
    def after_update(self, run): self.n += 1
    def _maybe(self, stage, plain): return self.value(plain) if self.n and stage == self.stage else plain
    def advantages(self, rollouts, advantages): return self._maybe("advantages", advantages)
    def select(self, rollouts, advantages, mask): return self._maybe("select", mask)
    def token_loss(self, step, loss): return self._maybe("token_loss", loss)
    def auxiliary_loss(self, step): return self._maybe("auxiliary_loss", step.logps.sum()*0)

@pytest.mark.parametrize("stage, value, message", [
    ("advantages", lambda x: x*math.nan, "loss of update 2 is not finite .*stage `advantages`"), ("token_loss", lambda x: x*math.inf, "stage `token_loss`"),
    ("auxiliary_loss", lambda x: x*math.nan, "stage `auxiliary_loss`"), ("token_loss", lambda x: None, "the stage `token_loss` gave NoneType"),
    ("select", lambda x: x*.5, "the stage `select` must give a mask of 0 and 1")])
def test_a_broken_stage_is_named_before_it_reaches_the_weights(policy, tmp_path, stage, value, message):
    trainer = ours(policy, config(tmp_path, updates=3), Broken(stage, value))
    with pytest.raises(ValueError, match=message): trainer.train()
    assert trainer.state.global_step == 1 and all(p.isfinite().all() for p in policy.model.parameters())

# ---------------------------------------------------------------- rewards
def test_t6_every_reward_sees_its_own_row(policy, tmp_path):
    seen = []
    class Echo(Method):                                            # each completion opens with its prompt
        def sampler(self, sampler): return Scripted(sampler, None)
    def own_row(prompts, completions, problem_idx, **kwargs):
        seen.extend(zip(prompts, completions, problem_idx)); return [float(i % 3) + len(c) for i, c in zip(problem_idx, completions)]
    problems = WORLD.problems(64, seed=5)
    trainer = ours(policy, config(tmp_path, num_problems=8, updates=8, per_device_train_batch_size=16, gradient_accumulation_steps=2), Echo(), problems=problems, reward_funcs=[own_row])
    trainer.train()
    assert len(seen) == 256 and all(problems[i].prompt == p and c.startswith(p) for p, c, i in seen) and len({i for *_, i in seen}) == 64

def test_rows_without_a_reward_leave_the_baseline(policy, tmp_path):
    def some(completions, **kwargs): return [None if i % 4 == 0 else math.nan if i % 4 == 1 else float(i % 2) for i, _ in enumerate(completions)]
    trainer = ours(policy, config(tmp_path, updates=1), reward_funcs=[some])
    batch, *_ = gradients(trainer)
    per_row = trainer.rollouts.rewards.view(-1, 4)
    assert per_row[:, :2].isnan().all() and per_row[:, 2:].tolist() == [[0., 1.]]*4
    first = batch["advantages"][:, 0].view(-1, 4)                 # of (0, 1): mean .5, sample std .7071
    assert torch.allclose(first, tensor([[0., 0., -.5/.70720678, .5/.70720678]]).expand(4, 4), atol=1e-5)
    assert trainer._metrics["train"]["unscored_frac"] == [.5]

def test_a_batch_without_any_reward_is_refused(policy, tmp_path):
    def judge(completions, **kwargs): return [None]*len(completions)
    with pytest.raises(ValueError, match="judge returned None or NaN for every row"): gradients(ours(policy, config(tmp_path), reward_funcs=[judge]))

def test_v8_a_problem_that_cannot_be_judged_gets_no_advantage(policy, tmp_path):
    problems = WORLD.problems(4, seed=0)
    class Judge:
        def verify(self, problem, text): return None if problem is problems[0] else float(len(text) % 5)
    trainer = Trainer(policy, Judge(), problems, None, config(tmp_path))
    batch, *_ = gradients(trainer)
    assert trainer.rollouts.rewards[:4].isnan().all() and trainer._metrics["train"]["unscored_frac"] == [.25]
    assert batch["advantages"][:4].abs().max() == 0 and batch["advantages"][4:].abs().max() > .1

@dataclass
class Scripted(Sampler):
    "Writes what it is told; `tool`: row, start and end of tokens that are not the policy's. Rows of None: each its prompt."
    inner: TorchSampler
    rows: list
    tool: tuple = ()
    def sample(self, prompt_ids, *, group=None, problems=None):
        r = self.inner.replace(train_forced=True).sample(prompt_ids, forced=self.rows or [p[1:] for p in prompt_ids], group=group)
        policy = r.policy_mask.clone()
        for row, start, end in self.tool: policy[row, start:end] = 0
        return r.replace(policy_mask=policy)

def test_t7_two_of_four_completions_reach_the_limit_of_8(policy, tmp_path):
    class Four(Method):
        def sampler(self, sampler): return Scripted(sampler, [[5]*8, [6]*8, [7, 7, 2], [8, 8, 8, 8, 2]], ((1, 2, 5),))
    def reward(completions, **kwargs): return [1., 0., 1., 0.]
    trainer = ours(policy, config(tmp_path, num_problems=1, max_completion_length=8, mask_truncated_completions=True), Four(), reward_funcs=[reward])
    batch, loss, _ = gradients(trainer)
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [.5]
    assert (batch["completion_mask"]*batch["tool_mask"]).sum(1).tolist() == [0, 0, 3, 5] and int(batch["num_items_in_batch"]) == 8
    # all four in the baseline: mean 1/2, sample deviation .57735, advantages ±.5/.57745 = ±.86588; loss -(3 - 5)*.86588/8
    assert torch.allclose(batch["advantages"][2:, 0], tensor([.86588, -.86588]), atol=1e-4)
    assert abs(loss - .21647) < 1e-4
    # one rule for lengths: tokens that the policy wrote, 8 + (8 - 3) + 3 + 5
    assert trainer.n_sampled == 21 and trainer._metrics["train"]["completions/mean_length"] == [21/4]

def test_a11_trainer_and_sampler_use_one_temperature(policy, tmp_path):
    trainer = ours(policy, config(tmp_path, temperature=.6))
    batch, *_ = gradients(trainer)
    step = trainer.step_of(trainer.model, batch)
    valid = step.mask.bool()
    assert torch.allclose(step.logps[valid], step.rollouts.logps[valid], atol=1e-5)
    assert (score_rollouts(policy.model, step.rollouts).logps - step.logps)[valid].abs().max() > 1e-3      # on one side only

def test_t7_completions_cut_by_the_limit_count_in_the_baseline_but_not_in_the_loss(policy, tmp_path):
    trainer = ours(policy, config(tmp_path, mask_truncated_completions=True, max_completion_length=3))
    batch, *_ = gradients(trainer)
    cut = (trainer.rollouts.stop == 1) & (trainer.rollouts.completion_ids[:, -1] != 0)     # TRL takes a sampled pad for an end
    assert 0 < cut.sum() < 16
    assert (batch["completion_mask"]*batch["tool_mask"])[cut].sum() == 0
    r = trainer.rollouts.rewards.view(-1, 4)
    want = ((r - r.mean(1, keepdim=True))/(r.std(1, keepdim=True) + 1e-4)).flatten()       # all four in the baseline
    assert torch.allclose(batch["advantages"][:, 0][~cut], want[~cut], atol=1e-5)
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [cut.float().mean().item()]

def test_a1_groups_without_spread_give_advantage_zero_and_no_nan(policy, tmp_path):
    def same(completions, **kwargs): return [1.]*len(completions)
    batch, loss, grads = gradients(ours(policy, config(tmp_path), reward_funcs=[same]))
    assert batch["advantages"].abs().max() == 0 and loss == 0 and all(g.abs().max() == 0 for g in grads.values())

def test_a9_first_loss_is_zero_and_its_gradient_is_not(policy, tmp_path):
    def alternate(completions, **kwargs): return [float(i % 2) for i, _ in enumerate(completions)]
    _, loss, grads = gradients(ours(policy, config(tmp_path, loss_type="grpo"), reward_funcs=[alternate]))
    assert abs(loss) < 1e-6 and sum(g.norm() for g in grads.values()) > 1e-2

# ---------------------------------------------------------------- adapters
def test_with_lora_the_adapter_alone_is_trained_and_the_reference_is_the_policy_without_it(folder, tmp_path):
    policy = load_policy(folder, lora=4)
    base = {n: p.clone() for n, p in policy.model.named_parameters() if "lora_" not in n}
    trainer = ours(policy, config(tmp_path, beta=.1, updates=3)); trainer.train()
    now = dict(policy.model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in base.items())
    assert max(p.abs().max() for n, p in now.items() if "lora_B" in n) > 1e-3
    kl = [e["kl"] for e in trainer.state.log_history if "loss" in e]
    assert abs(kl[0]) < 1e-6 and kl[-1] > 1e-6                     # the policy starts as its own reference

# ---------------------------------------------------------------- order, seeds, resume
def order(trainer):
    seen = []
    plain = trainer.roll_out
    trainer.roll_out = lambda prompts: (seen.append([row["problem_idx"] for row in trainer._batch]), plain(prompts))[1]
    trainer.train()
    return seen

def test_t2_prompts_come_in_order_without_shuffling(policy, tmp_path):
    args = config(tmp_path, num_problems=3, num_generations=2, updates=6, shuffle_dataset=False)
    seen = order(ours(policy, args, problems=WORLD.problems(9, seed=0)))
    assert seen == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [6, 6, 7, 7, 8, 8]]*2

def test_t2_with_two_passes_each_batch_is_trained_twice_in_a_row(policy, tmp_path):
    args = config(tmp_path, num_problems=3, num_generations=2, updates=6, shuffle_dataset=False, num_iterations=2)
    steps = []
    trainer = ours(policy, args, problems=WORLD.problems(9, seed=0))
    plain = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (steps.append([trainer.rollouts.problems[i].prompt for i in sorted(inputs["rollout_idx"].tolist())]), plain(model, inputs))[1]
    seen = order(trainer)
    assert seen == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [6, 6, 7, 7, 8, 8]]
    assert len(steps) == 6 and all(steps[i] == steps[i + 1] for i in (0, 2, 4)) and steps[0] != steps[2]

def batches(trainer, **kw):
    "Train; of each batch its problems, its completions and their log-probabilities."
    kept, plain = [], trainer.roll_out
    def roll_out(prompts):
        out, r = plain(prompts), trainer.rollouts
        kept.append(([row["problem_idx"] for row in trainer._batch], r.completions, r.logps.tolist()))
        return out
    trainer.roll_out = roll_out
    try: trainer.train(**kw)
    except KeyboardInterrupt: pass
    return kept

def same_weights(a, b): return all(torch.equal(p, dict(b.model.named_parameters())[n]) for n, p in a.model.named_parameters())

def test_t5_one_seed_one_run_whatever_happens_between_its_updates(folder, tmp_path):
    from matplotlib import pyplot as plt
    from rlworkbench.experiment import evaluate
    from rlworkbench.figures import curves
    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            evaluate(looking, WORLD, WORLD.problems(2, split="test"), samples=2, max_completion_length=LENGTH)
            curves({"PPO": dict(x=[0, 1], mean=[.1, .2])}, band="none"); plt.close("all")
    def run(policy, seed, name, callbacks=(), **kw):
        t = ours(policy, config(tmp_path/name, seed=seed, updates=3, **kw), callbacks=callbacks)
        kept = batches(t)
        return kept, [{k: v for k, v in e.items() if k not in ("step_time", "train_runtime")} for e in t.state.log_history if "loss" in e]
    first, second, looking, other = (load_policy(folder) for _ in range(4))
    (a, log_a), (b, log_b) = run(first, 11, "a"), run(second, 11, "b")
    assert a == b and log_a == log_b and same_weights(first, second) and len(log_a) == 3       # losses, rewards and figures of each update
    c, _ = run(looking, 11, "c", [Look()], logging_steps=2, save_steps=1)
    assert a == c and same_weights(first, looking)
    d, _ = run(other, 12, "d")
    assert a != d and not same_weights(first, other)

class Scheduled(Method):
    "Has state: a counter that scales the loss, and a moving average of the reward."
    training = dict(num_iterations=4)
    def __init__(self): self.n, self.mean = 0, 0.
    def rewards(self, rollouts, rewards): self.mean = .9*self.mean + .1*rewards.mean().item(); return rewards + self.mean
    def token_loss(self, step, loss): return loss/(1 + .1*self.n)
    def after_update(self, run): self.n += 1
    def state_dict(self): return dict(n=self.n, mean=self.mean)
    def load_state_dict(self, state): self.n, self.mean = state["n"], state["mean"]

@pytest.mark.parametrize("stop, problems", [(6, 24), (12, 24), (14, 8)], ids=["inside a cycle", "between cycles", "third pass over the data"])
def test_t1_m3_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(folder, tmp_path, stop, problems):
    class Kill(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == stop: raise KeyboardInterrupt
    settings = dict(updates=20, save_steps=2, num_iterations=4, num_problems=2)
    data = WORLD.problems(problems, seed=2)
    whole, broken, resumed = (load_policy(folder) for _ in range(3))
    t = ours(whole, config(tmp_path/"whole", **settings), Scheduled(), data); unbroken = batches(t)
    before = batches(ours(broken, config(tmp_path/"cut", **settings), Scheduled(), data, callbacks=[Kill()]))
    found = latest_checkpoint(tmp_path/"cut")
    assert found.name == f"checkpoint-{stop}"
    r = ours(resumed, config(tmp_path/"cut", **settings), Scheduled(), data)
    after = batches(r, resume_from_checkpoint=str(found))
    assert len(unbroken) == 5 and before + after == unbroken                   # no batch skipped, none twice; the first one after the resume is the resumed weights' own
    assert same_weights(whole, resumed)
    assert (r.n_sampled, r.method.n, r.method.mean) == (t.n_sampled, t.method.n, t.method.mean)
    steps = [e["step"] for e in r.state.log_history if "loss" in e]
    assert steps == list(range(1, 21))

def test_a_checkpoint_of_another_method_is_refused(folder, tmp_path):
    ours(load_policy(folder), config(tmp_path, updates=4, save_steps=4, num_iterations=4), Scheduled()).train()
    with pytest.raises(ValueError, match="checkpoint of the method 'Scheduled', this run trains 'GRPO'"):
        ours(load_policy(folder), config(tmp_path, updates=8, num_iterations=4)).train(resume_from_checkpoint=str(latest_checkpoint(tmp_path)))

def test_a_checkpoint_that_was_cut_off_is_passed_over(folder, tmp_path):
    ours(load_policy(folder), config(tmp_path, updates=4, save_steps=2)).train()
    (tmp_path/"checkpoint-4"/"complete.json").rename(tmp_path/"kept.json")
    assert latest_checkpoint(tmp_path).name == "checkpoint-2"
    (tmp_path/"kept.json").rename(tmp_path/"checkpoint-4"/"complete.json")
    assert latest_checkpoint(tmp_path).name == "checkpoint-4"
    weights = tmp_path/"checkpoint-4"/"optimizer.pt"
    with open(weights, "r+b") as f: f.truncate(weights.stat().st_size//2)     # as after a power cut
    with pytest.warns(UserWarning, match=r"checkpoint-4 is damaged \(optimizer.pt has \d+ of \d+ bytes\): it is passed over"): found = latest_checkpoint(tmp_path)
    assert found.name == "checkpoint-2"
    ours(load_policy(folder), config(tmp_path, updates=4, save_steps=2)).train(resume_from_checkpoint=str(found))

# ---------------------------------------------------------------- what is refused
def test_t3_sizes_that_do_not_fit_are_refused_with_sizes_that_do(tmp_path):
    with pytest.raises(ValueError, match="batch of 7 rollouts .* num_generations=4: use num_generations=7, or a batch size of 4 or 8"): check_sizes(7, 4)
    with pytest.raises(ValueError, match="batch of 6 rollouts .* num_generations=4: use num_generations=2 or 3 or 6, or a batch size of 4 or 8"): check_sizes(6, 4)
    with pytest.raises(ValueError, match="at least 2"): check_sizes(4, 1)
    with pytest.raises(ValueError, match="batch of 7"): training_config(tmp_path, per_device_train_batch_size=7, num_generations=4)

def test_runs_of_no_length_are_refused(tmp_path):
    for name in ("updates", "num_problems", "max_completion_length"):
        with pytest.raises(ValueError, match=f"{name}=0: at least 1"): training_config(tmp_path, **{name: 0})

def test_a_dataset_without_prompt_is_refused(policy, tmp_path):
    with pytest.raises(ValueError, match="no column `prompt`, only question, answer"):
        Trainer(policy, WORLD, Dataset.from_list([{"question": "1+1", "answer": "2"}]), None, config(tmp_path))

def test_r8_prompts_longer_than_the_context_are_dropped_and_counted(policy, tmp_path):
    long = Problem("1"*100, "1", {})
    with pytest.warns(UserWarning, match="1 of 5 problems dropped.*context of 64 tokens"):
        trainer = ours(policy, config(tmp_path, num_problems=2, updates=1), problems=[*WORLD.problems(4, seed=0), long])
    trainer.train()
    assert len(trainer.problems) == 4 and trainer.rollouts.lengths.min() >= 1
    class Longer(Method):
        def curriculum(self, problems): return [*problems[:4], long]
    with pytest.warns(UserWarning, match="1 of 5 problems dropped"): trainer = ours(policy, config(tmp_path, num_problems=2, updates=1), Longer(), problems=WORLD.problems(8, seed=0))
    assert len(trainer.problems) == 4                              # a prompt that a method made too long goes as well
    with pytest.raises(ValueError, match="no prompt fits: the shortest has 101 tokens.*lower max_completion_length"): ours(policy, config(tmp_path), problems=[long])

@pytest.mark.parametrize("name, value", [("loss_type", "vespo"), ("top_entropy_quantile", .2), ("entropy_coef", .1), ("min_p", .1), ("repetition_penalty", 1.2),
                                         ("generation_kwargs", dict(num_beams=2)), ("scale_rewards", "batch"), ("save_total_limit", 1)])
def test_settings_that_nothing_reads_are_refused_by_name(policy, tmp_path, name, value):
    with pytest.raises(ValueError, match=name): ours(policy, config(tmp_path, **{name: value}))

def test_states_and_attentions_of_chosen_blocks_come_from_the_one_forward_pass(tmp_path):
    from rlworkbench.scoring import score_rollouts
    class Curious(Method):
        wants = ("hidden", "hidden:1", "attentions:1", "attentions:-1")
        def auxiliary_loss(self, step): self.step = step; return step.layers[1].sum()*0. + step.attentions[1].sum()*0.
    method, policy = Curious(), load_policy("chain-habits")
    trainer = ours(policy, config(tmp_path), method)
    model, before = policy.model, policy.model.config._attn_implementation
    gradients(trainer)
    step, last = method.step, model.config.num_hidden_layers
    seen = score_rollouts(model, step.rollouts, want=("hidden", "attentions"), layers=(1, last))
    real = step.rollouts.completion_mask.bool()
    assert last == 3 and torch.allclose(step.layers[1][real], seen.hidden[1][real], atol=1e-5) and torch.allclose(step.hidden[real], seen.hidden[last][real], atol=1e-5)
    for l in (1, last): assert torch.allclose(step.attentions[l][real], seen.attentions[l][real], atol=1e-5)
    assert torch.allclose(step.attentions[1][real].sum(-1), torch.ones(()), atol=1e-5)   # a distribution over what can be seen
    assert model.config._attn_implementation == before                                   # the sampler keeps its fast attention

def test_what_a_trainer_cannot_use_is_refused_by_name(policy, tmp_path):
    for settings in (dict(loss_type="cispo"), dict(delta=2.)):
        with pytest.raises(ValueError, match="importance_sampling_level='sequence' takes neither"): ours(policy, config(tmp_path, importance_sampling_level="sequence", **settings))
    class Greedy(Method): wants = ("hidden", "attentions")
    with pytest.raises(ValueError, match="wants='attentions' is not known: say 'hidden', 'hidden:l' or 'attentions:l'"): ours(policy, config(tmp_path), Greedy())
    with pytest.raises(TypeError, match=r"Greedy is a class: write Greedy\(…\)"): ours(policy, config(tmp_path), Greedy)
    with pytest.raises(ValueError, match="3 problems do not fill one batch of 4.*lower num_problems"): ours(policy, config(tmp_path), problems=WORLD.problems(3))
    with pytest.raises(ValueError, match="args is missing"): ours(policy, None)
    with pytest.raises(ValueError, match="eval_dataset is not used here"): ours(policy, config(tmp_path), eval_dataset=[])
    with pytest.raises(ValueError, match="an item of type dict"): ours(policy, config(tmp_path), problems=[{"question": "1+1"}])

def test_settings_that_contradict_the_method_are_refused(policy, tmp_path):
    with pytest.raises(ValueError, match="Scheduled needs num_iterations=4, but the settings say 1"): ours(policy, config(tmp_path), Scheduled())
