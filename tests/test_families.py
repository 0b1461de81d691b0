"The world families: damage that shows, levels that count, habits that slip as often as they should."
import random
from collections import Counter
import pytest
from rlworkbench.policies import load_policy
from rlworkbench.experiment import evaluate
from rlworkbench.worlds.base import make_world, split_of
from rlworkbench.worlds.families import DAMAGE, FAMILIES, LINES, WHOLE, Families, damaged

WORLD = Families()


def recount(prompt):
    "The right last digit, from the prompt alone."
    if prompt[0] == "^": return str(max(map(int, prompt[1:-1])))
    value = None
    for sign in "+-*":
        if sign in prompt:
            for d in map(int, prompt[:-1].split(sign)): value = d if value is None else dict([("+", value + d), ("-", value - d), ("*", value*d)])[sign] % 10
    return str(value)


def test_prompts_and_answers_agree_with_a_plain_recount():
    for p in WORLD.problems(400):
        if p.meta["damage"]:
            assert p.answer == "" and not WHOLE.fullmatch(p.prompt) and p.meta["damage"] in DAMAGE
            assert not any(WORLD.verify(p, t) for t in ("[11[22", f">{p.meta['values'][-1]}", ""))
        else:
            assert p.answer == recount(p.prompt) and len(p.meta["operands"]) == p.meta["level"] + 1 and len(p.meta["values"]) == p.meta["level"] + 2
            text = WORLD.demonstration(p, random.Random(0))
            assert WORLD.verify(p, text) == 1 and LINES.fullmatch(text) and all(s.correct and s.on_track for s in WORLD.steps(p, text))


def test_share_kinds_and_split_of_damage():
    pool = WORLD.problems(3000)
    kinds = Counter(p.meta["damage"] for p in pool)
    assert .13 < 1 - kinds[""]/3000 < .17 and all(110 < kinds[k] < 195 for k in DAMAGE)
    assert {split_of(p.text) for p in pool} == {"train"}
    tests = WORLD.problems(320, split="test")
    assert {split_of(p.text) for p in tests} == {"test"} and not any(p.meta["damage"] for p in tests)
    assert set(Counter((p.meta["family"], p.meta["level"]) for p in tests).values()) == {20}
    assert WORLD.problems(10, split="test") == tests[:10] and WORLD.problems(10) == pool[:10]
    assert WORLD.problems(10, split="test") == Families(corrupt=0.).problems(10, split="test")


def test_damage_never_leaves_a_readable_prompt():
    rng = random.Random(1)
    for p in Families(corrupt=0.).problems(200):
        for kind in DAMAGE:
            text = damaged(p.prompt, kind, rng)
            assert not WHOLE.fullmatch(text)
            if kind == "shuffled": assert sorted(text) == sorted(p.prompt)
            if kind == "foreign": assert len(text) == len(p.prompt) and sum(c in "$%&@" for c in text) == 2
            assert set(text) <= set(WORLD.vocab)


@pytest.mark.parametrize("level,slip", ((1, .2), (4, .75)))
def test_quick_steps_slip_at_their_rate(level, slip):
    world, rng = Families(corrupt=0., levels=(level,)), random.Random(2)
    steps = [s for p in world.problems(400) for s in world.steps(p, world.demonstration(p, rng, "habits"))]
    quick = [s.correct for s in steps if s.kind == "quick"]
    assert abs(len(quick)/len(steps) - .5) < .05 and abs(1 - sum(quick)/len(quick) - slip) < .06
    assert all(s.correct for s in steps if s.kind == "careful")


@pytest.mark.parametrize("text", ("", "[", "[1", ">", "5", "[12>", "x", "[12 >3", None, "[12\n"))
def test_what_is_no_trace_is_wrong(text):
    p = Families(corrupt=0.).problems(1)[0]
    assert WORLD.verify(p, text) == 0 and WORLD.answer(text) is None
    if text is not None: WORLD.steps(p, text)


def test_steps_beyond_the_last_are_wrong():
    p = Families(corrupt=0., families=("add",), levels=(1,)).problems(1)[0]
    text = WORLD.demonstration(p, random.Random(0)) + ">3"
    last = WORLD.steps(p, text)[-1]
    assert not last.correct and not last.on_track


@pytest.mark.parametrize("dials,message", ((dict(families=("div",)), "'div' is unknown"), (dict(levels=(5,)), "levels from 1 to 4"), (dict(corrupt=1.5), "corrupt=1.5"), (dict(slip=(.1,)), "four levels"), (dict(families=()), "at least one")))
def test_dials_out_of_range_are_refused(dials, message):
    with pytest.raises(ValueError, match=message): Families(**dials)


def test_a_broken_prompt_has_no_demonstration():
    broken = Families(corrupt=1.).problems(1)[0]
    with pytest.raises(ValueError, match="set corrupt=0"): WORLD.demonstration(broken, random.Random(0))
    with pytest.raises(ValueError, match="style='fast'"): WORLD.demonstration(WORLD.problems(1, split="test")[0], random.Random(0), "fast")


def test_dials_come_and_go_by_name():
    world = make_world("families", corrupt=.3, levels=(2, 3))
    assert world.corrupt == .3 and {p.meta["level"] for p in world.problems(60)} == {2, 3}
    assert world.with_dials(corrupt=0.).corrupt == 0. and {world.difficulty(p) for p in world.problems(60)} == {2., 3.}


@pytest.mark.parametrize("name,low,high", (("families-habits", .30, .44), ("families-habits-small", .33, .47)))
def test_shipped_policies_meet_their_gate(name, low, high):
    policy = load_policy(name, device="cpu")
    tests = WORLD.problems(128, split="test")
    e = evaluate(policy, WORLD, tests, samples=8, max_completion_length=16)
    by_level = [e.per_problem[[i for i, p in enumerate(tests) if p.meta["level"] == l]].mean() for l in (1, 2, 3, 4)]
    assert low < e.accuracy < high and e.mixed_frac > .7
    assert by_level[0] > .5 and by_level[3] < .3 and by_level[0] > by_level[1] > by_level[2] > by_level[3]
    kinds = [s for i, t in enumerate(e.completions) for s in WORLD.steps(tests[i//8], t)]
    careful = [s.correct for s in kinds if s.kind == "careful"]
    assert .4 < len(careful)/len(kinds) < .6 and sum(careful)/len(careful) > .93      # the better habit is there, and it is better
