"""Speed as ratios, measured in one run with medians of alternating pairs:  make bench  (about two minutes on 2 cores)

Nothing here is a test: a busy machine gives other numbers. Bounds are what the project wants to keep."""
import argparse, contextlib, io, json, os, statistics, tempfile, time, warnings
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
warnings.filterwarnings("ignore")
import torch
from datasets import Dataset
from trl import GRPOTrainer
from rlworkbench.policies import load_policy
from rlworkbench.rollouts import TorchSampler
from rlworkbench.scoring import score_rollouts
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.chain import Chain

LENGTH = 96

def timed(fn):
    start = time.perf_counter(); fn()
    return time.perf_counter() - start

def paired(a, b, rounds):
    "Medians of a and b and of their ratio, taken in alternation so that both meet the same machine."
    a(); b()
    pairs = [(timed(a), timed(b)) if i % 2 else tuple(reversed((timed(b), timed(a)))) for i in range(rounds)]
    return [statistics.median(x) for x in (*zip(*pairs), [x/y for x, y in pairs])]

def trainers(rounds):
    "One training step: ours, TRL's stock trainer on our sampler, TRL's stock trainer on `generate`."
    world = Chain(steps=6)
    problems = world.problems(16*(4*rounds + 8), seed=0)
    data = Dataset.from_list([{"prompt": p.prompt, "problem_idx": i} for i, p in enumerate(problems)])
    args = lambda: training_config(tempfile.mkdtemp(), updates=4*rounds + 8, max_completion_length=LENGTH, learning_rate=1e-6)
    def reward(completions, problem_idx, **kwargs): return [world.verify(problems[i], c) for i, c in zip(problem_idx, completions)]
    def roll_out(prompts, trainer, policy):
        r = TorchSampler(trainer.model, policy.tokenizer, LENGTH).sample([policy.encode(p) for p in prompts])
        n, m = r.lengths.tolist(), r.prompt_mask.sum(1).tolist()
        return {"prompt_ids": [x[-k:] for x, k in zip(r.prompt_ids.tolist(), m)], "completion_ids": [x[:k] for x, k in zip(r.completion_ids.tolist(), n)],
                "logprobs": [x[:k] for x, k in zip(r.logps.tolist(), n)]}
    def stock(own_sampler):
        policy = load_policy("chain-habits")
        return GRPOTrainer(model=policy.model, reward_funcs=[reward], args=args(), train_dataset=data, processing_class=policy.tokenizer,
                           **({"rollout_func": lambda prompts, t: roll_out(prompts, t, policy)} if own_sampler else {}))
    policy = load_policy("chain-habits")
    ours = Trainer(policy, world, problems, None, args(), reward_funcs=[reward])
    def stepper(trainer):
        batches = iter(trainer.get_train_dataloader()); trainer.model.train()
        trainer.create_optimizer_and_scheduler(4*rounds + 8); trainer.current_gradient_accumulation_steps = 1
        def step():
            trainer.training_step(trainer.model, next(batches), None)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.)
            trainer.optimizer.step(); trainer.model.zero_grad()
        return step
    a, b, c = stepper(ours), stepper(stock(True)), stepper(stock(False))
    return {"training step, ours / stock TRL on the same sampler": (*paired(a, b, rounds), 1.05), "training step, ours / stock TRL on generate": (*paired(a, c, rounds), 1.05)}

def samplers(rounds):
    "Rollouts of mixed length: chains of 3 to 8 steps."
    policy = load_policy("chain-habits")
    prompts = [policy.encode(p.prompt) for p in Chain(steps=(3, 8)).problems(128, seed=1)]
    sampler = TorchSampler(policy.model, policy.tokenizer, LENGTH)
    width = max(map(len, prompts))
    ids = torch.tensor([[policy.tokenizer.pad_token_id]*(width - len(p)) + p for p in prompts])
    def generate():
        with torch.no_grad():
            policy.model.generate(ids, attention_mask=(ids != policy.tokenizer.pad_token_id).long(), do_sample=True, top_k=0, max_new_tokens=LENGTH,
                                  output_logits=True, return_dict_in_generate=True, pad_token_id=policy.tokenizer.pad_token_id)
    figures = {"torch sampler / model.generate, mixed lengths": (*paired(lambda: sampler.sample(prompts), generate, rounds), .8)}
    rollouts = sampler.sample(prompts)
    gap = ((score_rollouts(policy.model, rollouts).logps - rollouts.logps)*rollouts.policy_mask).abs().max().item()
    return figures, gap

# name -> (what makes the method, world, policy, what it adds to GRPO's step, bound of the ratio)
def methods():
    from rlworkbench.method import Compose, Method
    from rlworkbench.methods.deeptool import DeepTool
    from rlworkbench.methods.espo import ESPO
    from rlworkbench.methods.oisd import OISD
    from rlworkbench.methods.saerl import SAERL
    from rlworkbench.toolbox.critics import PPO
    from rlworkbench.worlds.base import make_world
    chain, tools = (Chain(steps=6), "chain-habits"), (make_world("calculator"), "calc-habits")
    return {"PPO":  (PPO, *chain, "a critic on kept states; two updates a batch", 2.2),
            "ESPO": (lambda: Compose(PPO(), ESPO()), *chain, "PPO's, and a look at every token while it is drawn", 2.3),
            "OISD, think": (lambda: OISD(lambda_attn=0), *chain, "the head twice more on trained tokens", 1.3),
            "OISD, both": (OISD, *chain, "the head twice more, and attention in its explicit form", 1.5),
            "SAERL": (lambda: SAERL(n_labels=16, clusters=2, n_latents=64, k=4, sae_steps=50, drop=0.), *chain, "nothing; its work is done before training", 1.05),
            "DeepTool": (lambda: DeepTool(variant="episodes"), *tools, "the reference's verdict on each turn", 1.2)}

def per_method(rounds):
    "A whole step (rollouts and updates) of each method over GRPO's on the same world; weights hardly move, so lengths stay alike."
    from rlworkbench.method import Method
    found = {}
    for name, (make, world, policy, extra, bound) in methods().items():
        def stepper(method):
            passes = method.training.get("num_iterations", 1)
            args = training_config(tempfile.mkdtemp(), updates=passes*(2*rounds + 8), max_completion_length=LENGTH, learning_rate=1e-6, **method.training)
            trainer = Trainer(load_policy(policy), world, world.problems(16*(2*rounds + 8), seed=0), method, args)
            batches = iter(trainer.get_train_dataloader()); trainer.model.train()
            trainer.create_optimizer_and_scheduler(passes*(2*rounds + 8)); trainer.current_gradient_accumulation_steps = 1
            def step():
                for _ in range(passes):
                    trainer.training_step(trainer.model, next(batches), None)
                    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.)
                    trainer.optimizer.step(); trainer.model.zero_grad(); trainer.method.after_update(trainer)
            return step
        found[f"step of {name} / GRPO ({extra})"] = (*paired(stepper(make()), stepper(Method()), rounds), bound)
    return found

if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__); ap.add_argument("--rounds", type=int, default=15); ap.add_argument("--json")
    o = ap.parse_args()
    print(f"{torch.get_num_threads()} threads, {o.rounds} pairs")
    with contextlib.redirect_stdout(io.StringIO()): (figures, gap), steps, each = samplers(o.rounds), trainers(o.rounds), per_method(max(3, o.rounds//2))
    figures |= steps | each
    for name, (a, b, ratio, bound) in figures.items():
        print(f"{name:90} {a*1000:7.0f} ms / {b*1000:7.0f} ms = {ratio:.2f}  (wanted: at most {bound})")
    print(f"{'log-probs, sampled against teacher-forced':90} largest difference {gap:.1e}  (wanted: at most 1e-4)")
    if o.json: open(o.json, "w").write(json.dumps({"figures": figures, "logps_gap": gap}, indent=1))
