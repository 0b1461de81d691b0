"The world prover: lemmas against a plain search, verdicts by hand, demonstrations, feedback and its dial, verifiers."
import importlib.util, itertools, random, re, shutil, sys
from types import SimpleNamespace

import pytest

from rlworkbench.policies import build_tokenizer, encode_prompt
from rlworkbench.worlds.base import Problem, World, make_world, split_of
from rlworkbench.worlds import prover
from rlworkbench.worlds.prover import (KNOWN, LEMMAS, MODULUS, PRODUCTS, SECRET, LeanVerifier, Prover, Replay, Verdict, apply, best_lemmas, distances,
                                       gives_away, last_open, lean_verdict, read_proof, write_feedback)

WORLD = Prover()
ALL = "".join(LEMMAS)


def theorem(start, goal): return WORLD.theorem(start, goal)


def replayed(start, goal, proof, limit=5):
    "The verdict, written a second time and otherwise."
    if not re.fullmatch(r"([A-H][0-6][0-9])*#", proof): return False
    state, n = start, 0
    for lemma, number in re.findall(r"([A-H])(\d\d)", proof):
        factor, shift = LEMMAS[lemma]
        state, n = (factor*state + shift) % 64, n + 1
        if f"{state:02d}" != number: return False
    return state == goal and n <= limit


# ---------------------------------------------------------------- lemmas
def test_lemmas_by_hand():
    assert [apply(l, 14) for l in "ABCDEFGH"] == [15, 19, 42, 7, 8, 34, 30, 9]   # 5·14+2 = 72, 7·14-4 = 94, 9·14+11 = 137
    assert apply("D", 3) == 60 and apply("A", 63) == 0
    for l in LEMMAS: assert len({apply(l, s) for s in range(MODULUS)}) == MODULUS   # a factor that is odd loses nothing


@pytest.mark.parametrize("lemmas", [KNOWN, ALL, "A", "CE"])
def test_distances_are_what_a_plain_forward_search_finds(lemmas):
    for start in range(0, 64, 7):
        found, edge = {start: 0}, [start]
        while edge: edge = [t for s in edge for l in lemmas if (t := apply(l, s)) not in found and not found.update({t: found[s] + 1})]
        for goal in range(64): assert distances(goal, lemmas)[start] == found.get(goal, 64)


def test_best_lemmas_open_a_shortest_proof_and_no_other_does():
    for start, goal in itertools.product(range(0, 64, 5), range(0, 64, 3)):
        best = best_lemmas(start, goal)
        if start == goal: assert best == ["#"]; continue
        for l in KNOWN: assert (l in best) == (distances(goal)[apply(l, start)] == distances(goal)[start] - 1)
        assert best


# ---------------------------------------------------------------- verdicts
def test_verdicts_agree_with_a_second_implementation():
    rng = random.Random(0)
    right = 0
    for i in range(4000):
        start, state, text = rng.randrange(64), None, ""
        state = start
        for _ in range(rng.randrange(7)):
            lemma = rng.choice(ALL); state = apply(lemma, state) if rng.random() < .93 else rng.randrange(70); text += f"{lemma}{state:02d}"; state %= 64
        text += rng.choice(["#", "#", "#", "", "##", "A"])
        goal = state if rng.random() < .8 else rng.randrange(64)
        verdict = WORLD.verify(theorem(start, goal), text)
        assert verdict == float(replayed(start, goal, text)), (start, goal, text)
        right += verdict
    assert 800 < right < 3000


@pytest.mark.parametrize("text,error", [
    ("C42A43#", ""), ("A15B20#", "ends at 20, not at 43"), ("C43#", "C makes 42 of 14, not 43"), ("C42A43", "unreadable or unfinished after step 2"),
    ("C42A43A44D37F57C43#", "more than 5 steps"), ("", "unreadable or unfinished after step 0"), ("#", "ends at 14, not at 43"),
    ("C42A43##", "unreadable or unfinished after step 2"), (" C42A43#", "unreadable or unfinished after step 0"), ("C42A43#\n", "unreadable or unfinished after step 2"),
    ("C٤٢A43#", "unreadable or unfinished after step 0"), ("C42A99#", "unreadable or unfinished after step 1"), (None, "no text"), (5, "no text")])
def test_verdicts_in_words(text, error):
    found = Replay().check(theorem(14, 43), text)
    assert found.right == (error == "") and found.error == error


def test_many_proofs_of_one_theorem_are_right_and_are_different_answers():
    t = theorem(14, 43)
    found = set()
    for path in itertools.product(KNOWN, repeat=4):
        state, text = 14, ""
        for l in path: state = apply(l, state); text += f"{l}{state:02d}"
        if state == 43: found.add(text + "#")
    assert len(found) > 10 and all(WORLD.verify(t, p) == 1 for p in found) and len({WORLD.answer(p) for p in found}) == len(found)


def test_steps_know_local_and_global():
    def seen(text): return [(s.correct, s.on_track, s.kind) for s in WORLD.steps(theorem(14, 43), text)]
    assert seen("C42A43#") == [(True, True, "product"), (True, True, "sum")]
    assert seen("C38B43#") == [(False, False, "product"), (True, False, "sum")]
    assert [s[1] for s in seen("A15A16A17A18A19#")] == [True, True, True, False, False]
    assert seen("H09")[0] == (True, True, "secret") and seen("?") == []
    text = "C42A43A44#"
    assert "".join(s.text for s in WORLD.steps(theorem(14, 43), text)) == text[:-1]


# ---------------------------------------------------------------- problems and demonstrations
def test_theorems_keep_their_distance_and_repeat():
    problems = WORLD.problems(100, seed=3)
    assert problems == WORLD.problems(200, seed=3)[:100] and problems != WORLD.problems(100, seed=4)
    for p in problems:
        assert 2 <= distances(p.meta["goal"])[p.meta["start"]] <= 3 and WORLD.verify(p, WORLD.demonstration(p, random.Random(0))) == 1 and split_of(p.prompt) == "train"
    assert {WORLD.difficulty(p) for p in make_world("prover", distance=(1, 1)).problems(20)} == {1.}


def test_demonstrations_tell_the_secret_lemma_only_where_it_was_named():
    demos = Prover(walks=True, hinted=.5, named=.3)
    n_named = 0
    for i in range(1500):
        p = demos.draw(random.Random(i)); text, hint = demos.demonstration(p, random.Random(0)), p.meta["hint"]
        assert demos.verify(p, text) == 1.                              # without slips every walk is a proof
        assert split_of(p.meta["bare"]) == "train"
        if hint is None: assert SECRET not in text; continue
        n_named += hint.endswith(SECRET)
        states = [p.meta["start"]] + [s for _, s in read_proof(text)[0]]
        if hint.endswith(SECRET): assert text.count(SECRET) == 1 and any(f"{s:02d}{l}" == hint for s, l in zip(states, p.meta["lemmas"]))
        else: assert SECRET not in text
    assert 100 < n_named < 250                                          # half of them, of these 70 %, of these 30 %


def test_slips_are_in_products_alone_and_never_before_the_place_that_a_hint_names():
    demos = Prover(walks=True, hinted=.5, slip=.5)
    wrong = {True: 0, False: 0}
    for i in range(800):
        p = demos.draw(random.Random(i)); text = demos.demonstration(p, random.Random(0))
        steps = demos.steps(p, text)
        assert all(s.correct for s in steps if s.kind != "product")
        hint = p.meta["hint"]
        if hint is None: wrong[False] += any(not s.correct for s in steps); continue
        wrong[True] += any(not s.correct for s in steps)
        if hint == "ok" or hint.endswith("#"): assert demos.verify(p, text) == 1
        else:
            states, first = [p.meta["start"]] + [s for _, s in read_proof(text)[0]], next((k for k, s in enumerate(steps) if not s.correct), 9)
            assert any(f"{s:02d}" == hint[:2] and k <= first for k, s in enumerate(states))
    assert wrong[True] > 50 and wrong[False] > 100


def test_every_prompt_and_demonstration_is_in_the_vocabulary():
    tokenizer, demos = build_tokenizer(WORLD.vocab, "prover"), Prover(walks=True, hinted=.7, slip=.3)
    for i in range(300):
        p = demos.draw(random.Random(i)); text = demos.demonstration(p, random.Random(0))
        ids = encode_prompt(tokenizer, p.prompt)
        assert tokenizer.decode(ids[1:]) == p.prompt and 5 <= len(ids) <= 9
        assert len(encode_prompt(tokenizer, text)) - 1 == 2*len(p.meta["lemmas"]) + 1 <= 11
    assert len(encode_prompt(tokenizer, "14=>37|H:14C|:")) == len(["<bos>", "14", "=>", "37", "|H:", "14", "C", "|", ":"])


# ---------------------------------------------------------------- feedback
def said(proof, quality="hint", start=14, goal=43, right=False, **kw): return {write_feedback(start, goal, proof, right, random.Random(i), quality, **kw) for i in range(200)}


@pytest.mark.parametrize("proof,place", [("C43#", (14, 0)), ("", (14, 0)), ("C42A43#", (43, 2)), ("C42B47B52#", (52, 3)), ("A15A16A17A18A19#", (17, 3)), ("C42A44#", (42, 1)), ("?", (14, 0))])
def test_the_place_of_a_mistake(proof, place): assert last_open(14, 43, proof) == place


def test_feedback_names_every_best_lemma_and_no_other():
    for start, goal, proof in ((14, 37, ""), (14, 43, "C43#"), (14, 43, "C42B47B52#"), (7, 50, "A08")):
        state, _ = last_open(start, goal, proof)
        assert said(proof, start=start, goal=goal) == {f"{state:02d}{l}" for l in best_lemmas(state, goal)}
        assert said(proof, "wrong", start=start, goal=goal) == {f"{state:02d}{l}" for l in KNOWN if l not in best_lemmas(state, goal)}
    assert said("C43#", "location") == {"14"} and said("C43#", "none") == {None} and said("C42A43#", right=True) == {"ok"} and said("C42A43") == {"43#"}
    assert said("", "wrong", start=2, goal=28) == {"02#"}               # all seven open a shortest proof


def test_following_the_hints_always_ends_in_a_proof():
    rng = random.Random(5)
    for p in WORLD.problems(40, seed=9):
        text = ""
        for _ in range(6):
            hint = WORLD.feedback(p, text, False, rng)
            if hint.endswith("#"): text += "#"; break
            state = int(hint[:2]); text += f"{hint[2]}{apply(hint[2], state):02d}"
        assert WORLD.verify(p, text) == 1


def test_knowledge_mode_names_the_secret_lemma():
    told = Prover(lemmas=ALL)
    assert told.feedback(theorem(14, 9), "", False, random.Random(0)) == "14H" and told.verify(theorem(14, 9), "H09#") == 1
    assert not any("H" in WORLD.feedback(p, "", False, random.Random(i)) for i, p in enumerate(WORLD.problems(100)))


def test_teacher_prompts_and_what_gives_the_answer_away():
    p = theorem(14, 43)
    assert WORLD.teacher_prompt(p, "14C") == "14=>43|H:14C|:" and WORLD.teacher_prompt(WORLD.theorem(14, 43, "42A"), "14C") == "14=>43|H:14C|:"
    assert [WORLD.gives_away(p, f) for f in ("42A", "43#", "14C", "42", "ok", None)] == [True, True, False, False, False, False]


def test_feedback_draws_from_its_own_generator_alone():
    random.seed(0); first = random.random(); random.seed(0)
    WORLD.feedback(theorem(14, 37), "", False, random.Random(3)); WORLD.problems(5)
    assert random.random() == first


# ---------------------------------------------------------------- Lean behind the same interface
@pytest.mark.skipif(importlib.util.find_spec("lean_interact") is not None, reason="lean-interact is installed")
def test_without_the_package_lean_is_refused_with_what_to_install():
    with pytest.raises(RuntimeError, match="needs the package lean-interact, which is not installed: pip install lean-interact"): LeanVerifier()


def test_without_the_toolchain_lean_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lean_interact", SimpleNamespace())
    monkeypatch.setattr(prover.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="finds no `lake` on the PATH: install elan"): LeanVerifier()


@pytest.mark.parametrize("messages,right,error", [
    ([("info", "'t' does not depend on any axioms")], True, ""), ([("info", "'t' depends on axioms: [propext,\n Quot.sound]")], True, ""),
    ([("warning", "declaration uses 'sorry'"), ("info", "'t' depends on axioms: [sorryAx]")], False, "rests on sorryAx"),
    ([("error", "unsolved goals"), ("info", "'t' does not depend on any axioms")], False, "unsolved goals"),
    ([("info", "'t' depends on axioms: [propext, mine]")], False, "rests on mine"), ([], False, "Lean did not say which axioms the proof rests on")])
def test_what_lean_says_becomes_a_verdict(messages, right, error): assert lean_verdict(messages) == Verdict(right, error)


@pytest.mark.skipif(importlib.util.find_spec("lean_interact") is None or shutil.which("lake") is None, reason="needs lean-interact and a Lean 4 toolchain")
def test_lean_judges_small_theorems():
    lean = LeanVerifier()
    t = Problem("", "", dict(statement="theorem t : 1 + 1 = 2"))
    assert lean.check(t, "rfl").right and not lean.check(t, "sorry").right and not lean.check(t, "exact foo").right


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("dials,words", [(dict(distance=(0, 3)), r"distance=\(0, 3\)"), (dict(distance=(3, 2)), r"distance=\(3, 2\)"), (dict(limit=2), "limit=2"), (dict(hinted=1.5), "hinted=1.5"),
                                         (dict(slip=-1), "slip=-1"), (dict(lemmas=""), "lemmas=''"), (dict(lemmas="AZ"), "lemmas='AZ'")])
def test_dials_out_of_range_are_refused_by_name(dials, words):
    with pytest.raises(ValueError, match=words): Prover(**dials)


def test_styles_and_qualities_are_refused_by_name():
    with pytest.raises(ValueError, match="clean, habits"): WORLD.demonstration(theorem(14, 43), random.Random(0), "rude")
    with pytest.raises(ValueError, match="set slip=0"): Prover(slip=.2).demonstration(theorem(14, 43), random.Random(0), "clean")
    with pytest.raises(ValueError, match="quality='vague': use one of none, location, hint, wrong"): write_feedback(14, 43, "", False, random.Random(0), "vague")
    with pytest.raises(ValueError, match="no dial 'depth'"): make_world("prover", depth=2)
    assert isinstance(make_world("prover", slip=.3), World) and make_world("prover", slip=.3).dials["slip"] == .3
