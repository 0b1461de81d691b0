"Invariants of DeepTool that need a world, a sampler or a trainer; those of the single formulas stand in nbs/09_deeptool.ipynb. The numbers are the card's."
import random
import pytest, torch
from rlworkbench.advantages import group_advantages
from rlworkbench.experiment import describe
from rlworkbench.method import Compose, Method
from rlworkbench.methods.deeptool import (DeepTool, draw_turn, judge_episode, judge_turn, one_turn, process_reward, similarity, trajectory_measures, turn_advantages,
                                          turns_to_tokens)
from rlworkbench.policies import build_tokenizer, load_policy, sft_batch
from rlworkbench.rollouts import Stop, TorchSampler
from rlworkbench.toolbox.turns import TurnSampler
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import make_world
from rlworkbench.worlds.calculator import Turn, execute, parse_turn, split_turns

WORLD = make_world("calculator", fail=.2)
T = torch.tensor


@pytest.fixture(scope="module")
def weights(): return load_policy("calc-habits", device="cpu")


def run(weights, out, method, *, world=WORLD, problems=None, updates=2, seed=3, num_problems=4, max_completion_length=80, **settings):
    args = training_config(out, num_problems=num_problems, num_generations=4, updates=updates, seed=seed, max_completion_length=max_completion_length, learning_rate=1e-3, **settings)
    trainer = Trainer(weights.copy(), world, problems or world.problems(16, seed=1), method, args)
    trainer.train()
    return trainer


def flat(trainer): return torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])
def text_of(turns): return "".join(t.text + t.shown for t in turns)
def judged(text, p): return judge_episode(split_turns(text), p.meta["calls"], p.answer, execute)


# ---------------------------------------------------------------- 1: observations and prompts
def test_i1_observations_and_prompts_have_mask_0(weights, tmp_path):
    seen = []
    class Watch(Method):
        def token_loss(self, step, loss): seen.append(step); return loss
    run(weights, tmp_path, Compose(DeepTool(variant="episodes"), Watch()), updates=1)
    mask, ids, tok = seen[0].mask.bool(), seen[0].rollouts.completion_ids, weights.tokenizer
    observed = seen[0].rollouts.completion_mask.bool() & ~mask
    assert observed.any() and torch.equal(mask.long(), seen[0].rollouts.policy_mask)
    tags = {tok.get_vocab()[x] for x in ("<o>", "</o>")}
    assert not tags & set(ids[mask].tolist()) and tags <= set(ids[observed].tolist())


def test_i1_another_observation_leaves_the_mask(weights):
    "The same turns with another text between the observation's tags: the same policy tokens enter the loss."
    class Other(type(WORLD)):
        def respond(self, prompt, completion): return "<o>77</o>"
    p = WORLD.problems(1)[0]
    masks = []
    for world in (make_world("calculator"), Other()):
        script = ["<t>a+b</t><c>7+5</c>", "<t>done</t><a>12</a>"]
        class Scripted(TorchSampler):
            n = 0
            def sample(self, prompt_ids, **kw):
                Scripted.n += 1
                ids = weights.tokenizer(script[Scripted.n - 1], add_special_tokens=False).input_ids + ([weights.tokenizer.eos_token_id] if Scripted.n == 2 else [])
                return super().sample(prompt_ids, **{**kw, "forced": [ids]})
        r = TurnSampler(Scripted(weights.model, weights.tokenizer, 60, train_forced=True), world).sample([weights.encode(p.prompt)], problems=[p])
        masks.append(r.policy_mask[0].tolist()); assert r.stop.tolist() == [Stop.EOS]
    assert masks[0] == masks[1] and sum(masks[0]) == 10 + 7 and masks[0][10:13] == [0, 0, 0]


def test_a14_tool_tokens_take_no_part_in_the_loss(weights, tmp_path):
    "Changing what the loss says of the tool's tokens changes nothing."
    class Spoil(Method):
        def token_loss(self, step, loss): return torch.where(step.mask.bool(), loss, loss*0 + 1e6)
    class Plain(Method): pass
    a, b = (run(weights, tmp_path/str(i), m) for i, m in enumerate((Spoil(), Plain())))
    assert (a.rollouts.completion_mask > a.rollouts.policy_mask).any() and torch.equal(flat(a), flat(b))


# ---------------------------------------------------------------- 2, 3, 4, 9: the reward of one turn
def test_i2_the_thought_is_not_looked_at():
    a, b = (parse_turn(f"<t>{z}</t><c>5*3</c>") for z in ("b*c", "again a-x"))
    assert judge_turn(a, "5*3", False, execute) == judge_turn(b, "5*3", False, execute) == (1., 1., 1.)


def test_i3_malformed_earns_nothing_whatever_e_and_m():
    for e in (0., 1.):
        for m in (0., .5, 1.): assert process_reward(T([0.]), T([e]), T([m])).item() == 0.
    assert judge_turn(None, "5*3", False, execute) == (0., 0., 0.)


def test_i4_weights():
    scores = [judge_turn(parse_turn(text), "5*3", False, execute) for text in ("<t>b*c</t><c>5*3</c>", "<t>b*c</t><c>+</c>", "<c>5*3</c>")]
    assert scores == [(1., 1., 1.), (1., 0., 0.), (0., 0., 0.)]
    torch.testing.assert_close(process_reward(*T(scores).T), T([1., .1, 0.]))


def test_i4_answers_and_calls_in_the_wrong_place():
    answer, call = Turn("done", "15", True), Turn("b*c", "5*3")
    assert judge_turn(answer, "5*3", False, execute) == (1., 0., 0.) == judge_turn(call, "15", True, execute)
    assert judge_turn(answer, "15", True, execute) == (1., 1., 1.) and judge_turn(answer, "16", True, execute) == (1., 1., 0.)


def test_i9_equivalent_actions_match_by_their_result():
    assert execute("4*37") == "ERR range"                                # this calculator ends at 99
    assert judge_turn(Turn("", "4*17"), "17*4", False, execute)[2] == judge_turn(Turn("", "68-0"), "17*4", False, execute)[2] == 1.
    assert judge_turn(Turn("", "4+17"), "17*4", False, execute)[2] == .5*similarity("4+17", "17*4") == .5*(2*2/6)
    assert judge_turn(Turn("", "68"), "17*4", False, execute) == (1., 0., 0.)          # a constant is no call
    assert judge_turn(Turn("", "17*"), "17*4", False, execute) == (1., 0., .5*(2*2/5)) # an error matches nothing, but it is near
    assert judge_turn(Turn("", "9*12"), "9*13", False, execute)[:2] == (1., 0.)        # two errors do not match each other


# ---------------------------------------------------------------- 5, 6: the group
def test_i5_group_of_four():
    rewards = T([1., 1., .1, 0.])
    assert rewards.mean().item() == pytest.approx(.525) and rewards.std().item() == pytest.approx(.55, abs=1e-3)
    torch.testing.assert_close(group_advantages(rewards, torch.zeros(4, dtype=torch.long)), T([.8635, .8635, -.7726, -.9544]), atol=1e-4, rtol=0)
    per_turn = turn_advantages(rewards[:, None], torch.zeros(4, 1, dtype=torch.bool), torch.zeros(4), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(per_turn[:, 0], T([.8635, .8635, -.7726, -.9544]), atol=1e-4, rtol=0)


def test_i6_equal_rewards_give_zero():
    for r in (0., .1, 1.):
        assert turn_advantages(torch.full((4, 2), r), torch.zeros(4, 2, dtype=torch.bool), torch.ones(4), torch.zeros(4, dtype=torch.long)).abs().max() == 0
        assert group_advantages(torch.full((4,), r), torch.zeros(4, dtype=torch.long)).abs().max() == 0


# ---------------------------------------------------------------- 7: one number a turn
def test_i7_all_tokens_of_a_turn_share_one_advantage(weights, tmp_path):
    kept = []
    class Watch(Method):
        def advantages(self, rollouts, advantages): kept.append((rollouts, advantages)); return advantages
    run(weights, tmp_path, Compose(DeepTool(variant="episodes"), Watch()), updates=1)
    rollouts, advantages = kept[0]
    several = 0
    for i in range(len(rollouts)):
        real, turn = rollouts.completion_mask[i].bool(), rollouts.extras["turn"][i]
        values = [advantages[i][real & (turn == t)].unique() for t in range(int(rollouts.extras["n_turns"][i]))]
        assert all(len(v) <= 1 for v in values)
        several += len({v.item() for v in values if len(v)}) > 1
    assert several > 3 and (advantages[rollouts.completion_mask == 0] == 0).all()


class Last(type(WORLD)):
    "Only the answer is left to be written: a single turn."
    def __init__(self, **dials): super().__init__(**dials); self.max_turns = 1
    def verify(self, problem, completion):
        turn = parse_turn(completion)
        return float(turn is not None and turn.final and turn.action == problem.answer)


def test_i7_with_a_single_turn_variant_a_is_grpo(weights, tmp_path):
    world = Last()
    problems = [one_turn(p, turns, len(turns) - 1) for p in world.problems(16, seed=1) for turns in [world.with_dials(perturb=0.).reference(p, random.Random(0))]]
    method = DeepTool(weights=(0., 0., 1.), turn_tokens=None)
    a, b = (run(weights, tmp_path/str(i), m, world=world, problems=problems, temperature=2.0) for i, m in enumerate((method, None)))    # hot, so that some answers are wrong
    assert torch.equal(a.rollouts.completion_ids, b.rollouts.completion_ids) and torch.equal(a.rollouts.rewards, b.rollouts.rewards)
    assert torch.equal(flat(a), flat(b)) and not torch.equal(flat(a), torch.cat([p.flatten() for p in weights.model.parameters()]))


def test_without_turn_rewards_variant_b_is_grpo(weights, tmp_path):
    runs = [run(weights, tmp_path/str(i), m) for i, m in enumerate((DeepTool(variant="episodes", weights=(0., 0., 0.)), None, DeepTool(variant="outcome"), DeepTool(variant="episodes")))]
    assert torch.equal(runs[0].rollouts.completion_ids, runs[1].rollouts.completion_ids)
    assert torch.equal(flat(runs[0]), flat(runs[1])) and torch.equal(flat(runs[2]), flat(runs[1])) and not torch.equal(flat(runs[3]), flat(runs[1]))


def test_calls_and_answers_are_never_compared():
    "Two rollouts are at an answer where the others still call: two groups at the same turn. The wrong way mixes them."
    rewards, final = T([[1.], [0.], [1.], [.2]]), T([[False], [False], [True], [True]])
    group = torch.zeros(4, dtype=torch.long)
    apart = turn_advantages(rewards, final, torch.zeros(4), group)[:, 0]
    torch.testing.assert_close(apart, torch.cat([group_advantages(rewards[:2, 0], group[:2]), group_advantages(rewards[2:, 0], group[:2])]))
    assert not torch.allclose(apart, group_advantages(rewards[:, 0], group))
    alone = turn_advantages(T([[1.], [torch.nan]]), torch.zeros(2, 1, dtype=torch.bool), torch.zeros(2), group[:2])
    assert alone[0].item() == 0.                                          # nobody to compare with


def test_other_order_of_rows_and_more_turns():
    torch.manual_seed(0)
    rewards, final, outcomes, group = torch.rand(8, 3), torch.rand(8, 3) < .3, torch.rand(8).round(), T([0, 0, 0, 0, 5, 5, 5, 5])
    rewards[1, 2] = torch.nan
    whole, order = turn_advantages(rewards, final, outcomes, group), torch.randperm(8)
    torch.testing.assert_close(turn_advantages(rewards[order], final[order], outcomes[order], group[order]), whole[order])
    wide = turn_advantages(torch.cat([rewards, torch.full((8, 2), torch.nan)], 1), torch.cat([final, torch.zeros(8, 2, dtype=torch.bool)], 1), outcomes, group)
    torch.testing.assert_close(wide[:, :3], whole)
    assert turn_advantages(rewards.double(), final, outcomes.double(), group).dtype == torch.float64
    plain = torch.stack([torch.stack([group_advantages(torch.where(final[:, t] == f, rewards[:, t], torch.nan), group) for f in (False, True)]).gather(0, final[None, :, t].long())[0] for t in range(3)], 1)
    torch.testing.assert_close(whole, plain + group_advantages(outcomes, group)[:, None])


# ---------------------------------------------------------------- 8: perturbations
def test_i8_no_perturbation_is_the_clean_trajectory_and_all_are_repaired():
    clean, always = make_world("calculator", perturb=0.), make_world("calculator", perturb=1., at_most=99)
    for i, p in enumerate(clean.problems(200)):
        turns = clean.reference(p, random.Random(i))
        assert [t.action for t in turns] == [*p.meta["calls"], p.answer] and not any(t.failed for t in turns)
        turns = always.reference(p, random.Random(i))
        assert [t.failed for t in turns] == [True, False]*3 + [False] and clean.verify(p, text_of(turns)) == 1.
        assert all(b.kind == "careful" and b.thought.startswith("again ") for a, b in zip(turns, turns[1:]) if a.failed)
    capped = [sum(t.failed for t in make_world("calculator", perturb=1.).reference(p, random.Random(i))) for i, p in enumerate(clean.problems(50))]
    assert set(capped) == {2}


def test_i8_the_mistake_is_not_taught():
    world = make_world("calculator", perturb=1., at_most=99)
    tok = build_tokenizer(world.vocab, "calculator")
    for i, p in enumerate(world.problems(50)):
        pieces, turns = world.demonstration(p, random.Random(i)), world.reference(p, random.Random(i))
        ids, mask, labels = sft_batch(tok, [(p.prompt, pieces)])
        taught = tok.decode(labels[0][labels[0] >= 0], skip_special_tokens=True)
        assert taught == "".join(t.text for t in turns if t.kind != "corrupted") and "<o>" not in taught
        plain = sft_batch(tok, [(p.prompt, "".join(text for text, _ in pieces))])
        assert torch.equal(plain[0], ids) and torch.equal(plain[1], mask) and (plain[2] >= labels).all()


# ---------------------------------------------------------------- rollouts against the reference
def test_an_on_policy_rollout_is_judged_while_it_stays_on_the_reference():
    p = next(p for p in WORLD.problems(50) if p.meta["order"] == [1, 0, 2])
    a, b, c = p.meta["calls"]
    turn = lambda call, seen=None: f"<t>hm</t><c>{call}</c><o>{seen or execute(call)}</o>"
    right = turn(a) + turn(b) + turn(c) + f"<t>done</t><a>{p.answer}</a>"
    assert [j.due for j in judged(right, p)] == [0, 1, 2, 3] and all(j.right for j in judged(right, p))
    failed = judged(turn(a, "ERR timeout") + right, p)
    assert [j.due for j in failed] == [0, 0, 1, 2, 3] and [j.failed for j in failed] == [True, False, False, False, False] and all(j.right for j in failed)
    astray = judged(turn("1+1") + turn(b) + f"<t>done</t><a>{p.answer}</a>", p)
    assert [j.due for j in astray] == [0, None, None] and [j.right for j in astray] == [False, False, True]
    assert astray[1].scores == (1., 1., 0.)                                # format and execution only
    early = judged(turn(a) + f"<t>done</t><a>{p.answer}</a>", p)
    assert early[1].scores == (1., 0., 0.)
    broken = judged(turn(a) + "<c>5", p)
    assert [j.scores for j in broken] == [(1., 1., 1.), (0., 0., 0.)]


def test_measures_of_rollouts():
    p = next(p for p in WORLD.problems(50) if p.meta["order"] == [1, 0, 2])
    a, b, c = p.meta["calls"]
    turn = lambda call, seen=None: f"<t>hm</t><c>{call}</c><o>{seen or execute(call)}</o>"
    recovers = judged(turn(a, "ERR timeout") + turn(a) + turn(b) + turn(c) + f"<t>done</t><a>{p.answer}</a>", p)
    gives_up = judged(turn(a, "ERR timeout") + turn("1+1") + turn("1+", "ERR syntax") + turn("1-1"), p)
    m = trajectory_measures([recovers, gives_up], 3)
    assert m["recovery"] == .5 and m["valid_call"] == 7/8 and m["turns"] == 4.5
    assert m["right_1"] == 3/4 and m["right_2"] == m["right_3"] == m["right_4"] == 1.
    assert trajectory_measures([], 3) == dict(turns=0.)


def test_the_oracle_of_the_world_agrees():
    world = make_world("calculator", careful=.5)
    for i, p in enumerate(world.problems(100)):
        turns = world._turns(p, random.Random(i), .5)
        steps, scores = world.steps(p, text_of(turns)), judged(text_of(turns), p)
        assert [s.text for s in steps] == [t.text for t in turns] and len(steps) == len(scores)
        assert all(s.correct == j.right for s, j in zip(steps, scores) if j.due is not None)
        assert steps[-1].on_track == (scores[-1].due == len(p.meta["calls"]) and scores[-1].right)


# ---------------------------------------------------------------- prefixes
def test_prefixes_are_reference_histories_without_corrupted_turns():
    world, firsts = make_world("calculator", perturb=.5), []
    for i, p in enumerate(world.problems(300)):
        turns = world.reference(p, random.Random(i))
        q = draw_turn(p, turns, random.Random(i))
        k = split_turns(q.prompt[len(p.prompt):])
        assert q.prompt == p.prompt + text_of(turns[:len(k)]) and turns[len(k)].kind != "corrupted" and turns[len(k)].action == q.meta["turn"]["due"]
        assert q.meta["turn"]["recovery"] == (len(k) > 0 and turns[len(k) - 1].failed) and q.answer == p.answer
        firsts.append(q.meta["turn"]["call"])
    assert 50 < firsts.count(0) < 100 and .1 < sum(q == 3 for q in firsts)/300 < .3     # each of some 5.5 turns about as often


def test_prefix_ids_are_those_of_a_rollout(weights):
    "What the policy reads in training is what it reads in a rollout: the same ids, whether history is a prompt or was written."
    world = make_world("calculator", perturb=0.)
    for i, p in enumerate(world.problems(20)):
        turns = world.reference(p, random.Random(i))
        ids = weights.encode(p.prompt) + sum([weights.tokenizer(x, add_special_tokens=False).input_ids for t in turns[:3] for x in (t.text, t.shown)], [])
        assert weights.encode(one_turn(p, turns, 3).prompt) == ids


def test_one_turn_is_written_and_judged(weights, tmp_path):
    t = run(weights, tmp_path, DeepTool(), updates=1)
    r = t.rollouts
    assert (r.extras["n_turns"] == 1).all() and torch.equal(r.policy_mask, r.completion_mask) and r.lengths.max() <= 16
    for i, (p, text) in enumerate(zip(r.problems, r.completions)):
        due = p.meta["turn"]
        turn = parse_turn(text) if r.stop[i] in (Stop.EOS, Stop.TOOL) else None
        assert r.rewards[i].item() == pytest.approx(process_reward(*T([judge_turn(turn, due["due"], due["final"], execute)]).T).item())
    assert {"valid_call", "right_1"} <= set(t.method.log) and all(0 <= v <= 1 for v in t.method.log.values())


def test_a_policy_that_writes_its_own_observation_earns_nothing(weights):
    p = one_turn(WORLD.problems(1)[0], [Turn("a+b", WORLD.problems(1)[0].meta["calls"][0])], 0)
    m = DeepTool(); m._world = WORLD
    call = f"<t>a+b</t><c>{p.meta['turn']['due']}</c>"
    assert m._judge(p, call, Stop.TOOL) == (1., 1., 1.) and m._judge(p, call, Stop.LENGTH) == m._judge(p, "<t>a</t><o>", Stop.CUT) == (0., 0., 0.)


def test_the_placebo_changes_owners_within_the_group():
    m = DeepTool(shuffle=True)
    torch.manual_seed(0)
    group = T([3, 3, 3, 7, 7, 7, 3, 7]); rewards = torch.arange(8.)
    shuffled = m._owners(rewards, group)
    assert not torch.equal(shuffled, rewards)
    for g in (3, 7): assert sorted(shuffled[group == g].tolist()) == sorted(rewards[group == g].tolist())
    assert torch.equal(DeepTool()._owners(rewards, group), rewards)


def test_corrupted_timeouts_are_the_same_for_the_same_rollout():
    p = WORLD.problems(1)[0]
    assert len({WORLD.respond(p.prompt, "<t>a+b</t><c>1+2</c>") for _ in range(5)}) == 1


# ---------------------------------------------------------------- training
@pytest.mark.parametrize("variant", ("prefixes", "episodes"))
def test_two_updates_are_finite_and_repeatable(weights, tmp_path, variant):
    a, b, c = (run(weights, tmp_path/str(i), DeepTool(variant=variant), seed=s) for i, s in enumerate((3, 3, 4)))
    assert torch.equal(flat(a), flat(b)) and flat(a).isfinite().all() and not torch.equal(flat(a), flat(c))
    assert a.n_sampled == b.n_sampled == sum(e["sampled_tokens"] for e in a.state.log_history if "sampled_tokens" in e and e["step"] == 2)


def test_composes_with_another_method(weights, tmp_path):
    class Half(Method):
        def rewards(self, rollouts, rewards): return rewards/2
    a, b = run(weights, tmp_path/"a", Compose(DeepTool(), Half())), run(weights, tmp_path/"b", DeepTool(weights=(.05, .05, .4)))
    torch.testing.assert_close(a.rollouts.rewards, b.rollouts.rewards)
    assert a.method[DeepTool].log


def test_state_and_settings(weights, tmp_path):
    m = DeepTool(weights=(.2, .2, .6))
    fresh = describe(m)
    run(weights, tmp_path, m)
    assert describe(m) == fresh != describe(DeepTool()) and set(fresh) >= {"name", "variant", "weights", "outcome_weight", "turn_tokens", "shuffle", "seed"}
    other = DeepTool(); other.load_state_dict(m.state_dict())              # it has none beyond its settings
    assert m.state_dict() == {}


@pytest.mark.parametrize("make,message", ((lambda: DeepTool(variant="turns"), "use 'prefixes', 'episodes' or 'outcome'"), (lambda: DeepTool(weights=(1., 2.)), "three numbers from 0"),
                                          (lambda: DeepTool(weights=(1., -1., 0.)), "three numbers from 0"), (lambda: DeepTool(variant="outcome", shuffle=True), "placebo of variant='prefixes'")))
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message): make()


def test_a_world_without_reference_is_refused(tmp_path):
    policy, chain = load_policy("chain-habits", device="cpu"), make_world("chain")
    with pytest.raises(ValueError, match="writes none: use a world with tool calls"): run(policy, tmp_path, DeepTool(), world=chain)
    with pytest.raises(ValueError, match=r"turn_rewards \(2, 3\)"): turn_advantages(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2), torch.zeros(2).long())


def test_turns_to_tokens():
    per_turn, turn, mask = T([[1., -2.]]), T([[0, 0, 0, 1, 1, 0]]), T([[1, 1, 0, 1, 1, 0]])
    assert turns_to_tokens(per_turn, turn, mask).tolist() == [[1., 1., 0., -2., -2., 0.]]
