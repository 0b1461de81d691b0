"The real engine on a CPU: run by `make test-vllm` in an environment of its own."
import os
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")      # GiB; the default takes a share of the machine
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
import pytest, torch

pytest.importorskip("vllm")
from rlworkbench.method import Compose, Method
from rlworkbench.methods.espo import ESPO
from rlworkbench.policies import load_policy
from rlworkbench.rollouts import Stop
from rlworkbench.scoring import score_rollouts
from rlworkbench.toolbox.critics import PPO
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.chain import Chain

WORLD = Chain(steps=3)

def settings(out, **kw):
    return training_config(out, **{**dict(num_problems=4, num_generations=4, updates=5, max_completion_length=40, learning_rate=1e-3, use_vllm=True, vllm_mode="colocate",
                                          vllm_gpu_memory_utilization=.1, vllm_max_model_length=128), **kw})

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "Five GRPO updates; what was sampled and logged at each."
    class Keep(Method):
        def __init__(self): self.seen = []
        def advantages(self, rollouts, advantages):
            self.seen.append((rollouts, score_rollouts(self.run.policy.model, rollouts).logps))
            return advantages
        def prepare(self, run): self.run = run
    method = Keep()
    trainer = Trainer(load_policy("chain-habits"), WORLD, WORLD.problems(64), method, settings(tmp_path_factory.mktemp("out")))
    start = {k: v.clone() for k, v in trainer.policy.model.state_dict().items()}
    trainer.train()
    return trainer, method.seen, start

def test_sampled_log_probs_are_the_models_own(run):
    _, seen, _ = run
    gaps = [((rollouts.logps - logps)*rollouts.policy_mask).abs().max().item() for rollouts, logps in seen]
    assert max(gaps) < 1e-2, gaps

def test_the_next_rollouts_come_from_the_new_weights(run):
    "Judged by the first policy, later rollouts have other log-probs than the engine says; by the current one the same."
    trainer, seen, start = run
    first = load_policy("chain-habits"); first.model.load_state_dict(start)
    old = [((score_rollouts(first.model, r).logps - r.logps)*r.policy_mask).abs().max().item() for r, _ in seen]
    assert old[0] < 1e-2 and min(old[2:]) > 5e-2, old

def test_five_updates_train(run):
    trainer, seen, start = run
    assert len(seen) == 5 and trainer.state.global_step == 5
    assert any((v - start[k]).abs().max() > 1e-4 for k, v in trainer.policy.model.state_dict().items())
    assert all(0 <= r.rewards.mean() <= 1 and r.completions[0] for r, _ in seen)

def test_forced_openings_and_prefixes_on_the_engine(run):
    trainer, *_ = run
    trainer.vllm_generation.sync_weights()                # the last update came after the last rollouts
    tokenizer, sampler = trainer.policy.tokenizer, trainer.sampler
    prompts = [trainer.policy.encode(p.prompt) for p in WORLD.problems(4)]
    opening = tokenizer.encode("[", add_special_tokens=False)
    r = sampler.sample(prompts, forced=[opening]*4)
    assert (r.completion_ids[:, 0] == opening[0]).all() and r.policy_mask[:, 0].sum() == 0 and r.completions[0].startswith("[")
    assert ((score_rollouts(trainer.policy.model, r).logps - r.logps)*r.completion_mask).abs().max() < 1e-2
    then = sampler.sample(prompts, prefixes=[row[:5] for row in r.completion_ids.tolist()])
    assert then.prompt_mask.sum(1).tolist() == [len(p) + 5 for p in prompts] and then.lengths.max() <= 40

def test_espo_cuts_afterwards_and_trains(tmp_path):
    method = Compose(PPO(), ESPO(signal="random", beta=.5))
    trainer = Trainer(load_policy("chain-habits"), WORLD, WORLD.problems(64), method, settings(tmp_path, updates=10, **method.training))
    trainer.train()
    assert trainer.state.global_step == 10
