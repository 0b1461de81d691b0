"The vLLM sampler against the torch sampler, with an engine that plays back what the torch sampler wrote."
from dataclasses import dataclass

import pytest, torch

from rlworkbench.method import Compose
from rlworkbench.methods.espo import ESPO
from rlworkbench.policies import load_policy
from rlworkbench.rollouts import Monitor, Stop, TorchSampler
from rlworkbench.toolbox.critics import PPO
from rlworkbench.toolbox.engines import VLLMSampler, watch
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.chain import Chain

WORLD = Chain(steps=3)

@dataclass
class Playback:
    "A real policy behind the engine's interface; records what it was asked."
    model: object
    tokenizer: object
    max_completion_length: int = 0
    temperature: float = 1.
    top_k: int = 0
    top_p: float = 1.
    def generate(self, prompts, images, n):
        self.asked = prompts
        r = TorchSampler(self.model, self.tokenizer, self.max_completion_length, temperature=self.temperature).sample(prompts)
        rows = [(i[:k], l[:k]) for i, l, k in zip(r.completion_ids.tolist(), r.logps.tolist(), r.lengths.tolist())]
        return prompts, [i for i, _ in rows], [[[x] for x in l] for _, l in rows], None

class StopAfter(Monitor):
    "Stops every second row at its third token; remembers what it saw."
    def start(self, B, device): self.seen = []
    def update(self, rows, t, logits, tokens, values):
        self.seen.append((t, rows.tolist(), tokens.tolist(), logits.detach().clone()))
        return (rows % 2 == 0) & (t == 2)

@pytest.fixture
def policy(): return load_policy("chain-habits")

def both(policy, monitor=(), **kw):
    prompts = [policy.encode(p.prompt) for p in WORLD.problems(8)]
    torch.manual_seed(3); there = TorchSampler(policy.model, policy.tokenizer, 40, monitors=tuple(monitor), **kw).sample(prompts)
    engine = Playback(policy.model, policy.tokenizer)
    return prompts, there, VLLMSampler(policy.model, policy.tokenizer, 40, generation=engine, **kw), engine

def test_a_monitor_sees_afterwards_what_it_would_have_seen(policy):
    live = StopAfter()
    prompts, there, sampler, _ = both(policy, [live])
    torch.manual_seed(3); full = sampler.sample(prompts)
    late = StopAfter()
    cut = watch(policy.model, full, (late,))
    assert cut.lengths[::2].tolist() == [3]*4 and (cut.stop[::2] == Stop.CUT).all() and (cut.lengths[1::2] == full.lengths[1::2]).all()
    for (t, rows, tokens, logits), (t2, rows2, tokens2, logits2) in zip(live.seen[:3], late.seen[:3]):     # equal until rows begin to leave
        assert (t, rows, tokens) == (t2, rows2, tokens2) and torch.allclose(logits, logits2, atol=1e-4)

def test_forced_openings_are_part_of_the_completion_and_not_trained(policy):
    prompts, _, sampler, engine = both(policy)
    opening = policy.tokenizer.encode("[", add_special_tokens=False)
    r = sampler.sample(prompts, forced=[opening if i % 2 else [] for i in range(8)])
    assert len(engine.asked) == 4 and engine.max_completion_length == 0                     # rows of equal room together; the engine's own limit is put back
    assert r.completion_ids[1::2, 0].tolist() == opening*4 and r.policy_mask[:, 0].tolist() == [1, 0]*4
    again = TorchSampler(policy.model, policy.tokenizer, 40).sample(prompts, forced=[row[:n] for row, n in zip(r.completion_ids.tolist(), r.lengths.tolist())])
    assert torch.allclose(again.logps, r.logps, atol=1e-4)                                  # of the opening too
    trained = sampler.replace(train_forced=True).sample(prompts, forced=[opening]*8)
    assert trained.policy_mask[:, 0].tolist() == [1]*8

def test_prefixes_go_with_the_prompt(policy):
    prompts, _, sampler, engine = both(policy)
    prefix = policy.tokenizer.encode("[12", add_special_tokens=False)
    r = sampler.sample(prompts, prefixes=[prefix]*8, group=[0]*4 + [1]*4, problems=list("abcdefgh"))
    assert engine.asked[0] == prompts[0] + prefix and r.prompt_mask.sum(1).tolist() == [len(p) + 3 for p in prompts]
    assert r.group.tolist() == [0]*4 + [1]*4 and r.problems == list("abcdefgh")

def test_bad_input_is_named(policy, tmp_path):
    prompts, _, sampler, _ = both(policy)
    with pytest.raises(ValueError, match="greedy=True is not offered"): sampler.replace(greedy=True).sample(prompts)
    with pytest.raises(ValueError, match="forced must have one entry for each of 8"): sampler.sample(prompts, forced=[[1]])
    with pytest.raises(ValueError, match="max_new_tokens=40"): sampler.sample(prompts, forced=[[5]*41]*8)
    try: import vllm
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'rlworkbench\[gpu\]'"):
            Trainer(policy, WORLD, WORLD.problems(16), None, training_config(tmp_path, use_vllm=True, updates=1, num_problems=2, num_generations=4))

def test_espo_cuts_the_same_rows_on_either_engine(policy):
    "The rule needs regret and values; both are read afterwards here."
    method = Compose(PPO(), ESPO(beta=.6, eta=0.))
    class Run: args = type("A", (), dict(world_size=1, seed=0, max_steps=100, gradient_accumulation_steps=1, num_iterations=2, steps_per_generation=1)); world = WORLD
    Run.policy, Run.method = policy, method
    method.prepare(Run)
    prompts, _, late, _ = both(policy)
    early = TorchSampler(policy.model, policy.tokenizer, 40)
    monitor = method[ESPO].monitor
    torch.manual_seed(0); first = method.sampler(early).sample(prompts*4)
    method[ESPO].monitor.observe(first, torch.zeros(32, dtype=torch.bool)); method[ESPO].monitor.warmup.armed = True
    torch.manual_seed(1); full = late.sample(prompts*4)
    a = TorchSampler(policy.model, policy.tokenizer, 40, monitors=(monitor,), value_fn=method[PPO].head).sample(prompts*4, forced=[r[:n] for r, n in zip(full.completion_ids.tolist(), full.lengths.tolist())])
    b = watch(policy.model, full, (monitor,), method[PPO].head)
    assert (a.stop == Stop.CUT).any() and torch.equal(a.lengths, b.lengths) and torch.equal(a.stop, b.stop)
