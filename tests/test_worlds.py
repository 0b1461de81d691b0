"Worlds: chain against a plain retelling, reasoning-gym's whole registry, seeds and splits."
import json, os, random, subprocess, sys, time, warnings
import numpy as np
import pytest, torch
from rlworkbench.worlds.base import Problem, make_world
from rlworkbench.worlds.chain import Chain
from rlworkbench.worlds.gym import Gym, gym_names
from rlworkbench.worlds.hub import Hub
from rlworkbench.worlds.worker import Worker

NAMES = [n for n in gym_names() if n != "composite"] # composite is a mix of others and needs to be told which
NO_GOLD = {"boxnet", "rush_hour"}                    # many right answers, and the library keeps no example


def plain_trace(rng, steps, careful, slip, mod=97):
    "The two habits retold without the package: prompt and demonstration, drawn in the same order."
    start, ops = rng.randrange(mod), [(rng.choice("+-"), rng.randrange(1, 10)) for _ in range(steps)]
    value, trace = start, ""
    for sign, d in ops:
        right = (value + (d if sign == "+" else -d)) % mod
        if rng.random() < careful: trace, value = trace + f"[{value:02d}{sign}{d}:{right:02d};", right
        else:
            value = rng.choice([v for v in range(mod) if v != right]) if rng.random() < slip else right
            trace += f">{value:02d};"
    return f"{start:02d}" + "".join(f"{s}{d}" for s, d in ops) + "=", trace + f"#{value:02d}"


@pytest.mark.parametrize("steps,slip", [(1, 0.), (6, .3), (8, 1.)])
def test_chain_text_is_the_plain_trace(steps, slip):
    a, b, world = random.Random(steps), random.Random(steps), Chain(steps, slip=slip)
    for _ in range(100):
        p = world.problem(b)
        assert (p.prompt, world.demonstration(p, b, "habits")) == plain_trace(a, steps, .5, slip)


def test_chain_oracle_agrees_with_the_verifier():
    "Where the last step is on track, the answer of a demonstration is right, and only there; clean traces have no wrong step."
    world = Chain((1, 8), slip=.4)
    for i, p in enumerate(world.problems(300)):
        for style in world.styles:
            text = world.demonstration(p, random.Random(i), style)
            steps = world.steps(p, text)
            assert steps[-1].on_track == (world.verify(p, text) == 1.)
            assert all(s.text == text[s.start:s.end] for s in steps)
            if style == "clean": assert all(s.correct and s.on_track for s in steps)
            if style == "habits": # exactly the slips are wrong, whatever came before
                carried = p.meta["values"][0]
                for s, op in zip(steps, p.meta["ops"]):
                    due = world.apply(carried, op[0], int(op[1])); carried = int(s.text[-3:-1])
                    assert s.correct == (carried == due)


def test_chain_never_raises():
    world, rng = Chain(3), random.Random(0)
    p = world.problem(rng)
    for _ in range(3000):
        text = "".join(rng.choices(world.vocab, k=rng.randrange(30)))
        assert world.verify(p, text) in (0., 1.)
        assert all(a.end <= b.start for a, b in zip(world.steps(p, text), world.steps(p, text)[1:]))
    start = time.time()
    for text in ("[" * 20000, ">17;" * 20000, "!" * 20000, "12+" * 20000): world.steps(p, text), world.verify(p, text)
    assert time.time() - start < 5


def test_unknown_world_and_dial():
    with pytest.raises(ValueError, match="known worlds: chain; gym:NAME.*hub:NAME"): make_world("chess")
    with pytest.raises(ValueError, match="no dial 'size'; its dials: min_terms"): make_world("gym:chain_sum", size=3)
    with pytest.raises(ValueError, match="no dial 'slips'"): make_world("chain", slips=.3)


def test_v13_rounded_gold():
    world = Gym("number_sorting", max_decimals=3)
    numbers = ["3.14", "-2.75", "3.1", "3.145"]
    gold = ["-2.75", "3.1", "3.14", "3.145"]
    entry = dict(question="Sort these numbers in ascending order: " + ", ".join(numbers), answer=str(gold),
                 metadata=dict(original_numbers=numbers, direction="ascending", sorted_numbers=gold))
    assert world.verify(Problem(entry["question"], entry["answer"], dict(entry=entry)), str(gold)) == 1.
    assert world.verify(Problem(entry["question"], entry["answer"], dict(entry=entry)), str(gold[::-1])) < 1.
    for k in range(500):
        e = world.entry(k)
        printed = e["question"].split("order: ")[1].split("\n")[0].split(", ")
        assert sorted(printed) == sorted(eval(e["answer"])), e


JUNK = "".join(random.Random(1).choices([chr(c) for c in range(32, 127)], k=10_000))

def test_v14_malformed_answers():
    "For every task in the registry: a score from 0 to 1 without an exception, within a second, and 1.0 for the gold."
    slow, wrong = [], []
    Gym("chain_sum").score("1", Gym("chain_sum").entry(0)) # the worker's start is no part of a score
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in NAMES:
            world = Gym(name)
            p = world.make(world.entry(5))
            for text in (None, "", "[1,", "{'x': 1}", JUNK, p.answer):
                start = time.time()
                score = world.verify(p, text)
                if time.time() - start > 1: slow.append((name, str(text)[:8], round(time.time() - start, 2)))
                assert type(score) is float and 0 <= score <= 1, (name, text)
            if name in NO_GOLD: assert p.answer == ""
            elif score != 1.: wrong.append((name, p.answer, score))
    assert wrong == []
    assert len(slow) <= 2, slow # a busy machine may stall a call; a slow scorer would stall the same one for each text


def test_v14_runaway_answers_end():
    "Scorers that evaluate the policy's text meet a tower of powers, and the next answer is scored as ever."
    for name in ("countdown", "simple_integration"):
        world = Gym(name)
        p = world.make(world.entry(1))
        start = time.time()
        assert world.verify(p, "9**9**9**9") < 1
        assert world.verify(p, p.answer) == 1.
        assert time.time() - start < 15


def test_v15_partial_credit():
    "Partial scores are handed on as they are, and only 1.0 counts as right."
    from rlworkbench.stats import correct_count
    scores = [.01, .05, .125, .4, 1.]
    assert correct_count(scores) == 1
    assert np.mean(scores) == pytest.approx(.317)
    world = Gym("chain_sum")
    p = world.problem(random.Random(0))
    got = [world.verify(p, t) for t in (p.answer, f"it is {p.answer}!")]
    assert got[0] == 1. and 0 < got[1] < 1 and correct_count(got) == 1


def draws(): return [random.random(), *np.random.rand(1).tolist(), torch.rand(1).item()]

@pytest.mark.parametrize("name", ["chain", "gym:chain_sum", "gym:pool_matrix"]) # the last one reseeds numpy inside the library
def test_v16_global_generators(name):
    def seeded(): random.seed(1); np.random.seed(1); torch.manual_seed(1)
    seeded(); want = [draws() for _ in range(3)]
    seeded(); got = [draws()]
    make_world(name).problems(100, seed=7); got += [draws(), draws()]
    assert got == want


BUILD = """
import json, sys, warnings; warnings.simplefilter("ignore")
from rlworkbench.worlds.base import make_world
from rlworkbench.worlds.gym import Gym
out = {n: [(p.prompt, p.answer) for p in make_world(n).problems(int(sys.argv[1]), seed=7, split=s)] for n in ("chain", "gym:chain_sum", "gym:gsm_symbolic") for s in ("train", "test")}
out.update({n: (lambda e: [e["question"], str(e["answer"])])(Gym(n).entry(11)) for n in json.loads(sys.argv[2])[::1 if sys.argv[1] == "10" else -1]}) # in another order too
print(json.dumps(out))
"""

def test_v16_two_processes():
    "Same items with other hash seeds and other sizes; for one item, over the whole registry."
    def build(n, hash_seed):
        run = subprocess.run([sys.executable, "-c", BUILD, str(n), json.dumps(NAMES)], env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])
    ten, hundred = build(10, "1"), build(100, "2")
    for name in ("chain", "gym:chain_sum", "gym:gsm_symbolic"): assert ten[name] == hundred[name][:10]
    assert [n for n in NAMES if ten[n] != hundred[n]] == []


@pytest.mark.parametrize("name", ["chain", "gym:chain_sum"])
def test_v16_splits_share_no_question(name):
    world = make_world(name)
    train, test = ({p.text for p in world.problems(1000, seed=s, split=split)} for s, split in ((0, "train"), (5, "test")))
    assert train & test == set()
    assert len(train) > 950 and len(test) > 950


def test_v8_hub_reports_unreadable_golds_once():
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)] + [{"prompt": "see?", "answer": "see figure"}, {"prompt": "none?", "answer": None}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always"); world = Hub(rows)
    assert len(caught) == 1 and "2 answers cannot be read" in str(caught[0].message) and "all[20], all[21]" in str(caught[0].message)
    for p in (p for ps in world.rows.values() for p in ps):
        verdicts = [world.verify(p, t) for t in ("see figure", "7", r"\boxed{x}", "")]
        assert (verdicts == [None]*4) == (p.answer in ("see figure", "")), p


def test_hub_without_prompt_column():
    with pytest.raises(ValueError, match="set prompt= to one of its columns: question, answer"): Hub([{"question": "1+1", "answer": "2"}])
    with pytest.raises(ValueError, match="neither a readable folder"): Hub("./no/such/folder/of/data")


def test_worlds_import_is_light():
    "The ground floor loads no data set library, no grader and no model library."
    code = ("import sys, rlworkbench.worlds.base, rlworkbench.worlds.chain, rlworkbench.worlds.gym, rlworkbench.worlds.hub, rlworkbench.worlds.judge;"
            "print([m for m in ('transformers', 'trl', 'datasets', 'reasoning_gym', 'math_verify', 'sympy', 'torch') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_worker_dies_with_its_parent():
    code = ("import os; from rlworkbench.worlds.worker import Worker; w = Worker('builtins:pow'); w(2, 3); print(w.process.pid, flush=True); os._exit(1)")
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    for _ in range(100):
        try: state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        except FileNotFoundError: return
        if state == "Z": return # ended; only its entry is left to be collected
        time.sleep(.1)
    raise AssertionError("the worker outlived its parent by 10 s")
