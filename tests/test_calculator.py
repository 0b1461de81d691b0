"The world with a tool: problems, formats, failures that repeat, demonstrations that leave mistakes out; its shipped policies meet their gates."
import random
import pytest, torch
from rlworkbench.experiment import evaluate, start_gate
from rlworkbench.policies import RECIPES, build_tokenizer, load_policy, token_ids
from rlworkbench.worlds.base import make_world
from rlworkbench.worlds.calculator import Calculator, execute, parse_turn, split_turns

WORLD = make_world("calculator")


def text_of(turns): return "".join(t.text + t.shown for t in turns)


@pytest.mark.parametrize("ops", (1, 2, 3, 4, 6))
def test_answers_are_those_of_the_brackets(ops):
    shapes = set()
    for p in make_world("calculator", ops=ops).problems(200):
        assert str(eval(p.prompt[:-1])) == p.answer and 0 <= int(p.answer) <= 99 and len(p.meta["calls"]) == ops
        assert all(0 <= eval(c) <= 99 for c in p.meta["calls"])
        shapes.add(tuple(p.meta["order"]))
    assert len(shapes) >= {1: 1, 2: 2, 3: 5, 4: 14, 6: 60}[ops]             # Catalan numbers: every shape of brackets; 132 of six


def test_tool():
    for a in range(100):
        for b in (0, 1, 9, 10, 99):
            for op in "+-*":
                value = eval(f"{a}{op}{b}")
                assert execute(f"{a}{op}{b}") == (str(value) if 0 <= value <= 99 else "ERR range")
    for odd in ("", "5", "5*", "*5", "5**3", "5/3", "1+2+3", " 5*3", "5*3 ", "100+1", "x*2", "5*3\n", "٣*2"): assert execute(odd) == "ERR syntax"


def test_formats():
    good = {"<t>b*c</t><c>5*3</c>": ("b*c", "5*3", False), "<t></t><a>7</a>": ("", "7", True), "<t>hm</t><c>!!</c>": ("hm", "!!", False)}
    for text, (thought, action, final) in good.items():
        t = parse_turn(text)
        assert (t.thought, t.action, t.final, t.text) == (thought, action, final, text)
    for text in ("", "<t>b</t>", "<c>1+1</c>", "<t>b</t><c></c>", "<t>b</t><c>1+1</c><a>2</a>", "<t><t>b</t><c>1+1</c>", "x<t>b</t><c>1+1</c>", "<t>b</t><c>1<o>1</c>", "<t>b</t><c>1+1</c>\n"): assert parse_turn(text) is None
    assert parse_turn("<c>1+1</c>", think=False).thought is None


def test_never_raises():
    rng, p = random.Random(0), WORLD.problems(1)[0]
    for _ in range(2000):
        text = "".join(rng.choices(WORLD.vocab, k=rng.randrange(25)))
        assert WORLD.verify(p, text) in (0., 1.) and isinstance(WORLD.respond(p.prompt, text + "</c>"), str)
        for s in WORLD.steps(p, text): assert text[s.start:s.end] == s.text
        split_turns(text)
    assert WORLD.verify(p, None) == 0. and WORLD.answer(f"<a>{p.answer}</a> ") is None


def test_failures_repeat_and_come_as_often_as_asked():
    failing = make_world("calculator", fail=.2)
    texts = [(p.prompt, f"<t>a+b</t><c>{i % 9}+2</c>") for i, p in enumerate(WORLD.problems(3000))]
    fates = [failing.respond(*x) for x in texts]
    assert fates == [failing.respond(*x) for x in texts] and .18 < sum(f == "<o>ERR timeout</o>" for f in fates)/3000 < .22
    assert fates != [make_world("calculator", fail=.2, seed=1).respond(*x) for x in texts]
    assert {WORLD.respond(*x) for x in texts} & {"<o>ERR timeout</o>"} == set()
    assert all(make_world("calculator", fail=1.).fails(*x) for x in texts[:100])
    longer = [failing.fails(p, "<t>a+b</t><c>1+2</c><o>ERR timeout</o>" + t) for p, t in texts]
    assert longer != [f == "<o>ERR timeout</o>" for f in fates]            # a repeated call has another fate


@pytest.mark.parametrize("think", (True, False))
@pytest.mark.parametrize("style", ("reference", "habits"))
def test_demonstrations_are_rollouts_of_this_world(style, think):
    "Parsed turn by turn; the observation is what the world would say, an injected time-out aside; the lossless tokenizer gives the text back."
    world = make_world("calculator", think=think, perturb=.3)
    tok, right = build_tokenizer(world.vocab, "c"), 0
    for i, p in enumerate(world.problems(200)):
        pieces = world.demonstration(p, random.Random(i), style)
        text = "".join(t for t, _ in pieces)
        turns = split_turns(text)
        assert all(not isinstance(t, str) and (t.thought is not None) == think for t in turns) and turns[-1].final and not any(t.final for t in turns[:-1])
        assert all(t.observation in (execute(t.action), "ERR timeout") for t in turns[:-1])
        assert tok.decode(token_ids(tok, text)) == text and len(token_ids(tok, text)) <= 96
        assert all(not trained for t, trained in pieces if t.startswith("<o>")) and all(trained for t, trained in pieces if "<a>" in t)
        right += world.verify(p, text)
    assert right == 200 if style == "reference" else 80 < right < 150


def test_a_turn_is_short():
    tok = build_tokenizer(WORLD.vocab, "c")
    for i, p in enumerate(WORLD.problems(100)):
        for t in WORLD.reference(p, random.Random(i)): assert len(token_ids(tok, t.text)) <= 14
    assert len(set(WORLD.vocab)) == len(WORLD.vocab)


def test_a_reflex_reads_from_left_to_right():
    world = make_world("calculator", careful=0., perturb=0.)
    for i, p in enumerate(world.problems(100)):
        turns = world._turns(p, random.Random(i), 0.)
        first = f"{p.meta['values'][0]}{p.meta['ops'][0]}{p.meta['values'][1]}"
        assert turns[0].action == first and all(t.thought == "hm" for t in turns[:-1])
        assert world.verify(p, text_of(turns)) == 1. or p.meta["order"] != [0, 1, 2] or any(t.failed for t in turns)


@pytest.mark.parametrize("dials,message", ((dict(ops=0), "ops=0"), (dict(ops=7), "ops=7"), (dict(fail=1.5), "fail=1.5"), (dict(at_most=-1), "at_most=-1")))
def test_refused(dials, message):
    with pytest.raises(ValueError, match=message): make_world("calculator", **dials)


@pytest.mark.parametrize("name,think,low,high", (("calc-habits", True, .15, .5), ("calc-quiet", False, .05, .5), ("calc-unperturbed", True, .1, .5)))
def test_shipped_policies_meet_the_start_gate(name, think, low, high):
    world = make_world("calculator", think=think, fail=.2)
    policy = load_policy(name, device="cpu")
    found = evaluate(policy, world, world.problems(64, split="test"), samples=8)
    assert policy.n_params <= 350_000 and policy.recipe == RECIPES[name]
    assert low < found.accuracy < high and all(g.passed for g in start_gate(found, low=low, mixed=.25)), found
    assert evaluate(policy, world, world.problems(8, split="test"), samples=2).completions == evaluate(policy, world, world.problems(8, split="test"), samples=2).completions


def test_a_thinking_budget_of_the_world_holds_in_evaluation():
    world = make_world("calculator", think_budget=1)
    policy = load_policy("calc-habits", device="cpu")
    found = evaluate(policy, world, world.problems(16, split="test"), samples=2)
    thoughts = [t.thought for text in found.completions for t in split_turns(text) if not isinstance(t, str)]
    assert thoughts and all(len(token_ids(policy.tokenizer, z)) <= 1 for z in thoughts)
