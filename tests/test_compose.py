"Every two methods in one step: they train together, or `Compose` names what both want."
import itertools, math

import pytest, torch

from rlworkbench.method import Compose
from rlworkbench.methods.deeptool import DeepTool
from rlworkbench.methods.feedback_distillation import FeedbackDistillation
from rlworkbench.methods.ib_tpo import IBTPO
from rlworkbench.methods.oisd import OISD
from rlworkbench.methods.reft import REFT
from rlworkbench.methods.saerl import SAERL
from rlworkbench.methods.verigate import VeriGate
from rlworkbench.policies import load_policy
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world

CHAIN, CALCULATOR, PROVER = make_world("chain", steps=3), make_world("calculator"), make_world("prover")
METHODS = {   # name -> what makes it, small
    "SAERL": lambda: SAERL(n_labels=8, clusters=2, n_latents=32, k=4, sae_steps=20, drop=0.),   # first: it orders the problems that others change
    "DeepTool": lambda: DeepTool(),
    "OISD": lambda: OISD(layer=1),
    "FeedbackDistillation": lambda: FeedbackDistillation(),
    "VeriGate": lambda: VeriGate(lambda problems, completions, spans: [[(b - a)/10 for a, b in some] for some in spans]),   # longer lines are better
    "REFT": lambda: REFT(k=2),
    "IBTPO": lambda: IBTPO(shape=(2, 3, 1, 1)),   # last: no sampler stands over its own
}
NO_WORLD = {("DeepTool", "IBTPO"): "IBTPO branches within one completion", ("DeepTool", "FeedbackDistillation"): "has no `teacher_prompt`"}   # pairs that no world serves: calls belong to the one, single turns to the other

def home(names):
    if "DeepTool" in names: return CALCULATOR, "calc-habits"
    return (PROVER, "prover-habits") if "FeedbackDistillation" in names else (CHAIN, "chain-habits")

@pytest.mark.parametrize("names", itertools.combinations(METHODS, 2), ids=" + ".join)
def test_two_methods_train_together_or_are_refused_together(names, tmp_path):
    try: method = Compose(*(METHODS[n]() for n in names))
    except ValueError as e:
        assert all(n in str(e) for n in names), e
        return
    world, policy = home(names)
    settings = {"num_problems": 2, "num_generations": 4, "updates": 2, "max_completion_length": 12 if world is PROVER else 48, **method.training}
    def make(): return Trainer(load_policy(policy), world, world.problems(24), method, training_config(tmp_path, **settings))
    if names in NO_WORLD:
        with pytest.raises(ValueError, match=NO_WORLD[names]): make()
        return
    trainer = make()
    before = {k: v.clone() for k, v in trainer.policy.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == 2 and all(math.isfinite(v) for e in trainer.state.log_history for v in e.values() if isinstance(v, float))
    assert set(trainer.method.state_dict()) == set(names)
    assert any(not torch.equal(v, before[k]) for k, v in trainer.policy.model.state_dict().items()) or trainer.rollouts.rewards.std() == 0
