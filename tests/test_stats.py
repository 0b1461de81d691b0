"Evaluation measures, intervals and verdicts: acceptance cases, plain loops and coverage."
import json, math, pickle, random, time, warnings
from fractions import Fraction
from itertools import combinations
import numpy as np, pytest, torch
from rlworkbench.stats import *

def test_a4_means_with_gaps():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nanmean([.5, math.nan, math.nan, .8, .6, .7]) == pytest.approx(.65)
        assert math.isnan(nanmean([math.nan, None]))
    assert np.mean(np.nan_to_num([.5, math.nan, math.nan, .8, .6, .7])) != pytest.approx(.65)   # zeros for gaps give .4333

def test_e1_pass_at_k_values():
    cases = {(10, 3, 5): .916667, (10, 3, 1): .3, (16, 2, 4): .45, (16, 5, 8): .987179, (5, 1, 2): .4}
    for (n, c, k), value in cases.items(): assert pass_at_k(n, c, k) == pytest.approx(value, abs=5e-7)
    n, c, k = np.array(list(cases)).T
    assert pass_at_k(n, c, k) == pytest.approx(list(cases.values()), abs=5e-7)
    for (n, c, k), wrong in {(10, 3, 5): .8319, (16, 2, 4): .4138}.items():   # the plug-in estimate is biased
        assert 1-(1-c/n)**k == pytest.approx(wrong, abs=5e-5) and abs(wrong-pass_at_k(n, c, k)) > .03

@pytest.mark.parametrize("case, value", [((2000, 7, 1000), .992269), ((200, 1, 100), .5), ((10_000, 1, 100), .01)])
def test_e2_large_counts(case, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pass_at_k(*case) == pytest.approx(value, abs=5e-7)
    took_s = min(_timed(lambda: pass_at_k(*case)) for _ in range(5))
    assert took_s < .01

def _timed(f):
    start = time.perf_counter(); f()
    return time.perf_counter()-start

def test_pass_at_k_equals_exact_fractions_and_enumeration():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(1, 60); c, k = rng.randint(0, n), rng.randint(1, n)
        assert pass_at_k(n, c, k) == pytest.approx(float(1-Fraction(math.comb(n-c, k), math.comb(n, k))), abs=1e-12)
    for n, c, k in ((5, 2, 3), (6, 1, 2), (6, 6, 1)):
        draws = list(combinations([1]*c+[0]*(n-c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws)/len(draws))

def test_e8_mean_over_problems():
    correct = np.array([[True]*10, [False]*10])
    assert mean_pass_at_k(correct, 2) == .5
    assert pass_at_k(20, 10, 2) == pytest.approx(.7632, abs=5e-5)   # pooling
    bar = problem_interval(pass_at_k_each(correct, 2))
    # values 1 and 0: sample std .7071, over sqrt(2): .5; t(.975, 1) = 12.706
    assert bar.n_problems == 2 and bar.n_seeds is None and bar.high-bar.mean == pytest.approx(12.706*.5, abs=1e-3)

def test_v15_partial_credit():
    scores = [.01, .05, .125, .4, 1.]
    assert correct_count(scores) == 1 and accuracy(scores) == pytest.approx(.2)
    assert pass_at_k(5, correct_count(scores), 1) == pytest.approx(.2)
    assert "threshold" in correct_count.__doc__
    assert mean_score(scores) == pytest.approx(.317)
    with pytest.raises(ValueError, match="correct_count"): pass_at_k(5, sum(scores), 1)

def test_v8_unscorable_leaves_numerator_and_denominator():
    assert accuracy([1., None, 0., math.nan]) == .5
    assert mean_pass_at_k([[1, 0, None], [None]*3], 1) == .5
    a, b = np.array([[1., 0., np.nan], [1., 1., np.nan]]), np.zeros((2, 3))
    i = paired_interval(a, b)
    assert i.mean == .75 and i.n_problems == 2 and not math.isnan(i.low)

def test_maj_at_k_equals_its_enumeration():
    rows, gold = [list("aabbc"), list("abcde"), ["a", None, None, "b", "b"]], ["a", "a", "b"]
    def vote(votes, right):
        counts = {}
        for v in votes:
            if v is not None: counts[v] = counts.get(v, 0)+1
        if not counts: return 0.
        best = [v for v in counts if counts[v] == max(counts.values())]
        return (right in best)/len(best)
    for k in range(1, 6):
        expected = np.mean([np.mean([vote(d, g) for d in combinations(r, k)]) for r, g in zip(rows, gold)])
        assert maj_at_k(rows, gold, k) == pytest.approx(expected)
        assert maj_at_k(rows, gold, k, n_draws=4) == maj_at_k(rows, gold, k, n_draws=4)   # drawn, and repeatable
    assert maj_at_k(rows, gold, 3, n_draws=9) == pytest.approx(maj_at_k(rows, gold, 3), abs=.2)

def test_global_generators_are_left_alone():
    np.random.seed(5); torch.manual_seed(5); random.seed(5)
    before = np.random.get_state()[1].copy(), torch.get_rng_state(), random.getstate()
    paired_interval(np.ones((2, 4)), np.zeros((2, 4))); maj_at_k([list("abcdefgh")], ["a"], 4, n_draws=3)
    assert (before[0] == np.random.get_state()[1]).all() and (before[1] == torch.get_rng_state()).all() and before[2] == random.getstate()

def test_auc_equals_the_loop_over_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        score, positive = rng.integers(0, 6, 30).astype(float), rng.random(30) < .4
        pairs = [(p > n)+.5*(p == n) for p in score[positive] for n in score[~positive]]
        assert auc(score, positive) == pytest.approx(np.mean(pairs))
        assert auc(-score, positive) == pytest.approx(1-np.mean(pairs))

@pytest.mark.parametrize("seed, S, N", [(0, 1, 5), (1, 2, 3), (2, 3, 20), (3, 8, 40)])
def test_paired_interval_equals_the_plain_loop(seed, S, N):
    rng = np.random.default_rng(seed)
    a, b = rng.random((S, N)), rng.random((S, N))
    if N > 10: a[0, 3] = b[1, 7] = np.nan
    draw = np.random.default_rng(9)
    seeds, problems, means = draw.integers(S, size=(300, S)), draw.integers(N, size=(300, N)), []
    for drawn_seeds, drawn_problems in zip(seeds, problems):
        cells = [a[i, j]-b[i, j] for i in drawn_seeds for j in drawn_problems]
        cells = [c for c in cells if not math.isnan(c)]
        means.append(sum(cells)/len(cells))
    i = paired_interval(a, b, n_boot=300, seed=9)
    assert [i.low, i.high] == pytest.approx(np.quantile(means, [.025, .975]), abs=1e-12)
    assert i.mean == pytest.approx(np.nanmean(a-b)) and i.n_seeds == S

def test_paired_interval_by_hand_and_invariant_to_order_and_type():
    b = np.array([[.2, .6, .4], [.1, .7, .3]])
    flat = paired_interval(b+.1, b)
    assert [flat.low, flat.mean, flat.high, flat.t_low, flat.t_high] == pytest.approx([.1]*5)
    a = torch.tensor(b+[[.1, .2, .3], [0., .1, .2]], requires_grad=True)
    # seed means .2 and .1: mean .15, std .0707, t(.975, 1)*std/sqrt(2) = 12.7062*.05
    i = paired_interval(a, b)
    assert [i.mean, i.t_low, i.t_high] == pytest.approx([.15, .15-.63531, .15+.63531], abs=1e-5)
    other = paired_interval(b, a)
    assert [other.low, other.high] == pytest.approx([-i.high, -i.low])    # swapped arms, mirrored interval
    assert paired_interval(a, b) == i                                     # repeatable
    assert paired_interval(b).mean == pytest.approx(b.mean())             # one arm alone

def test_paired_interval_is_narrower_than_an_unpaired_one():
    rng = np.random.default_rng(0)
    hard = rng.random((1, 60))                     # problems differ much, the arms little
    a, b = hard+.02*rng.normal(size=(4, 60))+.05, hard+.02*rng.normal(size=(4, 60))
    paired, alone = paired_interval(a, b), paired_interval(a)
    assert paired.high-paired.low < .2*(alone.high-alone.low)

def _covered(S, seed_std, problem_std, N=50, repeats=200, noise=.1, interval=paired_interval):
    "Shares of the bootstrap and of the t intervals that hold the true difference of .05."
    rng, hits, t_hits = np.random.default_rng(1), 0, 0
    for r in range(repeats):
        d = .05 + seed_std*rng.normal(size=(S, 1)) + problem_std*rng.normal(size=(1, N)) + noise*rng.normal(size=(S, N))
        low, high, t_low, t_high = interval(d, r)
        hits += low <= .05 <= high; t_hits += t_low <= .05 <= t_high
    return hits/repeats, t_hits/repeats

def _ours(d, seed):
    i = paired_interval(d, n_boot=300, seed=seed)
    return i.low, i.high, i.t_low, i.t_high

def _problems_drawn_per_seed(d, seed): # the tempting version
    rng, (S, N) = np.random.default_rng(seed), d.shape
    seeds, problems = rng.integers(S, size=(200, S)), rng.integers(N, size=(200, S, N))
    means = d[seeds[:, :, None], problems].mean((1, 2))
    return *np.quantile(means, [.025, .975]), 0., 0.

def test_coverage_where_problems_differ():
    for S in (3, 10):
        ours, _ = _covered(S, .02, .3, interval=_ours)
        assert .90 <= ours <= .98, f"{S} seeds: {ours}"
    tempting, _ = _covered(10, .02, .3, interval=_problems_drawn_per_seed)
    assert tempting < .75   # a draw per seed averages the problems away once too often

def test_coverage_where_seeds_differ():
    few, t_few = _covered(3, .1, .02, interval=_ours)
    assert few < .88 and .92 <= t_few <= .98      # three seeds: only the t interval is honest
    many, _ = _covered(12, .1, .02, interval=_ours)
    assert .88 <= many <= .98

def test_ratio_interval_by_hand():
    i = ratio_interval([80, 90], [100, 100])
    # logs -.22314 and -.10536: mean -.16425, half width 12.7062*.08328/sqrt(2) = .74826
    assert [math.log(i.mean), math.log(i.low), math.log(i.high)] == pytest.approx([-.16425, -.91251, .58401], abs=2e-4)
    assert math.isnan(ratio_interval([80], [100]).low) and decide(ratio_interval([80], [100]), "<= 0.85") == "undecided"

def test_curves_with_gaps_and_edges():
    assert area_under_curve([0, 1, 2], [0, None, 1]) == pytest.approx(.5)
    assert math.isnan(area_under_curve([], [])) and area_under_curve([5], [.3]) == .3
    assert tokens_to_target([0, 10], [.2, .2], .3) is None
    assert tokens_to_target([0, 10, 20], [.2, .6, .1], .4) == pytest.approx(5)   # the first time counts
    rng = np.random.default_rng(0)
    x, y = np.sort(rng.random(9)), rng.random(9)
    assert area_under_curve(x, y, normalise=False) == pytest.approx(sum((x[i+1]-x[i])*(y[i]+y[i+1])/2 for i in range(8)))

@pytest.mark.parametrize("rule, verdicts", [
    (">= -0.01", ["holds", "undecided", "does not hold here"]), ("> -0.01", ["undecided", "undecided", "does not hold here"]),
    ("≥ -.01", ["holds", "undecided", "does not hold here"]), ("<= -0.01", ["undecided", "undecided", "holds"]), ("< 1e-1", ["holds", "holds", "holds"])])
def test_decide_is_computed_from_the_whole_interval(rule, verdicts):
    assert [decide(i, rule) for i in ((-.01, .02), (-.02, .02), (-.03, -.02))] == verdicts

def test_verdict_is_a_string_that_files_can_hold():
    v = decide(paired_interval(np.full((3, 4), .2)), "> 0")
    assert json.loads(json.dumps({"verdict": v})) == {"verdict": "holds"} and v.rule == "> 0" and "t interval over 3 seeds" in v.reason
    again = pickle.loads(pickle.dumps(v))
    assert (again, again.rule, again.reason) == (v, v.rule, v.reason)
    with pytest.raises(ValueError, match="no verdict"): Verdict("maybe")
    stored = json.loads(json.dumps(paired_interval(np.full((1, 4), .2)).as_dict(), allow_nan=False))
    assert stored["n"] == {"seeds": 1, "problems": 4} and stored["t_interval"] == [None, None]

def test_one_seed_and_no_interval_stay_undecided():
    assert decide(paired_interval(np.ones((1, 50))), "> 0") == "undecided"
    assert decide(seed_interval([.3]), "> 0") == "undecided"
    assert decide((None, None), "> 0") == "undecided"
    assert decide(paired_interval(np.full((2, 3), np.nan)), "> 0") == "undecided"
    assert decide(paired_interval(np.ones((1, 50))), "> 0", min_seeds=1) == "holds"
    assert decide(problem_interval([.2, .2, .2]), "> 0") == "holds"   # a claim about problems alone

@pytest.mark.parametrize("rule", ["better", ">= ", "0.85", "== 1", "<= 0.85 x"])
def test_a_rule_that_cannot_be_read_is_refused(rule):
    with pytest.raises(ValueError, match="rule="): decide((0, 1), rule)

def test_all_of_is_as_weak_as_its_weakest_part():
    yes, no, open_ = decide((1, 2), "> 0"), decide((-2, -1), "> 0"), decide((-1, 1), "> 0")
    assert all_of(yes, yes) == "holds" and all_of(yes, open_) == "undecided" and all_of(yes, no, open_) == "does not hold here"
    assert all_of() == "undecided"

@pytest.mark.parametrize("call, message", [
    (lambda: paired_interval(np.ones((2, 3)), np.ones((3, 3))), "same seeds and problems"),
    (lambda: paired_interval(np.ones(3)), "seeds, problems"),
    (lambda: pass_at_k(3, 4, 1), "c must lie between"),
    (lambda: mean_pass_at_k([True, False], 1), "problems, samples"),
    (lambda: auc([1, 2], [1]), "one label per score"),
    (lambda: maj_at_k([["a"]], ["a", "b"]), "one gold answer per problem")])
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message): call()
