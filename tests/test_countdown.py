"The world countdown: every question against brute force, flat routes, words that are independent of what works, a verifier that never raises."
import itertools, random
from collections import Counter
import pytest
from rlworkbench.policies import build_tokenizer
from rlworkbench.worlds.base import make_world
from rlworkbench.worlds.countdown import FREQUENCIES, LIMIT, ROUTES, Countdown, first_move, questions, second_moves, working_routes

WORLD = Countdown()


def reachable(numbers, pair, op):
    "The targets of one route, retold without the package."
    do = {"+": lambda x, y: x + y, "-": lambda x, y: max(x, y) - min(x, y), "*": lambda x, y: x*y}
    rest = list(numbers)
    x, y = rest[pair[0]], rest[pair[1]]
    left = next(v for i, v in enumerate(rest) if i not in pair)
    return {do[second](do[op](x, y), left) for second in do}


def test_working_routes_agree_with_brute_force():
    pairs = ((0, 1), (0, 2), (1, 2))
    for numbers in itertools.combinations(range(1, 13), 3):
        for target in (1, 7, 24, 31, 60, 100, 144):
            expected = tuple(w for w, (p, op) in ROUTES.items() if target in reachable(numbers, pairs[p], op))
            assert working_routes(numbers, target) == expected


def test_a_wrong_first_word_is_beyond_repair():
    "Of all 24 traces of a question exactly those of its working words can be right."
    for p in WORLD.problems(200, seed=1):
        right = {w for w in ROUTES for op in "+-*" if WORLD.verify(p, WORLD.trace(p, w, op)) == 1.}
        assert right == set(p.meta["works"]) and 1 <= len(right) <= 2


def test_every_route_works_equally_often():
    problems = WORLD.problems(4000, seed=2)
    rates = [sum(w in p.meta["works"] for p in problems)/4000 for w in ROUTES]
    # standard error .006; the split by checksum adds some
    assert max(rates) - min(rates) < .045, rates


@pytest.mark.parametrize("style", ("clean", "habits"))
def test_words_follow_their_frequencies_whatever_works(style):
    rng, problems = random.Random(0), WORLD.problems(4000, seed=3)
    drawn = [(p, WORLD.word(WORLD.demonstration(p, rng, style))) for p in problems]
    for w, f in zip(ROUTES, FREQUENCIES):
        assert abs(sum(d == w for _, d in drawn)/4000 - f) < 4*(f*(1 - f)/4000)**.5
    suited = sum(d in p.meta["works"] for p, d in drawn)/4000
    mean = sum(len(p.meta["works"]) for p in problems)/4000/len(ROUTES)
    assert abs(suited - mean) < .03, (suited, mean)


def test_slips_are_the_second_operation_and_nothing_else():
    rng, slips, n = random.Random(1), 0, 0
    for p in WORLD.problems(2000, seed=4):
        text = WORLD.demonstration(p, rng, "habits")
        first, second = WORLD.steps(p, text)
        assert first.correct and second.correct and first.text == text[first.start:first.end]
        assert first.on_track == (WORLD.word(text) in p.meta["works"])
        if first.on_track and len(second_moves(*first_move(p.meta["numbers"], WORLD.word(text))[3:])) > 1:
            n += 1; slips += not second.on_track
    assert n > 200 and abs(slips/n - .3) < .08
    suited = WORLD.with_dials(suited=1.)
    assert all(suited.verify(p, suited.demonstration(p, rng, "clean")) == 1. for p in WORLD.problems(300, seed=5))


def test_never_raises_and_only_0_or_1():
    rng, p = random.Random(0), WORLD.problems(1)[0]
    for _ in range(2000):
        assert WORLD.verify(p, "".join(rng.choices(WORLD.vocab, k=rng.randrange(16)))) in (0., 1.)
    for odd in (None, 3, "", "To", "To²*7=14,14+1=15", "To1*1=1,1+1=2\n"): assert WORLD.verify(p, odd) == 0. and WORLD.steps(p, odd) == []


def test_each_piece_of_a_trace_is_one_token():
    tokenizer = build_tokenizer(WORLD.vocab, "countdown")
    for p in WORLD.problems(100):
        text = WORLD.demonstration(p, random.Random(0), "habits")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == 12 and tokenizer.decode(ids) == text and tokenizer.decode(ids[:1]) == WORLD.word(text)
        assert len(tokenizer(p.prompt).input_ids) == 9


def test_questions_of_a_split_stay_in_it_and_numbers_in_range():
    train, test = ({p.prompt for p in WORLD.problems(1500, split=s)} for s in ("train", "test"))
    assert not train & test
    assert all(0 < q[1] <= LIMIT and q[1] not in q[0] for qs in questions(12, 1, 2).values() for q in qs)
    assert Counter(len(p.meta["works"]) for p in make_world("countdown", works=3, largest=12).problems(50)) == {3: 50}


@pytest.mark.parametrize("dials,message", ((dict(works=0), "works=0"), (dict(works=(2, 9)), "works=(2, 9)"), (dict(largest=3), "largest=3"), (dict(slip=-1), "slip=-1"),
                                           (dict(frequencies=(.5, .5)), "frequencies"), (dict(works=8), "works=8")))
def test_bad_dials_are_refused_by_name(dials, message):
    with pytest.raises(ValueError) as e: Countdown(**dials)
    assert message in str(e.value)
