"Invariants of feedback distillation, by the card's numbers and numbering; those of the single formulas stand in nbs/03_feedback_distillation.ipynb as well."
import copy, itertools, math, random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rlworkbench.experiment import describe, evaluate
from rlworkbench.losses import entropy
from rlworkbench.method import Compose, Method
from rlworkbench.methods.feedback_distillation import KINDS, FeedbackDistillation, distill_loss, divergence, ema_update, half_life, kept_rows, shuffled
from rlworkbench.policies import add_lora, load_policy
from rlworkbench.rollouts import TorchSampler, split_head
from rlworkbench.scoring import score_rollouts
from rlworkbench.stats import pass_at_k
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world

WORLD, ROOM = make_world("prover"), 14
FD = FeedbackDistillation


@pytest.fixture(scope="module")
def policy(): return load_policy("prover-habits", device="cpu")


@pytest.fixture(scope="module")
def rollouts(policy):
    asked = [p for p in WORLD.problems(6, seed=2) for _ in range(4)]
    torch.manual_seed(0)
    found = TorchSampler(policy.model, policy.tokenizer, ROOM).sample([policy.encode(p.prompt) for p in asked], problems=asked)
    return found.replace(problems=asked, rewards=torch.tensor([WORLD.verify(p, t) for p, t in zip(asked, found.completions)]))


def train(policy, out, method, *, updates=2, resume=None, world=WORLD, go=True, learning_rate=1e-3, **settings):
    args = training_config(out, num_problems=2, num_generations=4, updates=updates, seed=3, max_completion_length=ROOM, learning_rate=learning_rate, **settings)
    trainer = Trainer(copy.deepcopy(policy), world, WORLD.problems(12, seed=1), method, args)
    if go: trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
def logs(*p): return torch.tensor(p, dtype=torch.float64).log()


def slope(z, teacher, kind, **kw):
    z = z.clone().requires_grad_()
    divergence(z, teacher, kind, **kw).sum().backward()
    return z.grad


# ---------------------------------------------------------------- 1: told nothing, and equal weights
@pytest.mark.parametrize("kind", KINDS)
def test_i1_the_same_prompt_and_the_same_weights_leave_nothing_to_learn(policy, rollouts, kind):
    model = copy.deepcopy(policy.model)
    student, teacher = score_rollouts(model, rollouts, want=("logits",), grad=True).logits, score_rollouts(policy.model, rollouts, want=("logits",)).logits
    loss, each = distill_loss(student, teacher, rollouts.completion_mask, kind)
    loss.backward()
    assert abs(loss.item()) < 1e-6 and each.abs().max() < 1e-5
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e-5
    told = score_rollouts(policy.model, rollouts, [policy.encode(WORLD.teacher_prompt(p, f"{p.meta['start']:02d}C")) for p in rollouts.problems], want=("logits",)).logits
    assert distill_loss(student, told, rollouts.completion_mask, kind)[0] > .05      # told something, there is


# ---------------------------------------------------------------- 2 to 5: the divergences
def test_i2_values():
    p, q = logs(.5, .3, .2), logs(.7, .2, .1)
    for kind, wanted in dict(forward=.085123, reverse=.092033, jsd=.021901).items(): assert abs(divergence(p, q, kind).item() - wanted) < 1e-6
    assert abs(divergence(p, q, "jsd", alpha=0.).item() - .085123) < 1e-6 and abs(divergence(p, q, "jsd", alpha=1.).item() - .092033) < 1e-6


@pytest.mark.parametrize("kind,wanted", [("forward", (-.2, .1, .1)), ("reverse", (-.214253, .094030, .120223))])
def test_i3_gradients(kind, wanted):
    g = slope(logs(.5, .3, .2), logs(.7, .2, .1), kind)
    torch.testing.assert_close(g, torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)
    assert abs(g.sum()) < 1e-12


@pytest.mark.parametrize("kind,first,nats", [("forward", .64, .6534), ("reverse", .8209, .4701)])
def test_i4_what_two_feedbacks_at_one_state_settle_on(kind, first, nats):
    z, teachers = torch.zeros(2, dtype=torch.float64), (logs(.98, .02), logs(.30, .70))
    for _ in range(1500): z = z - .5*sum(slope(z, t, kind) for t in teachers)/2
    assert abs(z.softmax(-1)[0].item() - first) < 1e-4 and abs(entropy(z).item() - nats) < 1e-4
    geometric = sum(t for t in teachers)/2
    assert abs(geometric.softmax(-1)[0].item() - .8209) < 1e-4 and abs((.98 + .30)/2 - .64) < 1e-12


def test_i5_top_k_and_a_bucket():
    p, q = logs(.4, .3, .2, .1), logs(.6, .2, .15, .05)
    assert [round(divergence(p, q, topk=k).item(), 6) for k in (None, 4, 2)] == [.084376, .084376, .081093]
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        a, b = torch.randn(2, 9, generator=g, dtype=torch.float64)*3
        full = divergence(a, b).item()
        assert all(divergence(a, b, topk=k).item() <= full + 1e-12 for k in range(1, 9)) and divergence(a, b, topk=9).item() == divergence(a, b, topk=50).item() == full
    for kind in KINDS: assert slope(p, q, kind, topk=2).isfinite().all()


@pytest.mark.parametrize("kind,bound", [("forward", 1.), ("reverse", 21.), ("jsd", 1.)])
def test_a_certain_teacher_does_not_explode(kind, bound):
    assert slope(torch.tensor([3., -3.]), torch.tensor([-200., 200.]), kind).abs().max() <= bound
    assert slope(torch.tensor([-60., 60.]), torch.tensor([60., -60.]), "forward").abs().max() > .99     # the student's log-probability is not clamped: its gradient lives


# ---------------------------------------------------------------- 6, 7: the teacher
def test_i6_ema():
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    for m, v in ((teacher, 1.), (student, 0.)): [nn.init.constant_(p, v) for p in m.parameters()]
    for _ in range(3): ema_update(teacher, student, .05)
    for p in teacher.parameters(): torch.testing.assert_close(p, torch.full_like(p, .857375))
    assert round(half_life(.05), 1) == 13.5 and round(half_life(.01)) == 69 and half_life(1.) == 0
    ema_update(teacher, student, 1.); assert all((p == 0).all() for p in teacher.parameters())


def test_i7_the_teacher_has_no_gradient_and_no_graph(policy, tmp_path):
    class Look(FD):
        def teacher_logits(self, rollouts, run):
            self.seen = super().teacher_logits(rollouts, run); return self.seen
    start = copy.deepcopy(policy.model)
    method = Look(); trainer = train(policy, tmp_path, method, updates=1)
    assert method.seen.grad_fn is None and not method.seen.requires_grad
    assert all(p.grad is None and not p.requires_grad for p in method._teacher.parameters()) and not method._teacher.training
    for t, s, now in zip(method._teacher.parameters(), start.parameters(), trainer.policy.model.parameters()): torch.testing.assert_close(t, s + .05*(now - s), atol=1e-6, rtol=1e-4)
    moved, held = train(policy, tmp_path/"b", FD(ema=0.)), train(policy, tmp_path/"c", FD(ema=1.))
    assert same(moved.method._teacher, policy.model) and same(held.method._teacher, held.policy.model)


# ---------------------------------------------------------------- 8: alignment
def test_i8_a_longer_prompt_leaves_the_alignment(policy, rollouts):
    prompts = [policy.encode(WORLD.teacher_prompt(p, "ok" if i % 2 else f"{p.meta['start']:02d}C")) for i, p in enumerate(rollouts.problems)]
    assert len({len(x) for x in prompts}) == 2                                        # two lengths, so that some rows are padded
    together = score_rollouts(policy.model, rollouts, prompts, want=("logits", "logps"))
    for i in range(len(rollouts)):
        n = int(rollouts.lengths[i]); ids = torch.tensor([prompts[i] + rollouts.completion_ids[i, :n].tolist()])
        with torch.no_grad(): alone = policy.model(ids).logits[0, len(prompts[i]) - 1:-1]   # the state before token t predicts token t
        torch.testing.assert_close(together.logits[i, :n], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.logps[i, :n], alone.log_softmax(-1).gather(1, rollouts.completion_ids[i, :n, None])[:, 0], atol=1e-4, rtol=1e-4)


def test_i8_the_student_logits_of_the_step_are_the_models_own(policy, tmp_path):
    class Look(FD):
        def auxiliary_loss(self, step):
            said = split_head(step.run.policy.model)[1](step.hidden).detach()
            chosen = said.log_softmax(-1).gather(2, step.rollouts.completion_ids[..., None])[..., 0]
            torch.testing.assert_close(chosen*step.mask, step.logps.detach()*step.mask, atol=1e-4, rtol=1e-4)
            self.looked = True; return super().auxiliary_loss(step)
    method = Look(); train(policy, tmp_path, method, updates=1)
    assert method.looked


# ---------------------------------------------------------------- 9: rows without feedback
def test_i9_rows_without_feedback_count_nowhere():
    z, t = logs(.5, .3, .2).expand(2, 3, 3), logs(.7, .2, .1).expand(2, 3, 3)
    loss, each = distill_loss(z, t, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert abs(loss.item() - .085123) < 1e-6 and (each[1] == 0).all() and each[0, 2] == 0
    strange = t.clone(); strange[1] = torch.tensor([9., -9., 0.])
    assert distill_loss(z, strange, torch.tensor([[1, 1, 0], [0, 0, 0]]))[0] == loss
    z = z.clone().requires_grad_(); none, _ = distill_loss(z, t, torch.zeros(2, 3)); none.backward()
    assert none == 0 and (z.grad == 0).all()


def test_i9_a_batch_without_any_feedback_has_loss_0_and_moves_nothing(policy, tmp_path):
    trainer = train(policy, tmp_path, FD(quality="none"))
    assert same(trainer.policy.model, policy.model)
    assert all(e["auxiliary_loss"] == 0 and e["distilled_frac"] == 0 for e in trainer.state.log_history if "loss" in e)


def test_i9_which_attempts_are_distilled():
    v, f = torch.tensor([0., 0., 1., 1., math.nan, .5]), ["14C", None, "ok", None, "14C", "14C"]
    assert kept_rows(v, f).tolist() == [True, False, False, False, False, True] and kept_rows(v, f, "all").tolist() == [True, False, True, False, False, True]


# ---------------------------------------------------------------- 10: pass@k
def test_i10_pass_at_k(): assert [round(pass_at_k(8, 2, k), 6) for k in (1, 2, 4, 8)] == [.25, .464286, .785714, 1.]


# ---------------------------------------------------------------- the limits of the switches
def test_with_weight_0_or_an_immediate_switch_it_is_grpo_token_for_token(policy, tmp_path):
    class Ear(Method):
        def __init__(self): self.heard = []
        def rewards(self, rollouts, rewards): self.heard.append(rollouts.completion_ids.tolist()); return rewards
    def heard(name, *methods):
        trainer = train(policy, tmp_path/name, Compose(*methods, Ear()), updates=3); return trainer.method[Ear].heard, trainer.policy.model
    texts, plain = heard("a")
    for name, method in (("b", FD(weight=0, policy_gradient=True)), ("c", FD(switch_after=0))):
        again, model = heard(name, method)
        assert again == texts and same(model, plain) and method._teacher is None and method.wants == ()


def test_after_the_switch_it_is_grpo(policy, tmp_path):
    class Losses(Method):
        def __init__(self): self.seen = []
        def token_loss(self, step, loss): self.seen.append(loss.detach().abs().max().item()); return loss
    method = FD(switch_after=2)
    trainer = train(policy, tmp_path, Compose(method, Losses()), updates=5, num_iterations=1)
    rows = [e for e in trainer.state.log_history if "loss" in e]
    assert ["auxiliary_loss" in e for e in rows] == [True, True, False, False, False] and [x > 0 for x in trainer.method[Losses].seen[:2]] == [False, False]
    before = {k: v.clone() for k, v in method._teacher.state_dict().items()}
    method.after_update(trainer)                                                       # it is dropped: it follows no more
    assert all(torch.equal(v, before[k]) for k, v in method._teacher.state_dict().items())


def test_policy_gradient_adds_both_losses(policy, tmp_path):
    runs = {n: train(policy, tmp_path/n, m, updates=1) for n, m in dict(grpo=Method(), fd=FD(), both=FD(policy_gradient=True)).items()}
    assert not any(same(a.policy.model, b.policy.model) for a, b in itertools.combinations(runs.values(), 2))
    assert len({str(r.rollouts.completion_ids.tolist()) for r in runs.values()}) == 1     # feedback draws from a generator of its own


# ---------------------------------------------------------------- feedback
def test_feedback_is_the_worlds_on_failed_attempts_alone(policy, tmp_path):
    for distill in ("failed", "all"):
        trainer = train(policy, tmp_path/distill, FD(distill=distill), updates=1)
        r, told = trainer.rollouts, trainer.rollouts.extras["feedback"]
        for p, text, v, f in zip(r.problems, r.completions, trainer.verified.tolist(), told):
            if v == 1: assert f == ("ok" if distill == "all" else None)
            else: assert f in {WORLD.feedback(p, text, False, random.Random(i)) for i in range(100)}
        assert trainer.state.log_history[0]["distilled_frac"] == pytest.approx(np.mean([f is not None for f in told]))


def test_shuffled_feedback_is_as_much_and_somebody_elses():
    told, kept = list("abcdefgh") + [None], [True]*8 + [False]
    for i in range(20):
        moved = shuffled(told, kept, random.Random(i))
        assert sorted(moved[:8]) == told[:8] and all(a != b for a, b in zip(moved[:8], told)) and moved[8] is None
    assert shuffled(["a", None], [True, False], random.Random(0)) == ["a", None] and shuffled([None], [False], random.Random(0)) == [None]


def test_a_feedback_function_of_ones_own(policy, tmp_path):
    def critic(problem, completion, right, rng): return f"{problem.meta['start']:02d}C" if completion.startswith("A") else None
    trainer = train(policy, tmp_path, FD(feedback=critic, distill="all"), updates=1)
    assert [f is not None for f in trainer.rollouts.extras["feedback"]] == [t.startswith("A") for t in trainer.rollouts.completions]


# ---------------------------------------------------------------- in the trainer
@pytest.mark.parametrize("settings", [dict(), dict(kind="reverse"), dict(kind="jsd", topk=20), dict(shuffle=True, distill="all")], ids=str)
def test_two_updates_repeat_and_are_finite(policy, tmp_path, settings):
    first, second = (train(policy, tmp_path/n, FD(**settings)) for n in "ab")
    assert same(first.policy.model, second.policy.model) and same(first.method._teacher, second.method._teacher)
    assert all(p.isfinite().all() for p in first.policy.model.parameters()) and not same(first.policy.model, policy.model)
    row = first.state.log_history[0]
    assert row["auxiliary_loss"] == pytest.approx(row["kl_teacher"], rel=1e-4) and row["kl_teacher"] > .02 and row["feedback_calls"] <= 8


def test_a_resumed_run_equals_an_unbroken_one_teacher_included(policy, tmp_path):
    whole = train(policy, tmp_path/"whole", FD(), updates=4)
    train(policy, tmp_path/"part", FD(), updates=4, save_steps=2)
    resumed = train(policy, tmp_path/"part", FD(), updates=4, resume=str(tmp_path/"part"/"checkpoint-2"))
    assert same(whole.policy.model, resumed.policy.model) and same(whole.method._teacher, resumed.method._teacher) and whole.method._calls == resumed.method._calls
    forgotten = torch.load(tmp_path/"part"/"checkpoint-2"/"workbench.pt", weights_only=False)["state"]["teacher"]
    assert any(not torch.equal(v, policy.model.state_dict()[k]) for k, v in forgotten.items())   # it had moved: without its state the run would be another


def test_works_beside_another_method_in_slices_and_under_lora(policy, tmp_path):
    class Shorter(Method):
        def rewards(self, rollouts, rewards): return rewards - .01*rollouts.lengths
    first, second = (train(policy, tmp_path/f"{i}", Compose(*m)) for i, m in enumerate(((FD(), Shorter()), (Shorter(), FD()))))
    assert same(first.policy.model, second.policy.model)                               # it reads the verdict, not the changed reward
    sliced = train(policy, tmp_path/"c", FD(), updates=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert math.isfinite(sliced.state.log_history[0]["kl_teacher"])
    adapted = copy.deepcopy(policy); adapted.model = add_lora(adapted.model, 4)
    trainer = train(adapted, tmp_path/"d", FD())
    assert trainer.state.log_history[0]["kl_teacher"] > .02 and all(p.isfinite().all() for p in trainer.policy.model.parameters())


def test_it_learns_what_the_hints_say(policy, tmp_path):
    "A few updates on two theorems: the divergence falls."
    trainer = train(policy, tmp_path, FD(), updates=12, learning_rate=1e-3)
    kl = [e["kl_teacher"] for e in trainer.state.log_history if "kl_teacher" in e]
    assert np.mean(kl[-3:]) < np.mean(kl[:3])


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("settings,words", [(dict(weight=0), "trains nothing: set policy_gradient=True"), (dict(weight=-1), "weight=-1"), (dict(ema=1.5), "ema=1.5"), (dict(kind="both"), "forward, reverse, jsd"),
    (dict(distill="right"), "use 'failed' or 'all'"), (dict(topk=0), "topk=0"), (dict(switch_after=-1), "switch_after=-1"), (dict(kind="jsd", alpha=2.), "beta must be in 0…1")])
def test_settings_that_cannot_work_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words): FD(**settings)


def test_worlds_and_shapes_that_cannot_work_are_refused_by_name(policy, tmp_path):
    with pytest.raises(ValueError, match="has no `teacher_prompt`: use one that writes feedback"): train(policy, tmp_path, FD(), world=make_world("chain", steps=2), go=False)
    with pytest.raises(ValueError, match="none, location, hint, wrong"): train(policy, tmp_path, FD(quality="vague"))
    with pytest.raises(ValueError, match="must agree in .B,T."): distill_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(2))
    class Own(Method): replaces = ("token_loss",)
    with pytest.raises(ValueError, match="both replace the stage `token_loss`"): Compose(FD(), Own())
    Compose(FD(policy_gradient=True), Own())


def test_arms_are_told_apart_by_their_settings():
    made = (FD(), FD(kind="reverse"), FD(ema=0.), FD(distill="all"), FD(policy_gradient=True), FD(switch_after=5), FD(weight=.5), FD(quality="wrong"), FD(shuffle=True), FD(topk=3))
    found = [describe(m) for m in made]
    assert all(a != b for a, b in itertools.combinations(found, 2)) and not any(k.startswith("_") for k in found[0])


def test_the_shipped_policy_is_weak_without_hints_and_follows_them(policy):
    problems = WORLD.problems(64, seed=0, split="test")
    start = evaluate(policy, WORLD, problems, samples=8, max_completion_length=ROOM)
    assert .06 < start.accuracy < .2 and start.mixed_frac > .3 and policy.n_params < 350_000
    told = [WORLD.feedback(p, "", False, random.Random(i)) for i, p in enumerate(problems)]
    hinted = evaluate(policy, WORLD, [WORLD.theorem(p.meta["start"], p.meta["goal"], f) for p, f in zip(problems, told)], samples=8, max_completion_length=ROOM)
    assert np.mean([t[:1] == f[2] for t, f in zip(hinted.completions, np.repeat(told, 8))]) > .9 and hinted.accuracy > start.accuracy + .08
    assert "H" not in "".join(start.completions) or "".join(start.completions).count("H") < 10           # the secret lemma is not used untold
