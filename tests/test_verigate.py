"Invariants of VeriGate, by the card's numbers and numbering; those of the single formulas stand in nbs/06_verigate.ipynb as well."
import copy, math
from types import SimpleNamespace
import pytest
import torch
from torch import tensor
from rlworkbench.advantages import group_advantages, to_tokens
from rlworkbench.experiment import describe, evaluate
from rlworkbench.method import Compose, Method
from rlworkbench.methods.verigate import (LearntPRM, OraclePRM, PRMAsORM, StepJudge, VeriGate, gated_advantages, group_kinds, rollout_scores, score_table,
                                          shuffled_scores, split_steps, spread, step_advantages, step_credit, step_spans, text_pieces, token_steps)
from rlworkbench.policies import load_policy
from rlworkbench.rollouts import Rollouts
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world

WORLD = make_world("chain", steps=2)
LONG = make_world("chain", steps=8)      # the policy fails nearly every one


@pytest.fixture(scope="module")
def policy(): return load_policy("chain-habits", device="cpu")


def table(*rows): # ragged rows -> scores (n,S) and step_mask (n,S)
    S = max(map(len, rows))
    return (tensor([[*map(float, r), *[0.]*(S - len(r))] for r in rows], dtype=torch.float64), tensor([[1]*len(r) + [0]*(S - len(r)) for r in rows]))


CARD = table((.9, .2, .1), (.8, .7))     # one group, everything failed
ONE = tensor([0, 0])


def z(scores, mask, group=ONE, credit="future", center=0., **kw): return step_advantages(step_credit(scores, mask, credit, center), mask, group, **kw)


class Silent: # a PRM that must not be asked
    def __call__(self, problems, completions, spans): raise AssertionError("the PRM was called")


class Counting:
    def __init__(self, prm): self.prm, self.asked = prm, []
    def __call__(self, problems, completions, spans): self.asked.append(len(completions)); return self.prm(problems, completions, spans)


def by_length(problems, completions, spans): return [[(b - a)/10 for a, b in some] for some in spans]   # a PRM with a will of its own, in every group


def rollouts_of(policy, texts, group):
    "Completions as the sampler would hand them over, each with its end token."
    ids = [policy.tokenizer(t, add_special_tokens=False).input_ids + [policy.tokenizer.eos_token_id] for t in texts]
    T = max(map(len, ids))
    problems = [WORLD.problems(1, seed=g)[0] for g in group]
    prompts = [policy.encode(p.prompt) for p in problems]
    P = max(map(len, prompts))
    mask = tensor([[1]*len(r) + [0]*(T - len(r)) for r in ids])
    return Rollouts(prompt_ids=tensor([[0]*(P - len(r)) + r for r in prompts]), prompt_mask=tensor([[0]*(P - len(r)) + [1]*len(r) for r in prompts]),
                    completion_ids=tensor([r + [0]*(T - len(r)) for r in ids]), completion_mask=mask, policy_mask=mask, group=tensor(group),
                    logps=torch.zeros(mask.shape), source=torch.zeros(len(ids)), stop=torch.zeros(len(ids)), problems=problems, completions=list(texts))


def at_work(policy, method, verified):
    "A method as `prepare` leaves it."
    method.prepare(SimpleNamespace(policy=policy, verified=tensor(verified), args=SimpleNamespace(seed=0), state=SimpleNamespace(global_step=0), world=WORLD))
    return method


def train(policy, out, method, *, world=WORLD, updates=2, learning_rate=1e-3, room=40, **settings):
    args = training_config(out, num_problems=2, num_generations=4, updates=updates, seed=3, max_completion_length=room, learning_rate=learning_rate, **settings)
    trainer = Trainer(copy.deepcopy(policy), world, world.problems(8, seed=1), method, args)
    trainer.train()
    return trainer


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


TEXTS = ["[12+3:15;>11;#11", ">15;?12+3:15;>11;#10", "[12+3:15;#15", ">99;"]


# ---------------------------------------------------------------- 1, 2: where the verifier speaks, the PRM is not asked
def test_i1_a_mixed_group_is_grpo_whatever_the_prm_would_say(policy):
    r = rollouts_of(policy, TEXTS, [7, 7, 7, 7])
    verified = [1., 0., 0., 0.]
    A = to_tokens(group_advantages(tensor(verified), r.group), r.policy_mask)
    assert torch.equal(at_work(policy, VeriGate(Silent()), verified).advantages(r, A), A) and A.abs().sum() > 1


def test_i1_only_the_failed_group_of_a_batch_is_changed_and_asked_about(policy):
    r = rollouts_of(policy, TEXTS*2, [7]*4 + [2]*4)
    verified = [0., 1., 0., 0.] + [0.]*4
    A = to_tokens(group_advantages(tensor(verified), r.group), r.policy_mask)
    method = at_work(policy, VeriGate(prm := Counting(by_length)), verified)
    got = method.advantages(r, A)
    assert torch.equal(got[:4], A[:4]) and got[4:].abs().max() > .5 and prm.asked == [4]
    assert method.metrics()["failed_frac"] == .5 and method.metrics()["mixed_frac"] == .5 and method.metrics()["solved_frac"] == 0


def test_i1_the_mixed_group_is_told_by_any_and_all_not_by_a_spread():
    failed, solved = group_kinds(tensor([0., 0., 1., 1., 0., 1., math.nan, 0., math.nan]), tensor([5, 5, 3, 3, 9, 9, 4, 4, 1]))
    assert failed.tolist() == [True, True, False, False, False, False, False, True, False]       # a rollout that was not judged is in no kind; its group is what the others are
    assert solved.tolist() == [False, False, True, True, False, False, False, False, False]
    assert group_kinds(tensor([1e-7, 0.]), ONE)[0].all() and not group_kinds(tensor([.5, 0.]), ONE)[0].any()   # partial credit separates


def test_i2_all_right_gets_nothing_and_asks_nothing(policy):
    r = rollouts_of(policy, TEXTS, [7, 7, 7, 7])
    A = to_tokens(group_advantages(torch.ones(4), r.group), r.policy_mask)
    assert (at_work(policy, VeriGate(Silent()), [1.]*4).advantages(r, A) == 0).all()


# ---------------------------------------------------------------- 3: the card's numbers
def test_i3_the_cards_group():
    c = step_credit(*CARD)
    torch.testing.assert_close(c, tensor([[1.2, .3, .1], [1.5, .7, 0.]], dtype=torch.float64))
    valid = CARD[1].bool()
    assert abs(c[valid].mean() - .76) < 1e-12 and abs(c[valid].std(correction=0) - .527636) < 1e-6 and abs(c[valid].std() - .589915) < 1e-6
    torch.testing.assert_close(z(*CARD), tensor([[.833906, -.871811, -1.250859], [1.402479, -.113714, 0.]], dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(z(*CARD, ddof=1), tensor([[.745869, -.779772, -1.118803], [1.254415, -.101709, 0.]], dtype=torch.float64), atol=1e-6, rtol=0)


def test_i3_through_the_method_to_the_tokens(policy):
    r = rollouts_of(policy, [">11;>12;#12", ">13;#99"], [4, 4])       # tokens: 4, 4, 3 + end; 4, 3 + end
    said = lambda problems, completions, spans: [[.9, .2, .1], [.8, .7]]
    got = at_work(policy, VeriGate(said), [0., 0.]).advantages(r, torch.zeros(r.completion_ids.shape))
    wanted = tensor([[.833906]*4 + [-.871811]*4 + [-1.250859]*4, [1.402479]*4 + [-.113714]*4 + [0.]*4])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- 4: means over steps, not over tokens
def test_i4_mean_and_variance_over_steps():
    A = z(*CARD, eps=0.)[CARD[1].bool()]
    assert abs(A.mean()) < 1e-12 and abs((A**2).mean() - 1) < 1e-12
    c, tokens = step_credit(*CARD)[CARD[1].bool()], tensor([4., 6, 2, 5, 3], dtype=torch.float64)
    by_token = (c*tokens).sum()/tokens.sum()
    assert abs(by_token - .82) < 1e-12 and abs(c.mean() - .76) < 1e-12      # the tempting mean is another number
    assert abs((A*tokens).sum()/tokens.sum()) > .1


# ---------------------------------------------------------------- 5: affine scores
@pytest.mark.parametrize("factor", (.1, 3.))
def test_i5_a_factor_changes_nothing_a_constant_does(factor):
    s, mask = CARD
    torch.testing.assert_close(z(factor*s, mask), z(s, mask), atol=1e-4, rtol=0)
    assert (z(s + .5, mask) - z(s, mask)).abs().max() > .1
    torch.testing.assert_close(z(s + .5, mask, center=.5), z(s, mask), atol=1e-9, rtol=0)


# ---------------------------------------------------------------- 6: nothing to compare
def test_i6_equal_single_steps_give_zero():
    A = z(*table((.3,), (.3,), (.3,)), group=tensor([1, 1, 1]))
    assert (A == 0).all()


def test_i6_a_failed_group_of_one_is_normalised_over_its_own_steps(policy):
    A = z(*table((1., 0., 1.)), group=tensor([0]))                       # c = 2, 1, 1: mean 4/3, spread sqrt(2)/3
    torch.testing.assert_close(A, tensor([[math.sqrt(2), -1/math.sqrt(2), -1/math.sqrt(2)]], dtype=torch.float64), atol=1e-5, rtol=0)
    assert (z(*table((1.,)), group=tensor([0])) == 0).all()
    r = rollouts_of(policy, [">11;>12;#12"], [3])
    got = at_work(policy, VeriGate(lambda *_: [[1., 0., 1.]]), [0.]).advantages(r, torch.zeros(1, 12))
    torch.testing.assert_close(got, tensor([[math.sqrt(2)]*4 + [-1/math.sqrt(2)]*8]), atol=1e-5, rtol=0)


# ---------------------------------------------------------------- 7: the sum
def test_i7_differences_of_credits_are_scores():
    g = torch.Generator().manual_seed(0)
    s, mask = torch.rand(5, 7, generator=g, dtype=torch.float64), (torch.arange(7) < tensor([7, 1, 3, 5, 2])[:, None]).long()
    c = step_credit(s, mask)
    torch.testing.assert_close(c - torch.cat([c[:, 1:], torch.zeros(5, 1, dtype=c.dtype)], 1), torch.where(mask.bool(), s, 0.))
    plain = [[sum(s[i, k].item() for k in range(j, int(mask[i].sum()))) for j in range(int(mask[i].sum()))] for i in range(5)]     # the loop
    torch.testing.assert_close(c[mask.bool()], tensor([v for row in plain for v in row], dtype=torch.float64))


def test_i7_what_lies_on_padding_counts_nowhere():
    s, mask = CARD
    dirty = torch.where(mask.bool(), s, 1e6)
    for credit in ("future", "step", "trajectory"): assert torch.equal(z(dirty, mask, credit=credit), z(s, mask, credit=credit))
    for how in ("mean", "min", "product"): assert torch.equal(rollout_scores(dirty, mask, how), rollout_scores(s, mask, how))


# ---------------------------------------------------------------- 8: tokens
def test_i8_one_value_a_step_and_zero_on_padding(policy):
    r = rollouts_of(policy, TEXTS, [1, 1, 2, 2])
    A = at_work(policy, VeriGate(by_length), [0.]*4).advantages(r, torch.zeros(r.completion_ids.shape))
    steps = split_steps(r, policy.tokenizer)
    assert steps.counts.tolist() == [3, 4, 2, 1] and (A[r.completion_mask == 0] == 0).all() and (steps.ids[r.completion_mask == 0] == -1).all()
    for i in range(4):
        for j in range(int(steps.counts[i])): assert len(A[i][steps.ids[i] == j].unique()) == 1
    pieces = [[policy.tokenizer.decode([t]) for t in row] for row in r.completion_ids.tolist()]
    assert ["".join(c for c, s in zip(pieces[1], steps.ids[1]) if s == j) for j in range(4)] == [">15;", "?12+3:15;", ">11;", "#10<eos>"]


@pytest.mark.parametrize("text, steps", [("", []), ("a;b;", ["a;", "b;"]), (";;a;;b", [";;a;;", "b"]), ("a", ["a"]), ("a;b", ["a;", "b"]), (" a ; b ", [" a ; ", "b "])])
def test_i8_no_step_is_without_text_and_together_they_are_the_text(text, steps):
    got = [text[a:b] for a, b in step_spans(text)]
    assert got == steps and "".join(got) == text


def test_i8_blank_lines_and_merged_tokens():
    text = "\n\nOne.\n\n\nTwo is\nlong.\n \nThree"
    spans = step_spans(text, r"\n\s*\n")
    assert "".join(text[a:b] for a, b in spans) == text and len(spans) == 3 and text[slice(*spans[1])].startswith("Two is\nlong.")
    assert token_steps(spans, ["\n\nOne", ".\n", "\n\nTwo", " is\nlong", ".\n \n", "Three", ""]).tolist() == [0, 0, 1, 1, 1, 2, 2]   # a token over a border goes where most of it lies
    assert token_steps([], ["", ""]).tolist() == [-1, -1] and token_steps([(0, 1)], ["", "a", ""]).tolist() == [0, 0, 0]


def test_i8_pieces_join_to_the_text_where_a_character_takes_two_tokens():
    class Bytes: # a tokenizer of bytes
        def decode(self, ids, skip_special_tokens=True): return bytes(i for i in ids if i < 256).decode(errors="replace")
    ids = [*"é;a".encode(), 256]
    assert text_pieces(Bytes(), ids, "é;a") == ["", "é", ";", "a", ""]


# ---------------------------------------------------------------- 9: order and neighbours
def test_i9_order_and_other_groups_change_nothing():
    g = torch.Generator().manual_seed(1)
    s, mask, group = torch.rand(8, 5, generator=g, dtype=torch.float64), (torch.arange(5) < torch.randint(1, 6, (8, 1), generator=g)).long(), tensor([3, 1, 3, 3, 1, 1, 1, 3])
    order = torch.randperm(8, generator=g)
    torch.testing.assert_close(z(s[order], mask[order], group[order]), z(s, mask, group)[order])
    other = torch.where((group == 1)[:, None], 9*s, s)
    assert torch.equal(z(other, mask, group)[group == 3], z(s, mask, group)[group == 3])
    torch.testing.assert_close(z(s[group == 3], mask[group == 3], group[group == 3]), z(s, mask, group)[group == 3])


# ---------------------------------------------------------------- 10: length
def test_i10_equal_scores_favour_the_longer_rollout():
    A = z(*table((.5,)*4, (.5,)*2))
    torch.testing.assert_close(A, tensor([[1.7179, .7809, -.1562, -1.0932], [-.1562, -1.0932, 0., 0.]], dtype=torch.float64), atol=1e-4, rtol=0)
    assert (z(*table((.5,)*4, (.5,)*2), center=.5) == 0).all()


# ---------------------------------------------------------------- ablations, the rival, the placebo
def test_credits_of_the_ablations():
    s, mask = CARD
    torch.testing.assert_close(step_credit(s, mask, "step"), s)
    torch.testing.assert_close(step_credit(s, mask, "trajectory"), tensor([[.4, .4, .4], [.75, .75, 0.]], dtype=torch.float64))


def test_without_the_gate_every_group_is_the_prms(policy):
    r = rollouts_of(policy, TEXTS, [7]*4)
    verified = [1., 0., 0., 0.]
    A = to_tokens(group_advantages(tensor(verified), r.group), r.policy_mask)
    free = at_work(policy, VeriGate(by_length, gate=False), verified).advantages(r, A)
    assert not torch.equal(free, A) and torch.equal(free, at_work(policy, VeriGate(by_length), [0.]*4).advantages(r, A))


def test_the_rivals_number():
    s, mask = CARD
    for how, wanted in (("mean", (.4, .75)), ("min", (.1, .7)), ("product", (.018, .56))):
        torch.testing.assert_close(rollout_scores(s, mask, how), tensor(wanted, dtype=torch.float64))
    assert all(rollout_scores(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), how) == 0 for how in ("mean", "min", "product"))


def test_shuffled_keeps_each_groups_scores_and_the_generators():
    s, mask = table((.1, .2, .3), (.4,), (.5, .6), (.7, .8))
    group = tensor([2, 5, 2, 5])
    torch.manual_seed(0); first = torch.rand(1); torch.manual_seed(0)
    dealt = shuffled_scores(s, mask, group, 1)
    assert torch.rand(1) == first and (dealt[mask == 0] == 0).all() and torch.equal(dealt, shuffled_scores(s, mask, group, 1))
    for g in (2, 5): assert sorted(dealt[group == g][mask[group == g].bool()].tolist()) == sorted(s[group == g][mask[group == g].bool()].tolist())
    assert any(not torch.equal(dealt, shuffled_scores(s, mask, group, k)) for k in (2, 3, 4))


def test_gated_advantages_are_detached_and_leave_their_inputs_alone():
    A, by_step, failed = torch.ones(2, 3), torch.full((1, 3), 2.), tensor([False, True])
    out = gated_advantages(A, failed, by_step)
    assert out.tolist() == [[1, 1, 1], [2, 2, 2]] and (A == 1).all()
    s = CARD[0].clone().requires_grad_(); before = s.detach().clone()
    assert not z(s, CARD[1]).requires_grad and torch.equal(s, before)
    assert torch.equal(spread(tensor([[5., 7.]]), tensor([[0, 0, 1, -1]])), tensor([[5., 5., 7., 0.]]))


# ---------------------------------------------------------------- the PRMs
PROBLEM = SimpleNamespace(prompt="12+3-4=", answer="11", meta=dict(ops=["+3", "-4"], values=[12, 15, 11]))


def oracle(text, **kw): return OraclePRM(WORLD, **kw)([PROBLEM], [text], [step_spans(text)])[0]


@pytest.mark.parametrize("text, scores", [
    ("[12+3:15;>11;#11", [1, 1, 1]), (">15;>11;#11", [1, 1, 1]),
    (">16;>12;#12", [0, 1, 1]),                       # the slip is one wrong step; what follows from it is right
    (">15;>11;#12", [1, 1, 0]),                       # the answer is not what was found
    (">15;?12+3:15;>11;#11", [1, 0, 1, 1]),           # a filler line leads nowhere
    (">15;#15", [1, 0]),                              # answered too early
    ("nonsense", [0])])
def test_the_oracle_judges_lines(text, scores): assert oracle(text) == scores


def test_a_biased_oracle_likes_filler_and_nothing_else():
    text = ">15;?12+3:15;>11;#11"
    assert oracle(text, bonus=.3) == [1, .3, 1, 1] and oracle(text, bonus=2.) == [1, 1, 1, 1] and oracle(">16;>12;#12", bonus=1.) == oracle(">16;>12;#12")
    pad = ">16;" + "?12+3:16;"*3 + ">13;#13"          # two slips, three lines of filler
    assert sum(oracle(pad, bonus=1.)) - sum(oracle(pad)) == 3
    texts = [">16;>12;#12", pad]
    s, mask = table(*(oracle(t, bonus=1.) for t in texts))
    assert z(s, mask)[1, 0] > z(s, mask)[0, 0]        # the trap: the sum likes the padded one better, though it is worse
    s, mask = table(*(oracle(t) for t in texts))
    assert z(s, mask)[1, 0] < z(s, mask)[0, 0]


def test_a_learnt_prm_judges_as_the_oracle_and_survives_a_round_trip(policy, tmp_path):
    prm = LearntPRM(problems=64, samples=4, updates=150, batch=256)
    torch.manual_seed(5); first = torch.rand(1); torch.manual_seed(5)
    world = make_world("chain", steps=3)
    run = SimpleNamespace(policy=policy, args=SimpleNamespace(seed=0, max_completion_length=40), world=world, problems=world.problems(64, seed=1))
    prm.prepare(run, ";")
    assert torch.rand(1) == first and prm.accuracy > .75
    asked, text = run.problems[:1], "[12+3:15;>11;#11"
    scores = prm(asked, [text], [step_spans(text)])[0]
    assert scores.shape == (3,) and not scores.requires_grad and ((0 <= scores) & (scores <= 1)).all()
    again = LearntPRM(problems=8, samples=2, updates=2, batch=8); again.prepare(run, ";")
    assert not torch.equal(again(asked, [text], [step_spans(text)])[0], scores)
    again.load_state_dict(prm.state_dict())
    assert torch.equal(again(asked, [text], [step_spans(text)])[0], scores) and again.accuracy == prm.accuracy
    assert VeriGate(prm).metrics() == {"prm_accuracy": prm.accuracy} and set(VeriGate(prm).state_dict()["prm"]) == {"head", "mean", "std", "accuracy"}
    assert len(prm(asked*2, [text, ""], [step_spans(text), []])[1]) == 0


# ---------------------------------------------------------------- in the trainer
class Ear(Method):
    def __init__(self): self.heard = []
    def rewards(self, rollouts, rewards): self.heard.append(rollouts.completion_ids.tolist()); return rewards


class Right(Method): # makes the verifier say so
    def rewards(self, rollouts, rewards):
        self._run.verified = torch.ones_like(self._run.verified); return rewards
    def prepare(self, run): self._run = run


def test_where_the_gate_never_opens_it_is_grpo_token_for_token(policy, tmp_path):
    plain, off = (train(policy, tmp_path/name, Compose(method, Right(), Ear())) for name, method in (("a", Method()), ("b", VeriGate(Silent()))))
    assert plain.method[Ear].heard == off.method[Ear].heard and same(plain.policy.model, off.policy.model)
    assert off.state.log_history[0]["failed_frac"] == 0 and off.state.log_history[0]["solved_frac"] == 1
    assert not same(plain.policy.model, policy.model)


def test_where_everything_fails_grpo_stands_still_and_verigate_learns(policy, tmp_path):
    class Wrong(Right):
        def rewards(self, rollouts, rewards):
            self._run.verified = torch.zeros_like(self._run.verified); return torch.zeros_like(rewards)
    plain, on = (train(policy, tmp_path/name, Compose(Wrong(), method), world=LONG, room=60) for name, method in (("a", Method()), ("b", VeriGate(OraclePRM(LONG)))))
    assert same(plain.policy.model, policy.model) and not same(on.policy.model, policy.model)


def test_two_updates_repeat_and_are_finite(policy, tmp_path):
    first, second, placebo = (train(policy, tmp_path/str(i), VeriGate(OraclePRM(LONG), shuffle=s), world=LONG, room=60) for i, s in enumerate((False, False, True)))
    assert same(first.policy.model, second.policy.model) and all(p.isfinite().all() for p in first.policy.model.parameters())
    assert not same(first.policy.model, placebo.policy.model)
    log = first.state.log_history[0]
    assert {"failed_frac", "mixed_frac", "solved_frac", "prm_score", "steps_failed", "cut_short_frac"} <= set(log) and 0 < log["prm_score"] <= 1
    assert abs(log["failed_frac"] + log["mixed_frac"] + log["solved_frac"] - 1) < 1e-6 and first.method.state_dict() == {}


def test_works_beside_other_methods(policy, tmp_path):
    class Shorter(Method): # shapes the rewards; the gate listens to the verifier alone
        def rewards(self, rollouts, rewards): return rewards - .01*rollouts.lengths
    both = Compose(Shorter(), VeriGate(prm := Counting(OraclePRM(LONG))), StepJudge(dict(oracle=OraclePRM(LONG))))
    trainer = train(policy, tmp_path, both, world=LONG, room=60)
    log = trainer.state.log_history[0]
    assert prm.asked and log["failed"] == log["failed_frac"] > 0 and 0 < log["score_oracle"] < 1 and log["n_steps"] > 4 and log["filler"] >= 0
    with pytest.raises(ValueError, match="PRMAsORM"):
        class Owner(Method): replaces = ("rewards",)
        Compose(PRMAsORM(by_length), Owner())


def test_the_rival_rewards_every_group_by_the_prm(policy, tmp_path):
    trainer = train(policy, tmp_path, PRMAsORM(prm := Counting(by_length)), updates=1)
    r = trainer.rollouts
    assert prm.asked == [8]
    steps = split_steps(r, policy.tokenizer)
    torch.testing.assert_close(r.rewards.float(), rollout_scores(score_table(by_length(r.problems, r.completions, steps.spans), steps), steps.mask))


def test_the_judge_changes_nothing(policy, tmp_path):
    plain, watched = (train(policy, tmp_path/n, m) for n, m in (("a", Method()), ("b", StepJudge(dict(oracle=OraclePRM(WORLD))))))
    assert same(plain.policy.model, watched.policy.model)


# ---------------------------------------------------------------- refused, told apart, shipped
def test_what_cannot_work_is_refused_by_name(policy):
    for make in (VeriGate, PRMAsORM):
        with pytest.raises(ValueError, match="prm=None cannot be called"): make(None)
    with pytest.raises(ValueError, match="credit='sum' is unknown: use one of future, step, trajectory"): VeriGate(by_length, credit="sum")
    with pytest.raises(ValueError, match="aggregate='max' is unknown: use one of mean, min, product"): PRMAsORM(by_length, aggregate="max")
    with pytest.raises(ValueError, match="must both be .B,."): group_kinds(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="must both be .n,S."): step_credit(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="must have a row for each of 1 failed rollouts"): gated_advantages(torch.zeros(2, 3), tensor([True, False]), torch.zeros(2, 3))
    r = rollouts_of(policy, TEXTS, [7]*4)
    for said, match in (([[1.]]*4, "gave 1 scores for the 3 steps of rollout 0"), ([[1., math.nan, 1.], [1.]*4, [1.]*2, [1.]], "not finite, first in rollout 0")):
        with pytest.raises(ValueError, match=match): at_work(policy, VeriGate(lambda *_: said), [0.]*4).advantages(r, torch.zeros(r.completion_ids.shape))


def test_arms_are_told_apart_by_their_settings():
    found = [describe(m) for m in (VeriGate(OraclePRM(WORLD)), VeriGate(OraclePRM(WORLD, bonus=1.)), VeriGate(OraclePRM(WORLD), shuffle=True), VeriGate(OraclePRM(WORLD), gate=False),
                                   VeriGate(OraclePRM(WORLD), credit="step"), VeriGate(OraclePRM(WORLD), center=.5), VeriGate(LearntPRM()), PRMAsORM(OraclePRM(WORLD)))]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_most_groups_of_the_shipped_policy_fail_as_a_whole():
    policy, world = load_policy("chain-hard", device="cpu"), make_world("chain", steps=3)
    start = evaluate(policy, world, world.problems(96, seed=0, split="test"), samples=8, max_completion_length=48)
    assert .05 < start.accuracy < .12 and .4 < (start.per_problem == 0).mean() < .7 and start.mixed_frac > .3     # the card's window
    text = "".join(start.completions)
    assert .1 < text.count("?")/len(start.completions) < .6 and text.count(">") > 3*text.count("[")               # filler is there, and care is rare
