"Run by torchrun from test_processes.py: one group of six completions on two processes."
import json, os, sys
import torch
from trl import GRPOConfig
from rlworkbench.policies import load_policy
from rlworkbench.trainer import Trainer
from rlworkbench.worlds.base import Problem
from rlworkbench.method import Method

folder, out, spread = sys.argv[1], sys.argv[2], sys.argv[3]
rank = int(os.environ["RANK"])
class Whole(Method):
    def advantages(self, rollouts, advantages): return advantages
def reward(completions, **kwargs): return [[1., 0., 0.], [1., 1., 1.]][rank]
# on several processes transformers reads the optimizer's file to "cpu:0", a name that torch does not know
torch.serialization.register_package(0, lambda storage: None, lambda storage, place: storage if place == "cpu:0" else None)
if spread == "resume":   # whole groups; the third update is in the middle of a batch that is used twice
    def run(checkpoint=None):
        policy = load_policy(folder)
        args = GRPOConfig(output_dir=out, per_device_train_batch_size=6, num_generations=6, max_completion_length=8, max_steps=4, num_iterations=2, bf16=False, gradient_checkpointing=False,
                          report_to="none", use_cpu=True, seed=5, beta=0., save_strategy="steps", save_steps=1, disable_tqdm=True, loss_type="bnpo", logging_steps=1, learning_rate=1e-3)
        trainer = Trainer(policy, None, [Problem(f"{12 + i}+3=", str(15 + i), {}) for i in range(8)], None, args, reward_funcs=[lambda completions, **kw: [float(len(c) % 3) for c in completions]])
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, torch.cat([p.detach().flatten() for p in policy.model.parameters()]).double().sum().item()
    whole, weights = run()
    n_own = int(whole.rollouts.policy_mask.sum())
    resumed, again = run(f"{out}/checkpoint-3")
    with open(f"{out}-{rank}.json", "w") as f:
        json.dump(dict(weights=weights, again=again, n_sampled=[whole.n_sampled, resumed.n_sampled], n_own=n_own, same=resumed.rollouts.completions == whole.rollouts.completions,
                       completions=whole.rollouts.completions), f)
    sys.exit(0)
policy = load_policy(folder)
args = GRPOConfig(output_dir=out, per_device_train_batch_size=3, num_generations=6, max_completion_length=8, max_steps=1, bf16=False, gradient_checkpointing=False,
                  report_to="none", use_cpu=True, seed=5, beta=0., save_strategy="no", disable_tqdm=True, loss_type="bnpo", logging_steps=1)
try: trainer = Trainer(policy, None, [Problem("12+3=", "15", {}), Problem("12-3=", "09", {})], Whole() if spread == "refuse" else None, args, reward_funcs=[reward])
except ValueError as e:
    with open(f"{out}-{rank}.json", "w") as f: json.dump(dict(error=str(e)), f)    # lines of two processes may run into one another
    sys.exit(0)
kept = []
plain = trainer._generate_and_score_completions
trainer._generate_and_score_completions = lambda inputs: kept.append(plain(inputs)) or kept[-1]
trainer.train()
weights = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
with open(f"{out}-{rank}.json", "w") as f:
    json.dump(dict(advantages=kept[0]["advantages"][:, 0].tolist(), completions=trainer.rollouts.completions, devices=args.n_gpu, weights=weights.double().sum().item()), f)
